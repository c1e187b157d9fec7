"""Bytes that an earlier run measured, in a small JSON file; they replace the formulas.

::

    {"rlplace_memory": 1, "components": {"actor": {"off": 0, "weights": 83968, "full": 251980}}}

Each number is what the fullest rank held on each of its accelerators, in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlplace.config.show import show
from rlplace.errors import ConfigError, Problem, did_you_mean, suggestion
from rlplace.placement.memory.ledger import Measurements
from rlplace.placement.schedule import Residency

_VERSION_KEY, _VERSION = "rlplace_memory", 1
_WORDS = {residency.word: residency for residency in Residency}


def record_measurements(measured: Measurements) -> dict[str, object]:
    """What to write as JSON; `read_measurements` gives it back."""
    components = {c: {r.word: size for r, size in sorted(found.items())} for c, found in measured.items()}
    return {_VERSION_KEY: _VERSION, "components": components}


def read_measurements(record: object, *, key: str = "measured") -> Measurements:
    """Raises ConfigError with all problems at once. `key` names in errors where the record comes from."""
    if not isinstance(record, Mapping) or record.get(_VERSION_KEY) != _VERSION:
        why, fix = f"such a record has {_VERSION_KEY}: {_VERSION}", "use the memory.json of an earlier run's folder"
        raise ConfigError.of("not-measurements", key, "is no record of measured memory", show(record)[:60], why, fix)
    problems: list[Problem] = []
    found: dict[str, dict[Residency, int]] = {}
    for component, sizes in _block(record.get("components")).items():
        row = found.setdefault(str(component), {})
        for word, size in _block(sizes).items():
            if word in _WORDS and isinstance(size, int) and not isinstance(size, bool) and size >= 0:
                row[_WORDS[str(word)]] = size
            else:
                problems.append(_wrong(f"{key}.components.{component}", word, size))
    if problems:
        raise ConfigError(problems)
    return found


def _wrong(key: str, word: object, size: object) -> Problem:
    if word not in _WORDS:
        near = did_you_mean(str(word), _WORDS)
        return Problem(
            code="unknown-residency",
            key=key,
            what=f"no residency is called {word!r}" + suggestion(near),
            got=f"{word}: {show(size)}",
            why="memory is measured at the residencies " + ", ".join(_WORDS),
            fix=f"{near or 'full'}: <bytes>",
        )
    return Problem(
        code="bad-size",
        key=f"{key}.{word}",
        what="expected a whole number of bytes",
        got=show(size),
        why="it is what a rank held on each of its accelerators",
        fix=f"{word}: <bytes>        (or remove the line to have it computed)",
    )


def _block(value: object) -> Mapping[object, object]:
    """A value that should have been a block is one entry without a name, which is then rejected."""
    return value if isinstance(value, Mapping) else {"": value}

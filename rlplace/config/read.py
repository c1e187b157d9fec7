"""Turn a plain mapping into the config, collecting every problem instead of stopping at the first.

pydantic finds the keys that are wrong (validate.py); this module says of each what is expected and how to write it.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rlplace.config.keys import block_in, fields_of
from rlplace.config.kinds import find_kind
from rlplace.config.knob import ModelKind
from rlplace.config.renamed import replace_renamed
from rlplace.config.schema import Config
from rlplace.config.show import show
from rlplace.errors import ConfigError, Problem, Source, did_you_mean, source_of, suggestion

_T = TypeVar("_T")
_SIGNS = {"minimum": ">=", "above": ">", "maximum": "<=", "below": "<"}
_NOTHING: Any = object()  # a value that is not there


def read_config(mapping: Mapping[str, object], sources: Mapping[str, Source] | None = None) -> Config:
    """The config of a plain nested mapping (no OmegaConf types).

    `sources` maps key paths to where their values were written. Raises ConfigError with all problems at once.
    """
    config, problems = try_config(mapping, sources)
    if config is None or problems:
        raise ConfigError(problems)
    return config


def try_config(
    mapping: Mapping[str, object], sources: Mapping[str, Source] | None = None
) -> tuple[Config | None, list[Problem]]:
    """The config, None where it cannot be read, and every problem of the mapping."""
    places, found = sources or {}, Found(sources=sources or {})
    mapping = replace_renamed(mapping, found.reject)
    kind, mapping = find_kind(mapping, found.reject)
    config, problems = read_block(Config, mapping, kind, places)
    if config is not None and config.runs:
        for key, (why, fix) in config.missing.items():
            if not key.startswith("cluster."):  # the plan reports it with all else that is wrong there
                found.reject("missing-key", key, "is required in a run", why=why, fix=fix)
    return config, [*found.problems, *problems]


def read_block(
    block: type[_T], mapping: object, kind: ModelKind = "mlp", sources: Mapping[str, Source] | None = None
) -> tuple[_T | None, list[Problem]]:
    """An instance of a config dataclass, None where it cannot be read, and every problem of the mapping."""
    import pydantic  # here: workers read no configs

    from rlplace.config.validate import model_of, plain

    found = Found(sources=sources or {})
    written = _of_kind(block, mapping, kind, "", found)
    try:
        return plain(model_of(typing.cast(Any, block), kind).model_validate(written)), found.problems
    except pydantic.ValidationError as error:
        wrong = [_path(written, e["loc"], e["type"] == "missing") for e in error.errors(include_url=False)]
        for key in dict.fromkeys(wrong):
            _explain(block, written, kind, key, found)
        return None, found.problems


@dataclasses.dataclass(slots=True)
class Found:
    """Collects problems, each with the place of its key or of the nearest key above it."""

    sources: Mapping[str, Source]
    problems: list[Problem] = dataclasses.field(default_factory=list)

    def reject(
        self,
        code: str,
        key: str,
        what: str,
        value: object = _NOTHING,
        *,
        why: str | None = None,
        fix: str | None = None,
        got: str | None = None,
        span: tuple[int, int] | None = None,
    ) -> None:
        got = got if value is _NOTHING else show(value)
        source = source_of(key, self.sources)
        problem = Problem(code=code, key=key, what=what, got=got, span=span, source=source, why=why, fix=fix)
        if problem not in self.problems:
            self.problems.append(problem)


def _of_kind(block: type, mapping: object, kind: ModelKind, above: str, found: Found) -> object:
    """The mapping without keys of jobs with another kind of actor model: problems unless they change nothing."""
    if not isinstance(mapping, Mapping):
        return mapping
    ours, kept = fields_of(block, kind), {str(key): value for key, value in mapping.items()}
    for field in dataclasses.fields(block):
        key = above + field.name
        if field.name in mapping and field.name not in ours:
            value = kept.pop(field.name)
            factory = field.default_factory
            default: Any = field.default if factory is dataclasses.MISSING else factory()
            if dataclasses.is_dataclass(default) and not isinstance(default, type):
                default = dataclasses.asdict(default)
            if value != default:
                only = field.metadata["only"]
                why = f"only with actor.model.kind: {only}; this job has {kind}"
                found.reject("wrong-kind", key, f"is no key of a job with {kind}", value, why=why, fix=f"remove {key}")
        elif field.name in mapping and (below := block_in(ours[field.name][1])) is not None:
            kept[field.name] = _of_kind(below, kept[field.name], kind, f"{key}.", found)
    return kept


def _path(mapping: object, location: Iterable[Any], missing: bool) -> tuple[Any, ...]:
    """The keys and indices of an error's location, without the names of the alternatives that were tried."""
    path: list[Any] = []
    for step in location:
        inside = mapping[step] if isinstance(mapping, Mapping) and step in mapping else _NOTHING
        if isinstance(mapping, Sequence) and not isinstance(mapping, str) and isinstance(step, int):
            inside = mapping[step]
        if inside is _NOTHING and not (missing and not str(step).startswith("<")):
            continue
        path.append(step)
        mapping = {} if inside is _NOTHING else inside
    return tuple(path)


def _explain(block: type, mapping: Any, kind: ModelKind, path: Sequence[Any], found: Found) -> None:
    """Add the problem of the value at `path`."""
    hint: Any = block
    field: dataclasses.Field[Any] | None = None
    value, key = mapping, ""
    for step in path:
        inside = block_in(hint)
        fields = fields_of(inside, kind) if inside is not None else {}
        named = [name for name in value if name not in fields] if _is_named(hint, value) else []
        if isinstance(step, int):
            key, hint, value = f"{key}[{step}]", _item(hint), value[step]
            continue
        above, key = value, f"{key}.{step}" if key else str(step)
        value = value.get(step, _NOTHING) if isinstance(value, Mapping) else _NOTHING
        if named and step in fields:
            why = f"there is a block for each of {', '.join(map(str, named))}"
            fix = f"{named[0]}: {{{step}: {show(value)}}}        (in each block that it is meant for)"
            found.reject("wrong-type", key, "stands beside blocks under names", value, why=why, fix=fix)
            return
        if step in fields:
            field, hint = fields[step]
        elif named:
            hint = inside
        else:
            _unknown(str(step), above[step], key, fields, found)
            return
    rules = dict(field.metadata) if field is not None else {}
    if field is not None:
        rules["usual"] = rules.get("mlp", field.default) if kind == "mlp" else field.default
    if value is _NOTHING:
        found.reject("missing-key", key, "is required", why=rules.get("doc"))
    else:
        _wrong_value(hint, value, key or "config", rules, found)


def _is_named(hint: object, value: object) -> bool:
    """Whether these are blocks under names of one's own where one block could stand."""
    from rlplace.config.validate import has_names

    inside = block_in(hint)
    return inside is not None and hint is not inside and has_names(inside, value)


def _item(hint: object) -> object:
    """The type of a list's items."""
    options = (hint, *typing.get_args(hint))
    return next(typing.get_args(option)[0] for option in options if typing.get_origin(option) is tuple)


def _unknown(name: str, value: object, key: str, fields: Iterable[str], found: Found) -> None:
    near = did_you_mean(name, fields)
    found.reject(
        "unknown-key",
        key,
        "unknown key" + suggestion(near),
        got=f"{name}: {show(value)}",
        span=(0, len(name)),
        why="known keys here: " + ", ".join(fields),
        fix=f"{near}: {show(value)}" if near else f"remove {name}",
    )


def _wrong_value(hint: Any, value: object, key: str, rules: Mapping[str, Any], found: Found) -> None:
    """Add the problem of a value that its type or its bounds do not allow."""
    leaf = key.rpartition(".")[2]
    options = [o for o in typing.get_args(hint) if o is not type(None)] if _is_union(hint) else [hint]
    words = [word for o in options if typing.get_origin(o) is typing.Literal for word in typing.get_args(o)]
    kinds = [o for o in options if typing.get_origin(o) is not typing.Literal]
    if words and (not kinds or (isinstance(value, str) and str not in kinds)):
        _unknown_word(words, value, key, found, numbers=bool(kinds))
        return
    of = kinds[0]
    if rules.get("unit") == "bytes":
        _bad_size(value, key, found)
    elif block_in(of) is not None:
        first = dataclasses.fields(typing.cast(Any, block_in(of)))[0].name
        found.reject("wrong-type", key, "expected a block of keys", value, fix=f"{leaf}: {{{first}: ...}}")
    elif typing.get_origin(of) is tuple:
        items = value if isinstance(value, str) else show(value)
        found.reject("wrong-type", key, "expected a list", value, fix=f"{leaf}: [{items}]")
    elif typing.get_origin(of) is not None:
        fix = f"{leaf}: {{path: {value}}}" if leaf == "model" and isinstance(value, str) else None
        found.reject("wrong-type", key, "expected a block of keys", value, fix=fix)
    elif of is str:
        found.reject("wrong-type", key, "expected text", value, fix=f'{leaf}: "{show(value)}"')
    elif of is bool:
        found.reject("wrong-type", key, "expected true or false", value, fix=f"{leaf}: true")
    else:
        _wrong_number(of, value, key, rules, found)


def _is_union(hint: object) -> bool:
    return typing.get_origin(hint) is typing.Union or isinstance(hint, types.UnionType)


def _unknown_word(words: Sequence[object], value: object, key: str, found: Found, *, numbers: bool) -> None:
    """One of a few words, or of a few numbers, is expected."""
    near = did_you_mean(str(value), [str(word) for word in words])
    counts = [word for word in words if isinstance(word, int)]
    fits: object = near
    if near is None:
        number = isinstance(value, int) and not isinstance(value, bool) and counts
        fits = min(counts, key=lambda count: abs(count - typing.cast(int, value))) if number else words[0]
    kind = "word" if numbers else "choice"
    found.reject(
        "unknown-choice",
        key,
        f"unknown {kind}" + suggestion(near),
        value,
        why=("takes a number or one of: " if numbers else "choices: ") + ", ".join(show(word) for word in words),
        fix=f"{key.rpartition('.')[2]}: {show(fits)}",
    )


def _bad_size(value: object, key: str, found: Found) -> None:
    """The number that was written stays in the fix, with the unit that is nearest to what was written."""
    why = "a size is a number with a unit: KiB, MiB, GiB, TiB (or kB, MB, GB, TB), or a whole number of bytes"
    written = re.match(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)", str(value), re.IGNORECASE)
    fix = "16GiB"
    if written is not None and float(written[1]) > 0 and not isinstance(value, bool):
        fix = f"{written[1]}{(written[2] or 'G').upper()}iB"
    found.reject("bad-size", key, "expected a size", value, why=why, fix=f"{key.rpartition('.')[2]}: {fix}")


def _wrong_number(of: object, value: object, key: str, rules: Mapping[str, Any], found: Found) -> None:
    leaf, usual = key.rpartition(".")[2], rules.get("usual")
    known = f"{leaf}: {show(usual)}" if isinstance(usual, (int, float)) and not isinstance(usual, bool) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (of is int and not _is_whole(value)):
        if isinstance(value, str) and (number := _as_number(value, of)) is not None:
            known = f"{leaf}: {number}"
        what = "expected a whole number" if of is int else "expected a number"
        found.reject("wrong-type", key, what, value, fix=known)
        return
    try:
        finite = math.isfinite(value)
    except OverflowError:  # a whole number beyond the range of a float
        finite = of is int
    if not finite:
        found.reject("out-of-bounds", key, "must be finite", value)
        return
    rule = " and ".join(f"{sign} {rules[bound]}" for bound, sign in _SIGNS.items() if bound in rules)
    legal = usual if isinstance(usual, (int, float)) else "<a number that is>"
    if "minimum" in rules and value < rules["minimum"]:
        legal = rules["minimum"]
    elif "maximum" in rules and value > rules["maximum"]:
        legal = rules["maximum"]
    found.reject("out-of-bounds", key, f"must be {rule}", value, fix=f"{leaf}: {show(legal)}")


def _is_whole(value: float) -> bool:
    return isinstance(value, int) or value.is_integer()


def _as_number(text: str, of: object) -> str | None:
    """The number that a text means, as YAML reads it: 3e-4 without a point is text in YAML 1.1."""
    if re.fullmatch(r"\s*[-+]?[0-9]+\s*", text):
        return text.strip()
    try:
        number = float(text)
    except ValueError:
        return None
    mantissa, exponent, power = text.lower().partition("e")
    return None if of is int or not math.isfinite(number) else f"{mantissa}.0e{power}" if exponent else text

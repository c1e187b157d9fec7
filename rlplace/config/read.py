"""Turn a plain mapping into the config, collecting every problem instead of stopping at the first."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rlplace.config.fields import Field, ModelKind, block_in, default_of, fields_of
from rlplace.config.kinds import find_kind
from rlplace.config.renamed import replace_renamed
from rlplace.config.schema import Config
from rlplace.config.show import show
from rlplace.errors import ConfigError, Problem, Source, did_you_mean, source_of, suggestion

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_T = TypeVar("_T")
_NOTHING: Any = object()  # a value that is not there


def read_config(mapping: Mapping[str, object], sources: Mapping[str, Source] | None = None) -> Config:
    """Read the config from a plain nested mapping (no OmegaConf types).

    `sources` maps key paths to where their values were written. Raises ConfigError with all problems at once.
    """
    config, problems = try_config(mapping, sources)
    if config is None or problems:
        raise ConfigError(problems)
    return config


def try_config(
    mapping: Mapping[str, object], sources: Mapping[str, Source] | None = None
) -> tuple[Config | None, list[Problem]]:
    """Return the config, None where it cannot be read, and every problem of the mapping."""
    places, found = sources or {}, Found(sources=sources or {})
    mapping, renamed = replace_renamed(mapping, found.reject)
    kind, mapping = find_kind(mapping, found.reject)
    config, problems = read_block(Config, mapping, kind, places)
    if config is not None and config.runs:
        for key, (why, fix) in config.missing.items():
            if not key.startswith("cluster."):  # the plan reports it with all else that is wrong there
                found.reject("missing-key", key, "is required in a run", why=why, fix=fix)
    new = {problem.key: problem for problem in problems}
    for i, problem in enumerate(found.problems):  # a value that the new key refuses: take the fix of that
        if problem.code == "renamed-key" and (refused := new.get(renamed.get(problem.key, ""))) is not None:
            instead = f"remove {problem.key}" if refused.code == "wrong-kind" else refused.fix
            found.problems[i] = dataclasses.replace(problem, why=refused.what, fix=instead)
            problems.remove(refused)
    return config, [*found.problems, *problems]


def read_block(
    block: type[_T], mapping: object, kind: ModelKind = "mlp", sources: Mapping[str, Source] | None = None
) -> tuple[_T | None, list[Problem]]:
    """Return a config dataclass, None where it cannot be read, and every problem of the mapping."""
    import pydantic  # here: workers read no configs

    from rlplace.config.validate import model_of, plain

    found = Found(sources=sources or {})
    written = _of_kind(block, block, mapping, kind, "", found)
    try:
        return plain(model_of(cast(Any, block), kind).model_validate(written)), found.problems
    except pydantic.ValidationError as error:
        for wrong in error.errors(include_url=False):
            _report(block, kind, wrong, written, found)
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


def _of_kind(
    ours: type | None, theirs: type | None, mapping: object, kind: ModelKind, above: str, found: Found
) -> object:
    """Drop keys that only jobs with the other kind of actor model have.

    They are problems unless they change nothing. `ours` and `theirs` are the block in jobs of this and the other kind.
    """
    if not isinstance(mapping, Mapping) or ours is None:
        return mapping
    other: ModelKind = "mlp" if kind == "causal_lm" else "causal_lm"
    here, there = fields_of(ours, kind), {} if theirs is None else fields_of(theirs, other)
    kept: dict[str, object] = {}
    for name, value in mapping.items():
        key = f"{above}{name}"
        if name in here or name not in there:
            inside = [block_in(fields[name][1]) if name in fields else None for fields in (here, there)]
            kept[str(name)] = _of_kind(inside[0], inside[1], value, kind, f"{key}.", found)
        elif value != default_of(there[name][0], other):
            why = f"only with actor.model.kind: {other}; this job has {kind}"
            found.reject("wrong-kind", key, f"is no key of a job with {kind}", value, why=why, fix=f"remove {key}")
    return kept


def _report(block: type, kind: ModelKind, wrong: ErrorDetails, written: Any, found: Found) -> None:
    """Add the problem of one of pydantic's errors."""
    path = [step for step in wrong["loc"] if not str(step).startswith("<")]  # without the alternatives of a type
    key = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".") or "config"
    leaf, value = key.rpartition(".")[2], wrong["input"]
    above = functools.reduce(lambda of, step: _block_below(of, kind, step), path[:-1], block)
    if wrong["type"] == "missing":
        field, _ = fields_of(above, kind)[str(path[-1])]
        found.reject("missing-key", key, "is required", why=field.metadata.get("doc"))
    elif wrong["type"] in ("extra_forbidden", "invalid_key"):  # invalid: a number, or a word that YAML reads as one
        _unknown(leaf, value, key, fields_of(above, kind), kind, found)
    elif wrong["type"] == "model_type":
        below = _block_below(above, kind, path[-1]) if path else above
        if wrong["loc"][-2:-1] == ("<names>",) and leaf in fields_of(below, kind):
            beside = functools.reduce(lambda of, step: of[step], path[:-1], written)
            names = [name for name in beside if name not in fields_of(below, kind)]
            why = f"there is a block for each of {', '.join(map(str, names))}"
            fix = f"{names[0]}: {{{leaf}: {show(value)}}}        (in each block that it is meant for)"
            found.reject("wrong-type", key, "stands beside blocks under names", value, why=why, fix=fix)
        else:
            fix = f"{leaf}: {{{next(iter(fields_of(below, kind)))}: ...}}"
            found.reject("wrong-type", key, "expected a block of keys", value, fix=fix)
    else:
        context = wrong["ctx"]
        fits = None if context["fix"] is None else f"{leaf}: {context['fix']}"
        found.reject(wrong["type"], key, context["what"], value, why=context["why"], fix=fits)


def _block_below(block: type, kind: ModelKind, step: int | str) -> type:
    """Return the block of a key; an index or a name of the user's own leads to a block of the same type."""
    fields = fields_of(block, kind)
    return (block_in(fields[step][1]) or block) if isinstance(step, str) and step in fields else block


def _unknown(name: str, value: object, key: str, fields: Mapping[str, Field], kind: ModelKind, found: Found) -> None:
    blocks = {block: block_in(hint) for block, (_, hint) in fields.items()}
    inside = {below: name for name, block in blocks.items() if block is not None for below in fields_of(block, kind)}
    near = did_you_mean(name, fields)
    if near is not None:
        fix = f"{near}: {show(value)}"
    elif (near := did_you_mean(name, inside)) is not None:
        fix = f"{inside[near]}: {{{near}: {show(value)}}}"
    else:
        fix = f"remove {name}"
    got, why = f"{name}: {show(value)}", "known keys here: " + ", ".join(fields)
    found.reject("unknown-key", key, "unknown key" + suggestion(near), got=got, span=(0, len(name)), why=why, fix=fix)

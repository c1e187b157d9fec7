"""Fields of config blocks: the meaning, default and rules of each, for the reader and the JSON Schema."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Sequence
from typing import Any, Literal, TypedDict

JobName = Literal["simulator", "language_model"]
Dtype = Literal["fp32", "bf16", "fp16"]
Field = tuple["dataclasses.Field[Any]", object]  # (field, its type)


def knob(doc: str, default: Any = dataclasses.MISSING, **rules: Any) -> Any:
    """Return a dataclass field for a config key, with the meaning of the key and rules for its value.

    `doc`: the meaning, one line. `default`: a value, or a type that is called for the default of each block; without
    it, the key is required. `rules`: `minimum`, `above`, `maximum` and `below` bound a number. `unit="bytes"` allows
    texts like `16GiB`; `unit="share or bytes"` also allows texts like `5 %`; with `unit="share"`, the error about a
    number above 1 proposes to divide it by 100. `only`: the only kind of job that has this key. `simulator`: the
    default in a job on simulators, if it differs. `by_job`: kind of job -> type, if the type differs. `zero`: (why,
    fix) for the error about the value 0. `module`: the module that fixes propose for a class without one. `users`: the
    algorithms that use the key, if not all do; the meaning begins with their names.
    """
    if "users" in rules:
        doc = f"{', '.join(rules['users'])}: {doc}"
    metadata = {"doc": doc, **rules}
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def block(kind: type, **rules: Any) -> Any:
    """Return a dataclass field for a config block with the dataclass `kind`. The default is `kind()`."""
    return dataclasses.field(default_factory=kind, metadata=rules)


def lm_knob(doc: str, default: Any, **rules: Any) -> Any:
    """Return a dataclass field for a config key that only jobs on language models have.

    `doc`: the meaning of the key. `default`: its default. `rules`: rules for its value; `knob` lists them.
    """
    return knob(doc, default, only="language_model", **rules)


def simulator_knob(doc: str, default: Any, **rules: Any) -> Any:
    """Return a dataclass field for a config key that only jobs on simulators have.

    `doc`: the meaning of the key. `default`: its default. `rules`: rules for its value; `knob` lists them.
    """
    return knob(doc, default, only="simulator", **rules)


class ByJob(TypedDict):
    """Kind of job -> type of a config key, for a key with different types in the two kinds of jobs."""

    simulator: Any
    language_model: Any


def jobs() -> tuple[JobName, ...]:
    """Return the kinds of jobs that a `Config` can describe: "simulator" and "language_model"."""
    return typing.get_args(JobName)


def other_job(job: JobName) -> JobName:
    """Return "language_model" for "simulator", and "simulator" for "language_model"."""
    return next(name for name in jobs() if name != job)


def subject_of(job: JobName) -> str:
    """Return what a kind of job is about, for texts: "simulators" or "language models"."""
    return f"{job.replace('_', ' ')}s"


@functools.cache
def fields_of(of: type, job: JobName) -> dict[str, Field]:
    """Return name -> (field, type), for each field that a config block has in this kind of job.

    `of`: dataclass of the block.
    """
    hints = typing.get_type_hints(of)
    return {
        f.name: (f, f.metadata.get("by_job", {}).get(job, hints[f.name]))
        for f in dataclasses.fields(of)
        if f.metadata.get("only", job) == job
    }


def default_of(field: dataclasses.Field[Any], job: JobName) -> Any:
    """Return the default of a config field in this kind of job.

    The default of a required field is `dataclasses.MISSING`; the default of a block is returned as a dict.
    """
    if field.default_factory is not dataclasses.MISSING:
        made = field.default_factory()
        if dataclasses.is_dataclass(made) and not isinstance(made, type):
            return dataclasses.asdict(made)
        return made
    return field.metadata.get(job, field.default)


def users_of(block: Any, name: str) -> tuple[str, ...]:
    """Return the algorithms that use a key of a config block; () if all do, or it is said elsewhere."""
    (field,) = (each for each in dataclasses.fields(block) if each.name == name)
    users: tuple[str, ...] = field.metadata.get("users", ())
    return users


def own_values(block: Any) -> dict[str, Any]:
    """Return name -> value, for each key of a config block whose value is not its default."""
    values = {}
    for field in dataclasses.fields(block):
        value = getattr(block, field.name)
        usual = field.default
        if field.default_factory is not dataclasses.MISSING:
            usual = field.default_factory()
        if value != usual:
            values[field.name] = value
    return values


@functools.cache
def blocks_in(hint: object) -> tuple[type, ...]:
    """Return the dataclasses in the type `hint`: the type itself if it is one, else the dataclasses in its union."""
    return tuple(
        k
        for k in (hint, *typing.get_args(hint))
        if isinstance(k, type) and dataclasses.is_dataclass(k)
    )


def block_in(hint: object) -> type | None:
    """Return the first dataclass in the type `hint`, the default alternative of a union; None without a dataclass."""
    return next(iter(blocks_in(hint)), None)


def tag_of(block: type) -> str:
    """Return the value of the key `kind` that selects this block among several alternative blocks."""
    return str(next(f.default for f in dataclasses.fields(block) if f.name == "kind"))


def block_at(block: type, job: JobName, path: Sequence[int | str]) -> type:
    """Return the dataclass of the config block at a path.

    `block`: dataclass of the block at which the path begins. `job`: the kind of job. `path`: keys, list indexes, and
    kinds. If a key has several alternative blocks, the next step may be "<kind>" and selects the block of this kind;
    without such a step, the first alternative is taken.
    """
    others: tuple[type, ...] = ()
    for step in path:
        if str(step).startswith("<"):
            block = next(
                (other for other in others if f"<{tag_of(other)}>" == step), block
            )
            continue
        fields = fields_of(block, job)
        below = (
            blocks_in(fields[step][1])
            if isinstance(step, str) and step in fields
            else ()
        )
        others = below if len(below) > 1 else ()
        block = next(iter(below), block)
    return block


def block_below(block: type, job: JobName, step: int | str) -> type:
    """Return the dataclass of the block under the key `step` of a block.

    `block`: dataclass of the outer block. If `step` is a list index, a name that the user has chosen, or the key of a
    plain value, return `block`.
    """
    fields = fields_of(block, job)
    if isinstance(step, str) and step in fields:
        return block_in(fields[step][1]) or block
    return block

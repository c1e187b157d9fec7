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
    """Return a config field with its meaning and its rules.

    `doc`: the meaning, one line. `default`: a value, or a type that is called to make the default of each block;
    without it, the field is required. `rules`: `minimum`, `above`, `maximum` and `below` bound a number. `unit="bytes"`
    reads `16GiB`; `unit="share or bytes"` also reads `5 %`; with `unit="share"`, the error about a number above 1
    proposes to divide it by 100. `only`: the one job that has this key. `simulator`: the default in a job on
    simulators, if it differs. `by_job`: job -> type, if the type differs. `zero`: (why, fix) of the error about the
    value 0, where the minimum is above 0.
    """
    metadata = {"doc": doc, **rules}
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def block(kind: type, **rules: Any) -> Any:
    """Return a config field for a block; its default is `kind()`."""
    return dataclasses.field(default_factory=kind, metadata=rules)


def lm_knob(doc: str, default: Any, **rules: Any) -> Any:
    """Return a config field that only jobs on language models have. The arguments have the meaning as in `knob`."""
    return knob(doc, default, only="language_model", **rules)


def simulator_knob(doc: str, default: Any, **rules: Any) -> Any:
    """Return a config field that only jobs on simulators have. The arguments have the meaning as in `knob`."""
    return knob(doc, default, only="simulator", **rules)


class ByJob(TypedDict):
    """The types of one config key in the two kinds of jobs, for a key whose type depends on the kind of job."""

    simulator: Any
    language_model: Any


def jobs() -> tuple[JobName, ...]:
    """Return the kinds of jobs that a `Config` can describe: "simulator" and "language_model"."""
    return typing.get_args(JobName)


def other_job(job: JobName) -> JobName:
    """Return the other kind of job: "language_model" for "simulator", and the reverse."""
    return next(name for name in jobs() if name != job)


def subject_of(job: JobName) -> str:
    """Return the subject of a job, such as "simulators" in "a job on simulators"."""
    return f"{job.replace('_', ' ')}s"


@functools.cache
def fields_of(of: type, job: JobName) -> dict[str, Field]:
    """Return the fields that a block has in this job: name -> (field, type).

    `of`: dataclass of the block.
    """
    hints = typing.get_type_hints(of)
    return {
        f.name: (f, f.metadata.get("by_job", {}).get(job, hints[f.name]))
        for f in dataclasses.fields(of)
        if f.metadata.get("only", job) == job
    }


def default_of(field: dataclasses.Field[Any], job: JobName) -> Any:
    """Return the default of a field in this job; MISSING for a required field. A block is returned as a dict."""
    if field.default_factory is not dataclasses.MISSING:
        made = field.default_factory()
        if dataclasses.is_dataclass(made) and not isinstance(made, type):
            return dataclasses.asdict(made)
        return made
    return field.metadata.get(job, field.default)


def blocks_in(hint: object) -> tuple[type, ...]:
    """Return the dataclasses in a type: the type itself, or its alternatives that are dataclasses."""
    return tuple(
        k
        for k in (hint, *typing.get_args(hint))
        if isinstance(k, type) and dataclasses.is_dataclass(k)
    )


def block_in(hint: object) -> type | None:
    """Return the first dataclass in a type, which is the default alternative; None if the type has no dataclass."""
    return next(iter(blocks_in(hint)), None)


def tag_of(block: type) -> str:
    """Return the `kind` of a block, which distinguishes it from its alternatives."""
    return str(next(f.default for f in dataclasses.fields(block) if f.name == "kind"))


def block_at(block: type, job: JobName, path: Sequence[int | str]) -> type:
    """Return the dataclass of the config block at a path.

    `block`: dataclass where the path begins. `job`: job whose fields count. `path`: keys of the path. If a key has
    several alternative blocks, the next step of the path may be "<kind>", which selects one of them; otherwise it is
    the first.
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
    """Return the dataclass of the block at a key of a block.

    `block`: dataclass of the outer block. `step`: the key; for an index or a name that the user chose, return `block`.
    """
    fields = fields_of(block, job)
    if isinstance(step, str) and step in fields:
        return block_in(fields[step][1]) or block
    return block

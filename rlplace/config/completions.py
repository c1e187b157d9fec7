"""The keys of a config that a command line can override, with the values of those that have few."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator

from rlplace.config.fields import JobName, blocks_in, default_of, fields_of, jobs
from rlplace.config.of_job import config_of


def override_keys() -> dict[str, tuple[str, ...]]:
    """Return the dotted name of each key, with its values as words of a command line; no values: any value.

    Keys of all kinds of jobs are returned, in alphabetical order. A key below a list is not: no override names it.
    """
    found: dict[str, tuple[str, ...]] = {}
    for job in jobs():
        for name, values in _keys_of(config_of(job), job, ""):
            known = found.get(name, ())
            added = [value for value in values if value not in known]
            found[name] = (*known, *added)
    return dict(sorted(found.items()))


def _keys_of(
    block: type, job: JobName, prefix: str
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the keys below a block, with their values. `prefix`: dotted name of the block, with a dot at its end."""
    for name, (field, hint) in fields_of(block, job).items():
        inner = blocks_in(hint)
        is_list = default_of(field, job) == ()
        if not inner or is_list:
            yield f"{prefix}{name}", _values(hint)
        if not is_list:
            for one in inner:
                yield from _keys_of(one, job, f"{prefix}{name}.")


def _values(hint: object) -> tuple[str, ...]:
    """Return the values of a type as words of a command line; none for a type of numbers, texts or lists."""
    if typing.get_origin(hint) is typing.Literal:
        return tuple(str(value) for value in typing.get_args(hint))
    if hint is bool:
        return ("true", "false")
    if hint is type(None):
        return ("null",)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        words: list[str] = []
        for one in typing.get_args(hint):
            words += [word for word in _values(one) if word not in words]
        return tuple(words)
    return ()

"""The paths of all keys that a config may have."""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Iterator

from rlplace.config.fields import JobName, block_at, blocks_in, fields_of, jobs
from rlplace.config.of_job import config_of, named_configs

PLACEMENT = "cluster.component_placement"
# Presets that place all components
PRESETS_OF_ALL = ("hybrid", "colocate_all", "disaggregated")
# Components that a config may place
COMPONENTS = (
    "actor",
    "rollout",
    "env",
    "critic",
    "reference",
    "teacher",
    "reward",
    "agent",
)
# Text that says where a component is: numbers, ranges, shares and words, with commas between them
_SHARE = r"(?:all|part *[0-9]+ */ *[0-9]+)(?: *of *[0-9]+)?"
_PLACE = rf" *(?:{_SHARE}|rest|cpu|[0-9]+(?: *- *[0-9]+)?) *"
_PLACES = re.compile(rf"{_PLACE}(?:,{_PLACE})*")


def all_places(job: JobName) -> tuple[str, ...]:
    """Return the paths, such as `actor.optimizer.lr`, of all keys that a config of this kind of job may have."""
    return places_in(config_of(job), job)


@functools.cache
def places_in(config: type, job: JobName) -> tuple[str, ...]:
    """Return the paths of all keys that a config of the type `config` may have. `job`: the kind of job."""

    def inside(block: type, above: str) -> Iterator[str]:
        for name, (_, hint) in fields_of(block, job).items():
            yield f"{above}{name}"
            for below in blocks_in(hint):
                yield from inside(below, f"{above}{name}.")

    return tuple(dict.fromkeys(inside(config, "")))


@functools.cache
def item_blocks() -> tuple[str, ...]:
    """Return the paths of keys with a list of blocks, such as `cluster.nodes`; a dot is at the end of each."""
    found: dict[str, None] = {}
    for job in jobs():
        for place in all_places(job):
            above, _, name = place.rpartition(".")
            path = above.split(".") if above else ()
            fields = fields_of(block_at(config_of(job), job, path), job)
            hint = fields[name][1] if name in fields else None
            if typing.get_origin(hint) is tuple and blocks_in(hint):
                found[f"{place}."] = None
    return tuple(found)


def every_place() -> tuple[str, ...]:
    """Return the paths of all keys that a config may have, for all shipped kinds of jobs known by their components."""
    return tuple(dict.fromkeys(place for job in jobs() for place in all_places(job)))


def places_of(name: str) -> list[str]:
    """Return the paths of all config keys with the last part `name`."""
    return [place for place in every_place() if place.rpartition(".")[2] == name]


@functools.cache
def takes_list(key: str) -> bool:
    """Return whether the value of `key` may contain commas: it may be a list, or is the placement of a component."""
    above, _, name = key.rpartition(".")
    if above == PLACEMENT:
        return True
    path = above.split(".") if above else ()
    configs = [(config_of(job), job) for job in jobs()]
    # A job that is named has the keys of either kind
    configs += [(config, jobs()[0]) for config in named_configs().values()]
    hints = []
    for config, job in configs:
        # Of a model, the blocks of all its kinds
        blocks = [config]
        for step in path:
            below = [
                inside
                for block in blocks
                if step in fields_of(block, job)
                for inside in blocks_in(fields_of(block, job)[step][1])
            ]
            blocks = below or blocks
        for block in blocks:
            if name in fields_of(block, job):
                hints.append(fields_of(block, job)[name][1])
    return any(
        typing.get_origin(option) is tuple
        for hint in hints
        for option in (hint, *typing.get_args(hint))
    )


def is_place(value: object) -> bool:
    """Return whether a value can only say where a component is: `0-7`, `all`, or a list such as [0-3, 5]."""
    if isinstance(value, list):
        return bool(value) and all(is_place(item) for item in value)
    if isinstance(value, bool) or not isinstance(value, int | str):
        return False
    return _PLACES.fullmatch(str(value)) is not None

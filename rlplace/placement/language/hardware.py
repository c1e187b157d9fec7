"""`hardware` of a node group: pieces that are no accelerators, numbered by node and then as written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rlplace.errors import Problem, Source, did_you_mean
from rlplace.placement.language.written import check_keys, source_of, write_down
from rlplace.placement.machines.pools import HardwareItem
from rlplace.placement.machines.ranges import Ranges
from rlplace.structure import Reader, show


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Franka:
    """What the controller of a Franka arm is told."""

    robot_ip: str
    camera_serials: tuple[str, ...] = ()
    node_rank: int = dataclasses.field(metadata={"minimum": 0})


# Types whose configs are checked key by key; the config of any other type is kept as it is.
TYPES: Mapping[str, type[Any]] = {"Franka": Franka}


def read_hardware(
    block: object, members: Ranges, path: str, sources: Mapping[str, Source]
) -> tuple[list[HardwareItem], list[Problem]]:
    """The items of one group, numbered."""
    if not isinstance(block, Mapping):
        return [], [_bad(path, "expected a block of keys", block, sources)]
    problems = check_keys(block, ("type", "configs"), path, sources)
    type_, configs = block.get("type"), block.get("configs")
    if not isinstance(type_, str) or not type_:
        return [], [*problems, _bad(f"{path}.type", "expected the name of a type", type_, sources)]
    if (near := did_you_mean(type_, TYPES)) and type_ not in TYPES:
        written = write_down(path, "type", type_, sources)
        what = f"unknown type, did you mean {near!r}?"
        return [], [*problems, written.whole("unknown-hardware", what, "types are case sensitive", f"type: {near}")]
    if not isinstance(configs, Sequence) or isinstance(configs, str) or not configs:
        return [], [
            *problems,
            _bad(f"{path}.configs", "expected a list with one block for each item", configs, sources),
        ]
    found: list[tuple[int, Mapping[str, object]]] = []
    for i, config in enumerate(configs):
        node, wrong = _read_item(type_, config, members, f"{path}.configs[{i}]", sources)
        problems += wrong
        if not wrong:
            found.append((node, config))
    found.sort(key=lambda entry: entry[0])
    return [
        HardwareItem(number=i, node=node, type=type_, config=config) for i, (node, config) in enumerate(found)
    ], problems


def _read_item(
    type_: str, config: object, members: Ranges, path: str, sources: Mapping[str, Source]
) -> tuple[int, list[Problem]]:
    if not isinstance(config, Mapping):
        return 0, [_bad(path, "expected a block of keys", config, sources)]
    if type_ in TYPES:
        reader = Reader(sources=sources)
        reader.read(TYPES[type_], config, path)
        if reader.problems:
            return 0, reader.problems
    node = config.get("node_rank")
    if isinstance(node, bool) or not isinstance(node, int) or node not in members:
        written = write_down(path, "node_rank", node, sources)
        what = "says no node" if node is None else f"node {show(node)} is not in the group"
        fix = f"node_rank: {next(iter(members))}"
        return 0, [written.whole("node-outside-group", what, f"the group has nodes {members}", fix)]
    return node, []


def _bad(key: str, what: str, value: object, sources: Mapping[str, Source]) -> Problem:
    return Problem(
        code="bad-hardware",
        key=key,
        what=what,
        got=show(value),
        source=source_of(key, sources),
        why="hardware has a type, and configs with one block for each item",
        fix="hardware: {type: Franka, configs: [{robot_ip: 10.0.0.1, node_rank: 0}]}",
    )

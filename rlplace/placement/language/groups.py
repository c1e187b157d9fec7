"""`cluster.node_groups` -> labelled nodes, what the numbers of each group count, and the surroundings of its processes.

::

    node_groups:
      - {label: a800, node_ranks: 0-7, env_configs: [{node_ranks: 0-7, env_vars: [{GLOO_SOCKET_IFNAME: eth0}]}]}
      - {label: cpu, node_ranks: 8-9, ignore_hardware: true}              numbers are nodes
      - {label: franka, node_ranks: 10, hardware: {type: Franka, configs: [{robot_ip: 10.0.0.1, node_rank: 10}]}}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from rlplace.errors import Problem, Source, did_you_mean
from rlplace.placement.language.environments import read_environments
from rlplace.placement.language.fit import check_exist
from rlplace.placement.language.grammar import read_segments
from rlplace.placement.language.hardware import read_hardware
from rlplace.placement.language.slots import Surroundings
from rlplace.placement.language.written import Written, check_keys, source_of, write_down
from rlplace.placement.machines.pools import (
    ANY_NODE,
    WHOLE_CLUSTER,
    HardwareItem,
    Pool,
    accelerator_pool,
    hardware_pool,
    joined_pool,
    node_pool,
    whole_cluster,
)
from rlplace.placement.machines.ranges import Mistake, Ranges, split_at, stripped
from rlplace.placement.machines.topology import Topology
from rlplace.structure import show

PATH = "cluster.node_groups"
_KEYS = ("label", "node_ranks", "env_configs", "hardware", "ignore_hardware")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Some nodes under one label."""

    label: str
    nodes: Ranges
    pool: Pool
    surroundings: Mapping[int, Surroundings]  # node rank -> what its processes find there; only where declared


class NodeGroups:
    """All node groups of a cluster, the two reserved ones included. Never changes."""

    def __init__(self, topology: Topology, groups: Sequence[NodeGroup] = ()) -> None:
        self.topology = topology
        self.groups = {g.label: g for g in groups}
        self._pools = {WHOLE_CLUSTER: whole_cluster(topology), ANY_NODE: node_pool(topology.nodes)}
        self._pools |= {g.label: g.pool for g in groups}
        self.surroundings = {(g.label, node): s for g in groups for node, s in g.surroundings.items()}

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self._pools)

    def __getitem__(self, label: str) -> Pool:
        """What the numbers of one group, or of several joined by commas, count. Raises KeyError for no such label."""
        if label not in self._pools:
            self._pools[label] = joined_pool([self._pools[part] for part in label.split(",")], label)
        return self._pools[label]

    def read(self, written: Written) -> tuple[Pool | None, list[Problem]]:
        """The pool that a `node_group` value names: one label, several with commas, or a list of them."""
        parts = list(_labels(written))
        problems = [p for i, (at, label) in enumerate(parts) if (p := self._wrong(written, at, label, parts[:i]))]
        if problems or not parts:
            return None, problems or [
                written.whole("unknown-node-group", "names no node group", self._known(), written.line(self.labels[-1]))
            ]
        pools = [self._pools[label] for _, label in parts]
        if len({p.noun for p in pools}) > 1:
            what = "mixes " + " and ".join(f"{p.noun}s ({p.label})" for p in pools)
            why = "the numbers of one placement count one kind of thing"
            return None, [written.whole("mixed-node-groups", what, why, written.line(parts[0][1]))]
        seen: set[int] = set()
        for (at, label), pool in zip(parts, pools, strict=True):
            nodes = {s.node for s in pool.stretches}
            if both := sorted(seen & nodes):
                mistake = Mistake(
                    code="overlapping-node-groups",
                    what=f"node {both[0]} is in {label} and in a group before it",
                    span=at,
                    why="groups that are joined have no node in common, else its accelerators had two numbers",
                )
                return None, [written.problem(mistake, fix=written.line(parts[0][1]))]
            seen |= nodes
        return self[",".join(label for _, label in parts)], []

    def _wrong(
        self, written: Written, at: tuple[int, int], label: str, before: Sequence[tuple[tuple[int, int], str]]
    ) -> Problem | None:
        if label in (known for _, known in before):
            left = [known for _, known in before]
            mistake = Mistake(
                code="node-group-repeated",
                what=f"node group {label} is named twice",
                span=at,
                why="several groups are joined one after the other, and an accelerator has one number",
            )
            return written.problem(mistake, fix=written.line(",".join(left)))
        if label in self._pools and "," not in label:
            return None
        near = did_you_mean(label, self.labels)
        hint = f", did you mean {near!r}?" if near else ""
        mistake = Mistake(
            code="unknown-node-group", what=f"there is no node group {label!r}{hint}", span=at, why=self._known()
        )
        text = written.text[: at[0]] + (near or WHOLE_CLUSTER) + written.text[at[1] :]
        return written.problem(mistake, fix=written.line(text))

    def _known(self) -> str:
        return "the node groups of this cluster are " + ", ".join(label for label in self._pools if "," not in label)


def _labels(written: Written) -> Iterator[tuple[tuple[int, int], str]]:
    """Columns and text of each label; a label may be a number in YAML."""
    for start, stop, item in written.items:
        for part in split_at(written.text, ",", start, stop) if isinstance(item, str) else [(start, stop)]:
            at = stripped(written.text, *part)
            label = written.text[at[0] : at[1]].strip()
            if label:
                yield at, label


def read_node_groups(
    blocks: Sequence[object], topology: Topology, sources: Mapping[str, Source]
) -> tuple[NodeGroups, list[Problem]]:
    """The groups that are declared rightly, and the problems of the others."""
    groups: list[NodeGroup] = []
    problems: list[Problem] = []
    for i, block in enumerate(blocks):
        path = f"{PATH}[{i}]"
        if not isinstance(block, Mapping):
            problems.append(_no_block(path, block, sources))
            continue
        problems += check_keys(block, _KEYS, path, sources)
        label, wrong = _read_label(block, path, [g.label for g in groups], sources)
        nodes, more = read_node_ranks(block.get("node_ranks"), path, topology, sources)
        problems += wrong + more
        if wrong or more:
            continue
        group, wrong = _read_group(label, nodes, block, path, topology, sources)
        problems += wrong
        groups.append(group)
    return NodeGroups(topology, groups), problems


def _read_group(
    label: str,
    nodes: Ranges,
    block: Mapping[str, object],
    path: str,
    topology: Topology,
    sources: Mapping[str, Source],
) -> tuple[NodeGroup, list[Problem]]:
    surroundings, problems = read_environments(block.get("env_configs"), nodes, path, topology, sources)
    members = [topology.nodes[n] for n in nodes]
    items: list[HardwareItem] = []
    if block.get("hardware") is not None:
        items, more = read_hardware(block["hardware"], nodes, f"{path}.hardware", sources)
        problems += more
    if items:
        pool = hardware_pool(items, items[0].type, label)
    elif block.get("ignore_hardware") or not any(n.accelerators for n in members):
        pool = node_pool(members, label)
    else:
        pool = accelerator_pool(members, label)
    return NodeGroup(label=label, nodes=nodes, pool=pool, surroundings=surroundings), problems


def _read_label(
    block: Mapping[str, object], path: str, taken: Sequence[str], sources: Mapping[str, Source]
) -> tuple[str, list[Problem]]:
    label = block.get("label")
    written = write_down(path, "label", label, sources)
    if label is None or (isinstance(label, (bool, float, Sequence, Mapping)) and not isinstance(label, str)):
        why = "component_placement refers to the group by its label"
        return "", [written.whole("bad-label", "expected a name", why, "label: train")]
    name = str(label).strip()
    if name in (WHOLE_CLUSTER, ANY_NODE) or "," in name or not name:
        why = f"{WHOLE_CLUSTER} (all accelerators) and {ANY_NODE} (all nodes) are reserved; commas join labels"
        return "", [written.whole("bad-label", f"{name!r} cannot be a label", why, "label: train")]
    if name in taken:
        why = "a label stands for one group; its nodes are joined by commas: node_ranks: 0-3,8"
        return "", [written.whole("node-group-declared-twice", f"the label {name} is taken", why, f"label: {name}_2")]
    return name, []


def read_node_ranks(
    value: object, path: str, topology: Topology, sources: Mapping[str, Source]
) -> tuple[Ranges, list[Problem]]:
    """The nodes that a `node_ranks` value names."""
    written = write_down(path, "node_ranks", value, sources)
    pool = node_pool(topology.nodes)
    segments, problems = read_segments(written, pool)
    if not problems:
        problems = check_exist(written, segments, pool)
    if not problems and ":" in written.text:
        at = written.text.index(":")
        mistake = Mistake(code="bad-placement", what="nodes have no ranks of processes here", span=(at, at + 1))
        problems = [written.problem(mistake, fix=written.line(written.text.split(":")[0]))]
    return Ranges.of(s.accelerators for s in segments), problems


def _no_block(path: str, block: object, sources: Mapping[str, Source]) -> Problem:
    return Problem(
        code="bad-node-group",
        key=path,
        what="expected a block of keys",
        got=show(block),
        source=source_of(path, sources),
        why="a node group has a label and node_ranks",
        fix="- {label: train, node_ranks: 0-1}",
    )

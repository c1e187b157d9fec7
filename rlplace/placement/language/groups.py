"""`cluster.node_groups` -> labelled nodes, the things that each group numbers, and the environment of its processes.

::

    node_groups:
      - {label: a800, node_ranks: 0-7, env_configs: [{node_ranks: 0-7, env_vars: [{GLOO_SOCKET_IFNAME: eth0}]}]}
      - {label: cpu, node_ranks: 8-9, ignore_hardware: true}              numbers are nodes
      - {label: arms, node_ranks: 10, hardware: {type: Arm, configs: [{ip: 10.0.0.1, node_rank: 10}]}}

Hardware of any type is numbered by node and then as written; a process finds the block of each of its items in
`slot.hardware`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from rlplace.config.yaml_text import show
from rlplace.errors import Problem, Source, did_you_mean, suggestion
from rlplace.placement.language.fit import check_exist
from rlplace.placement.language.grammar import read_segments, split_at, stripped
from rlplace.placement.language.text import Text
from rlplace.placement.machines.pools import (
    ACCELERATOR,
    ANY_NODE,
    NODE,
    WHOLE_CLUSTER,
    HardwareItem,
    Pool,
    accelerator_pool,
    hardware_pool,
    joined_pool,
    node_pool,
)
from rlplace.placement.machines.topology import Ranges, Topology, named

PATH = "cluster.node_groups"
_KEYS = ("label", "node_ranks", "env_configs", "hardware", "ignore_hardware")
_NO_TYPES = ("", ACCELERATOR, NODE)  # names that no type of hardware has
_ENV_KEYS = ("node_ranks", "env_vars", "python_interpreter_path")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeEnv:
    """Environment variables and Python of the processes on a node."""

    env_vars: tuple[tuple[str, str], ...] = ()
    interpreter: str = ""  # path of the Python to run; "": the driver's


class NodeGroups:
    """All node groups of a cluster, the two reserved ones included. Never changes."""

    def __init__(
        self,
        topology: Topology,
        pools: Mapping[str, Pool] | None = None,
        runtime_envs: Mapping[tuple[str, int], RuntimeEnv] | None = None,
        broken: Collection[str] = (),
    ) -> None:
        """Collect the groups.

        pools: by label. runtime_envs: by label and node. broken: labels of groups with
        problems, which have no pool.
        """
        self.topology = topology
        self.runtime_envs = runtime_envs or {}
        # Where no node has an accelerator, a placement without a node group counts nodes.
        nodes = topology.nodes
        counted = accelerator_pool if topology.num_accelerators else node_pool
        self._pools = {
            WHOLE_CLUSTER: counted(nodes, WHOLE_CLUSTER),
            ANY_NODE: node_pool(nodes),
            **(pools or {}),
        }
        self._broken = broken

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self._pools)

    def __getitem__(self, label: str) -> Pool:
        """Return the pool that one group, or several joined by commas, number. Raises KeyError."""
        pools = [self._pools[part] for part in label.split(",")]
        if len(pools) > 1:
            return joined_pool(pools, label)
        return pools[0]

    def pool_of(self, text: Text) -> Pool | None:
        """Return the pool of a `node_group`: a label, several with commas, a list. None: a problem was recorded."""
        known = "the node groups of this cluster are " + ", ".join(self.labels)
        found: list[str] = []
        for start, stop, _ in text.items:
            for columns in split_at(text.text, ",", start, stop):
                at = stripped(text.text, *columns)
                label = text.text[slice(*at)].strip()
                if label in self._broken:
                    return None
                if not label:
                    continue
                if not self._may_join(text, at, label, found, known):
                    return None
                found.append(label)
        if not found:
            fix = text.line(self.labels[-1])
            text.reject("unknown-node-group", "names no node group", known, fix)
            return None
        return self[",".join(found)]

    def _may_join(
        self,
        text: Text,
        at: tuple[int, int],
        label: str,
        found: Sequence[str],
        known: str,
    ) -> bool:
        """Check that a group exists and can be joined to those before it."""
        if label not in self.labels:
            near = did_you_mean(label, self.labels)
            what = f"there is no node group {label!r}" + suggestion(near)
            fix = text.open_line("one of these")
            if near:
                fix = text.with_parts((at, near))
            text.reject("unknown-node-group", what, known, fix, span=at)
            return False
        if not found:
            return True

        # Joined groups: each once, of one kind, without a common node.
        fix = text.line(found[0])
        if label in found:
            what = f"node group {label} is named twice"
            why = "an accelerator of groups that are joined has one number"
            fix = text.line(",".join(found))
            text.reject("node-group-repeated", what, why, fix, span=at)
            return False
        if self[label].noun != self[found[0]].noun:
            kinds = [f"{self[other].noun}s ({other})" for other in (found[0], label)]
            what = f"mixes {' and '.join(kinds)}"
            why = "a placement counts one kind of thing"
            text.reject("mixed-node-groups", what, why, fix)
            return False
        before: set[int] = set()
        for other in found:
            before |= self[other].nodes
        both = self[label].nodes & before
        if both:
            what = f"node {min(both)} is in {label} and in a group before it"
            why = "its accelerators would have two numbers"
            text.reject("overlapping-node-groups", what, why, fix, span=at)
            return False
        return True


def read_node_groups(
    declared: object, topology: Topology, sources: Mapping[str, Source]
) -> tuple[NodeGroups, list[Problem]]:
    """Return the groups that are declared rightly, and the problems of the others."""
    pools: dict[str, Pool] = {}
    runtime_envs: dict[tuple[str, int], RuntimeEnv] = {}
    broken: list[str] = []
    text = Text.of(declared, PATH, "node_groups", sources, [])
    example = {"label": "train", "node_ranks": [0, 1]}
    for block in text.blocks("bad-node-group", "a group has a label", example):
        before = len(text.problems)
        block.check_keys(_KEYS)
        label = _read_label(block.child("label"), (*pools, *broken))
        nodes = read_nodes(block.child("node_ranks"), topology)
        envs: dict[int, RuntimeEnv] = {}
        items: list[HardwareItem] = []
        if label and nodes:
            envs = _read_envs(block.child("env_configs"), nodes, topology)
            items = _read_hardware(block.child("hardware"), nodes)
        if label is None:
            continue
        if nodes is None or len(text.problems) > before:
            broken.append(label)
            continue

        # The group numbers hardware, accelerators, or nodes where it has neither.
        members = [topology.nodes[n] for n in nodes]
        ignored = bool(block.child("ignore_hardware").value)
        has_accelerators = any(node.accelerators for node in members)
        if items:
            pools[label] = hardware_pool(items, label)
        elif has_accelerators and not ignored:
            pools[label] = accelerator_pool(members, label)
        else:
            pools[label] = node_pool(members, label)
        for node, env in envs.items():
            runtime_envs[label, node] = env
    return NodeGroups(topology, pools, runtime_envs, broken), text.problems


def _read_label(text: Text, taken: Collection[str]) -> str | None:
    """Read the label of a group; None where a problem was recorded. `taken`: labels before."""
    name = str(text.value).strip()
    code = "bad-label"
    fix = "label: train"
    if name in taken:
        fix = f"label: {name}_2"
    why = "component_placement refers to the group by its label; commas join labels"
    if not isinstance(text.value, str | int) or isinstance(text.value, bool):
        what = "expected a name"
    elif name in (WHOLE_CLUSTER, ANY_NODE):
        what = f"{name} is reserved"
        why = f"{WHOLE_CLUSTER} stands for all accelerators, {ANY_NODE} for all nodes"
    elif "," in name or not name:
        what = f"{name!r} cannot be a label"
    elif name in taken:
        code = "node-group-declared-twice"
        what = f"the label {name} is taken"
        why = 'a label stands for one group; its nodes are joined by commas: node_ranks: "0-3,8"'
    else:
        return name
    text.reject(code, what, why, fix)
    return None


def read_nodes(text: Text, topology: Topology) -> Ranges | None:
    """Return the nodes that a `node_ranks` value names; None where problems were recorded."""
    pool = node_pool(topology.nodes)
    segments = read_segments(text, pool)
    if segments is None or not check_exist(text, segments, pool):
        return None
    if not text.has_no_ranks("these are numbers of nodes"):
        return None
    return Ranges.of(s.accelerators for s in segments)


def _read_envs(
    text: Text, members: Ranges, topology: Topology
) -> dict[int, RuntimeEnv]:
    """Map the rank of each node that has an entry to its environment variables and interpreter."""
    found: dict[int, RuntimeEnv] = {}
    example = {"node_ranks": 0, "env_vars": {"A": 1}}
    for block in text.blocks("bad-env-config", "an entry is for some nodes", example):
        block.check_keys(_ENV_KEYS)
        env = _read_env(block)
        # Without nodes of its own, an entry is for all nodes of the group.
        ranks = block.child("node_ranks", str(members))
        nodes = read_nodes(ranks, topology) or Ranges()
        outside = nodes - members
        if outside:
            _reject_outside(ranks, _named(outside), members, str(members))
        declared = Ranges.of(range(n, n + 1) for n in found)
        twice = nodes & declared
        if twice:
            what = f"an entry before has {_named(twice)}"
            why = "a node of a group has one environment"
            left = members - declared
            fix = "remove this entry"
            if left:
                fix = ranks.line(str(left))
            ranks.reject("overlapping-env-configs", what, why, fix)
        found |= dict.fromkeys(nodes, env)
    return found


def _named(nodes: Ranges) -> str:
    """Write `node 3, nodes 5-7`."""
    return ", ".join(named(NODE, piece) for piece in nodes.pieces)


def _reject_outside(ranks: Text, wrong: str, members: Ranges, fix: object) -> None:
    """Reject nodes that are not in the group. `wrong`: in words; `fix`: the value to write."""
    what = f"{wrong} is outside the group"
    why = f"the group has nodes {members}"
    ranks.reject("node-outside-group", what, why, ranks.line(fix))


def _read_env(block: Text) -> RuntimeEnv:
    """Read the variables and the interpreter of one entry."""
    interpreter = block.child("python_interpreter_path")
    if not isinstance(interpreter.value or "", str):
        what = "expected a path"
        why = "it is the Python to run"
        fix = interpreter.line("/opt/venv/bin/python")
        interpreter.reject("bad-env-config", what, why, fix)

    text = block.child("env_vars")
    variables: dict[str, str] = {}
    example = {"NAME": "value"}
    for entry in text.blocks("bad-env-config", "an entry is one variable", example):
        for name, value in entry.entries():
            if name in variables:
                what = f"{name} is set twice"
                why = "a variable has one value on a node"
                text.reject("env-var-twice", what, why, f"name {name} once")
            # A number or a truth value as YAML writes it.
            variables[name] = value if isinstance(value, str) else show(value)
    path = str(interpreter.value or "")
    return RuntimeEnv(env_vars=tuple(variables.items()), interpreter=path)


def _read_hardware(text: Text, members: Ranges) -> list[HardwareItem]:
    """Read the items of one group, in the order of their nodes."""
    if text.value is None:
        return []
    type_ = text.child("type")
    configs = text.child("configs")
    first = members.pieces[0].start
    why = "hardware has a type, and configs with a block for each item"

    # The part that is wrong, or missing, if any.
    no_type = not isinstance(type_.value, str) or type_.value in _NO_TYPES
    if not isinstance(text.value, Mapping):
        wrong = text
        what = "expected a block of keys"
    elif no_type:
        wrong = type_
        what = "expected the name of a type"
    else:
        wrong = configs
        what = "expected a list of blocks"
    if wrong is not configs or not configs.value:
        fix = f"hardware: {{type: Arm, configs: [{{node_rank: {first}}}]}}"
        wrong.reject("bad-hardware", what, why, fix)
        return []

    text.check_keys(("type", "configs"))
    items: list[HardwareItem] = []
    for block in configs.blocks("bad-hardware", why, {"node_rank": first}):
        rank = block.child("node_rank")
        node = rank.value
        if isinstance(node, int) and not isinstance(node, bool) and node in members:
            config = dict(block.entries())
            item = HardwareItem(node=node, type=str(type_.value), config=config)
            items.append(item)
        else:
            _reject_outside(rank, f"node {show(node)}", members, first)
    return sorted(items, key=lambda item: item.node)

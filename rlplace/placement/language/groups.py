"""`cluster.node_groups` -> labelled nodes, what the numbers of each group count, and the environment of its processes.

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
_ENV_KEYS = ("node_ranks", "env_vars", "python_interpreter_path")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeEnv:
    """What a process finds on its node beside the machine itself."""

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
        """`runtime_envs` are by label and node. `broken` are labels of groups with problems, which have no pool."""
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
        """Return what the numbers of one group, or of several joined by commas, count. Raises KeyError."""
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
                if label in self._broken or (
                    label and not self._may_join(text, at, label, found, known)
                ):
                    return None
                found += [label] if label else []
        if not found:
            text.reject(
                "unknown-node-group",
                "names no node group",
                known,
                text.line(self.labels[-1]),
            )
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
            text.reject(
                "unknown-node-group",
                what,
                known,
                text.with_parts((at, near)) if near else text.open_line("one of these"),
                span=at,
            )
        elif label in found:
            what = f"node group {label} is named twice"
            why = "an accelerator of groups that are joined has one number"
            text.reject(
                "node-group-repeated", what, why, text.line(",".join(found)), span=at
            )
        elif found and self[label].noun != self[found[0]].noun:
            what = "mixes " + " and ".join(
                f"{self[other].noun}s ({other})" for other in (found[0], label)
            )
            text.reject(
                "mixed-node-groups",
                what,
                "a placement counts one kind of thing",
                text.line(found[0]),
            )
        elif both := sorted(
            self[label].nodes & {n for other in found for n in self[other].nodes}
        ):
            what = f"node {both[0]} is in {label} and in a group before it"
            why = "its accelerators would have two numbers"
            text.reject(
                "overlapping-node-groups", what, why, text.line(found[0]), span=at
            )
        else:
            return True
        return False


def read_node_groups(
    declared: object, topology: Topology, sources: Mapping[str, Source]
) -> tuple[NodeGroups, list[Problem]]:
    """Return the groups that are declared rightly, and the problems of the others."""
    pools: dict[str, Pool] = {}
    runtime_envs: dict[tuple[str, int], RuntimeEnv] = {}
    broken: list[str] = []
    text = Text.of(declared, PATH, "node_groups", sources, [])
    for block in text.blocks(
        "bad-node-group",
        "a group has a label",
        {"label": "train", "node_ranks": [0, 1]},
    ):
        before = len(text.problems)
        block.check_keys(_KEYS)
        label = _read_label(block.child("label"), (*pools, *broken))
        nodes = read_nodes(block.child("node_ranks"), topology)
        envs = (
            _read_envs(block.child("env_configs"), nodes, topology)
            if label and nodes
            else {}
        )
        items = (
            _read_hardware(block.child("hardware"), nodes) if label and nodes else []
        )
        if label is None:
            continue
        if nodes is None or len(text.problems) > before:
            broken.append(label)
            continue
        members = [topology.nodes[n] for n in nodes]
        if items:
            pools[label] = hardware_pool(items, label)
        elif block.child("ignore_hardware").value or not any(
            n.accelerators for n in members
        ):
            pools[label] = node_pool(members, label)
        else:
            pools[label] = accelerator_pool(members, label)
        runtime_envs |= {(label, node): env for node, env in envs.items()}
    return NodeGroups(topology, pools, runtime_envs, broken), text.problems


def _read_label(text: Text, taken: Collection[str]) -> str | None:
    name = str(text.value).strip()
    code = "bad-label"
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
    text.reject(
        code, what, why, f"label: {name}_2" if name in taken else "label: train"
    )
    return None


def read_nodes(text: Text, topology: Topology) -> Ranges | None:
    """Return the nodes that a `node_ranks` value names; None where problems were recorded."""
    pool = node_pool(topology.nodes)
    segments = read_segments(text, pool)
    if (
        segments is None
        or not check_exist(text, segments, pool)
        or not text.has_no_ranks("these are numbers of nodes")
    ):
        return None
    return Ranges.of(s.accelerators for s in segments)


def _read_envs(
    text: Text, members: Ranges, topology: Topology
) -> dict[int, RuntimeEnv]:
    """Map the rank of each node that has an entry to its environment variables and interpreter."""
    found: dict[int, RuntimeEnv] = {}
    for block in text.blocks(
        "bad-env-config",
        "an entry is for some nodes",
        {"node_ranks": 0, "env_vars": {"A": 1}},
    ):
        block.check_keys(_ENV_KEYS)
        env = _read_env(block)
        ranks = block.child("node_ranks", str(members))
        nodes = read_nodes(ranks, topology) or Ranges()
        if outside := nodes - members:
            _reject_outside(
                ranks,
                ", ".join(named(NODE, piece) for piece in outside.pieces),
                members,
                str(members),
            )
        declared = Ranges.of(range(n, n + 1) for n in found)
        if twice := nodes & declared:
            what = f"an entry before has {', '.join(named(NODE, piece) for piece in twice.pieces)}"
            left = members - declared
            fix = ranks.line(str(left)) if left else "remove this entry"
            ranks.reject(
                "overlapping-env-configs",
                what,
                "a node of a group has one environment",
                fix,
            )
        found |= dict.fromkeys(nodes, env)
    return found


def _reject_outside(ranks: Text, wrong: str, members: Ranges, fix: object) -> None:
    ranks.reject(
        "node-outside-group",
        f"{wrong} is outside the group",
        f"the group has nodes {members}",
        ranks.line(fix),
    )


def _read_env(block: Text) -> RuntimeEnv:
    interpreter = block.child("python_interpreter_path")
    if not isinstance(interpreter.value or "", str):
        fix = interpreter.line("/opt/venv/bin/python")
        interpreter.reject(
            "bad-env-config", "expected a path", "it is the Python to run", fix
        )
    text = block.child("env_vars")
    variables: dict[str, str] = {}
    for entry in text.blocks(
        "bad-env-config", "an entry is one variable", {"NAME": "value"}
    ):
        for name, value in entry.entries():
            if name in variables:
                fix = f"name {name} once"
                text.reject(
                    "env-var-twice",
                    f"{name} is set twice",
                    "a variable has one value on a node",
                    fix,
                )
            variables[name] = value if isinstance(value, str) else show(value)
    return RuntimeEnv(
        env_vars=tuple(variables.items()), interpreter=str(interpreter.value or "")
    )


def _read_hardware(text: Text, members: Ranges) -> list[HardwareItem]:
    """Read the items of one group, in the order of their nodes."""
    if text.value is None:
        return []
    type_ = text.child("type")
    configs = text.child("configs")
    first = members.pieces[0].start
    wrong = text
    what = "expected a block of keys"
    why = "hardware has a type, and configs with a block for each item"
    if isinstance(text.value, Mapping):
        wrong = configs
        what = "expected a list of blocks"
        if not isinstance(type_.value, str) or type_.value in ("", ACCELERATOR, NODE):
            wrong = type_
            what = "expected the name of a type"
    if wrong is not configs or not configs.value:
        fix = f"hardware: {{type: Arm, configs: [{{node_rank: {first}}}]}}"
        wrong.reject("bad-hardware", what, why, fix)
        return []
    text.check_keys(("type", "configs"))
    items: list[HardwareItem] = []
    for block in configs.blocks("bad-hardware", why, {"node_rank": first}):
        rank = block.child("node_rank")
        if (
            isinstance(rank.value, int)
            and not isinstance(rank.value, bool)
            and rank.value in members
        ):
            items.append(
                HardwareItem(
                    node=rank.value, type=str(type_.value), config=dict(block.entries())
                )
            )
        else:
            _reject_outside(rank, f"node {show(rank.value)}", members, first)
    return sorted(items, key=lambda item: item.node)

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

from rlplace.config.show import show
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
    whole_cluster,
)
from rlplace.placement.machines.ranges import Ranges
from rlplace.placement.machines.topology import Topology

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
        self._pools = {WHOLE_CLUSTER: whole_cluster(topology), ANY_NODE: node_pool(topology.nodes), **(pools or {})}
        self._broken = broken

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(label for label in self._pools if "," not in label)

    def __getitem__(self, label: str) -> Pool:
        """Return what the numbers of one group, or of several joined by commas, count. Raises KeyError."""
        if label not in self._pools:
            self._pools[label] = joined_pool([self._pools[part] for part in label.split(",")], label)
        return self._pools[label]

    def pool_of(self, text: Text) -> Pool | None:
        """Return the pool that a `node_group` value names: one label, several with commas, or a list of them.

        None where a problem was recorded, here or for the group itself.
        """
        known = "the node groups of this cluster are " + ", ".join(self.labels)
        found: list[str] = []
        for start, stop, _ in text.items:
            for columns in split_at(text.text, ",", start, stop):
                at = stripped(text.text, *columns)
                label = text.text[slice(*at)].strip()
                if label in self._broken or (label and not self._may_join(text, at, label, found, known)):
                    return None
                found += [label] if label else []
        if not found:
            text.reject("unknown-node-group", "names no node group", known, text.line(self.labels[-1]))
            return None
        return self[",".join(found)]

    def _may_join(self, text: Text, at: tuple[int, int], label: str, found: Sequence[str], known: str) -> bool:
        """Check that a group exists and can be joined to those before it."""
        if label in found:
            code, what = "node-group-repeated", f"node group {label} is named twice"
            why = "several groups are joined one after the other, and an accelerator has one number"
            text.reject(code, what, why, text.line(",".join(found)), span=at)
        elif label not in self.labels:
            near = did_you_mean(label, self.labels)
            what = f"there is no node group {label!r}" + suggestion(near)
            text.reject("unknown-node-group", what, known, text.with_parts((at, near or WHOLE_CLUSTER)), span=at)
        elif found and self[label].noun != self[found[0]].noun:
            what = "mixes " + " and ".join(f"{self[other].noun}s ({other})" for other in (found[0], label))
            why = "the numbers of one placement count one kind of thing"
            text.reject("mixed-node-groups", what, why, text.line(found[0]))
        elif both := sorted(self[label].nodes & {n for other in found for n in self[other].nodes}):
            what = f"node {both[0]} is in {label} and in a group before it"
            why = "groups that are joined have no node in common, else its accelerators had two numbers"
            text.reject("overlapping-node-groups", what, why, text.line(found[0]), span=at)
        else:
            return True
        return False


def read_node_groups(
    blocks: Sequence[object], topology: Topology, sources: Mapping[str, Source]
) -> tuple[NodeGroups, list[Problem]]:
    """Return the groups that are declared rightly, and the problems of the others."""
    pools: dict[str, Pool] = {}
    runtime_envs: dict[tuple[str, int], RuntimeEnv] = {}
    broken: list[str] = []
    problems: list[Problem] = []
    for i, value in enumerate(blocks):
        block = Text.of(value, f"{PATH}[{i}]", "-", sources, problems)
        if not isinstance(value, Mapping):
            fix = "- {label: train, node_ranks: 0-1}"
            block.reject("bad-node-group", "expected a block of keys", "a node group has a label and node_ranks", fix)
            continue
        before = len(problems)
        block.check_keys(_KEYS)
        label = _read_label(block.child("label"), (*pools, *broken))
        nodes = read_nodes(block.child("node_ranks"), topology)
        if label is None:
            continue
        if nodes is not None:
            envs = _read_envs(block.child("env_configs"), nodes, topology)
            items = _read_hardware(block.child("hardware"), nodes)
            if len(problems) == before:
                members = [topology.nodes[n] for n in nodes]
                if items:
                    pools[label] = hardware_pool(items, label)
                elif value.get("ignore_hardware") or not any(n.accelerators for n in members):
                    pools[label] = node_pool(members, label)
                else:
                    pools[label] = accelerator_pool(members, label)
                runtime_envs |= {(label, node): env for node, env in envs.items()}
        if label not in pools:
            broken.append(label)
    return NodeGroups(topology, pools, runtime_envs, broken), problems


def _read_label(text: Text, taken: Collection[str]) -> str | None:
    name = str(text.value).strip()
    if not isinstance(text.value, str | int) or isinstance(text.value, bool):
        code, what, why = "bad-label", "expected a name", "component_placement refers to the group by its label"
    elif name in (WHOLE_CLUSTER, ANY_NODE) or "," in name or not name:
        code, what = "bad-label", f"{name!r} cannot be a label"
        why = f"{WHOLE_CLUSTER} (all accelerators) and {ANY_NODE} (all nodes) are reserved; commas join labels"
    elif name in taken:
        code, what = "node-group-declared-twice", f"the label {name} is taken"
        why = 'a label stands for one group; its nodes are joined by commas: node_ranks: "0-3,8"'
    else:
        return name
    text.reject(code, what, why, f"label: {name}_2" if name in taken else "label: train")
    return None


def read_nodes(text: Text, topology: Topology) -> Ranges | None:
    """Return the nodes that a `node_ranks` value names; None where problems were recorded."""
    pool = node_pool(topology.nodes)
    segments = read_segments(text, pool)
    if segments is None or not check_exist(text, segments, pool):
        return None
    if ":" in text.text:
        at = text.text.index(":")
        why = "node_ranks are numbers of nodes"
        fix = text.line(text.text.split(":")[0].lstrip("["))
        text.reject("bad-placement", "nodes have no ranks of processes here", why, fix, span=(at, at + 1))
        return None
    return Ranges.of(s.accelerators for s in segments)


def _read_envs(text: Text, members: Ranges, topology: Topology) -> dict[int, RuntimeEnv]:
    """Map the rank of each node that has an entry to its environment variables and interpreter."""
    found: dict[int, RuntimeEnv] = {}
    if text.value is None:
        return found
    example = "{node_ranks: 0, env_vars: [{NAME: value}]}"
    if not isinstance(text.value, Sequence) or isinstance(text.value, str):
        why = "each entry is for some nodes"
        text.reject("bad-env-config", "expected a list of blocks", why, f"env_configs: [{example}]")
        return found
    for i in range(len(text.value)):
        block = text.child(i)
        if not isinstance(block.value, Mapping):
            block.reject("bad-env-config", "expected a block of keys", "an entry names nodes", f"- {example}")
            continue
        block.check_keys(_ENV_KEYS)
        env = _read_env(block)
        ranks = block.child("node_ranks", str(members))
        nodes = read_nodes(ranks, topology) or Ranges()
        if outside := nodes - members:
            what = f"node {outside} is" if len(outside) == 1 else f"nodes {outside} are"
            why = f"the group has nodes {members}"
            ranks.reject("node-outside-group", f"{what} not in the group", why, ranks.line(str(members)))
        declared = Ranges.of(range(n, n + 1) for n in found)
        if twice := nodes & declared:
            what = f"node {twice} has" if len(twice) == 1 else f"nodes {twice} have"
            left = members - declared
            fix = ranks.line(str(left)) if left else "remove this entry"
            why = "a node of a group has one environment"
            ranks.reject("overlapping-env-configs", f"{what} an entry already", why, fix)
        found |= dict.fromkeys(nodes, env)
    return found


def _read_env(block: Text) -> RuntimeEnv:
    interpreter = block.child("python_interpreter_path")
    if not isinstance(interpreter.value or "", str):
        fix = "python_interpreter_path: /opt/venv/bin/python"
        interpreter.reject("bad-env-config", "expected a path", "it is the Python to run", fix)
    text = block.child("env_vars")
    given = text.value or ()
    entries = [given] if isinstance(given, Mapping) else given
    variables: dict[str, str] = {}
    blocks = [e for e in entries if isinstance(e, Mapping)] if isinstance(entries, Sequence) else []
    if not isinstance(entries, Sequence) or len(blocks) < len(entries):
        why = "each entry of the list is one variable"
        text.reject("bad-env-config", "expected NAME: value entries", why, "env_vars: [{NAME: value}]")
    for name, value in ((str(k), v) for entry in blocks for k, v in entry.items()):
        if name in variables:
            fix = f"name {name} once"
            text.reject("env-var-twice", f"{name} is set twice", "a variable has one value on a node", fix)
        variables[name] = value if isinstance(value, str) else show(value)
    return RuntimeEnv(env_vars=tuple(variables.items()), interpreter=str(interpreter.value or ""))


def _read_hardware(text: Text, members: Ranges) -> list[HardwareItem]:
    """Read and number the items of one group."""
    if text.value is None:
        return []
    type_, configs = text.child("type"), text.child("configs")
    listed = configs.value if isinstance(configs.value, Sequence) and not isinstance(configs.value, str) else ()
    first_wrong = next((i for i, config in enumerate(listed) if not isinstance(config, Mapping)), None)
    wrong, what = None, "expected a block of keys"
    if not isinstance(text.value, Mapping):
        wrong = text
    elif not isinstance(type_.value, str) or type_.value in ("", ACCELERATOR, NODE):
        wrong, what = type_, "expected the name of a type"
    elif not listed:
        wrong, what = configs, "expected a list with one block for each item"
    elif first_wrong is not None:
        wrong = configs.child(first_wrong)
    first = members.pieces[0].start
    if wrong is not None:
        why = "hardware has a type, and configs with one block for each item"
        wrong.reject("bad-hardware", what, why, f"hardware: {{type: Arm, configs: [{{node_rank: {first}}}]}}")
        return []
    text.check_keys(("type", "configs"))
    found: list[tuple[int, Mapping[str, object]]] = []
    for i, config in enumerate(listed):
        assert isinstance(config, Mapping)
        node = config.get("node_rank")
        if isinstance(node, int) and not isinstance(node, bool) and node in members:
            found.append((node, config))
            continue
        rank = configs.child(i).child("node_rank")
        what = "is on no node" if node is None else f"node {show(node)} is not in the group"
        rank.reject("node-outside-group", what, f"the group has nodes {members}", rank.line(first))
    found.sort(key=lambda entry: entry[0])
    return [HardwareItem(number=i, node=node, type=str(type_.value), config=c) for i, (node, c) in enumerate(found)]

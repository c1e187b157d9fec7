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

from collections.abc import Collection, Mapping, Sequence

from rlplace.config.yaml_text import show
from rlplace.errors import Problem, Source
from rlplace.placement.language.complaints.problems import problems_of
from rlplace.placement.language.faults import Fault
from rlplace.placement.language.fit import check_exist, has_no_ranks
from rlplace.placement.language.grammar import read_segments
from rlplace.placement.language.groups import NodeGroups, RuntimeEnv
from rlplace.placement.language.lines import check_keys
from rlplace.placement.language.text import Text, entry_of, item_of, write
from rlplace.placement.machines.pools import (
    ACCELERATOR,
    ANY_NODE,
    NODE,
    WHOLE_CLUSTER,
    HardwareItem,
    Pool,
    accelerator_pool,
    hardware_pool,
    node_pool,
)
from rlplace.placement.machines.topology import Ranges, Topology

PATH = "cluster.node_groups"
_KEYS = ("label", "node_ranks", "env_configs", "hardware", "ignore_hardware")
_NO_TYPES = ("", ACCELERATOR, NODE)  # names that no type of hardware has
_ENV_KEYS = ("node_ranks", "env_vars", "python_interpreter_path")


def read_node_groups(
    declared: object, topology: Topology, sources: Mapping[str, Source]
) -> tuple[NodeGroups, list[Problem]]:
    """Return the node groups that are declared correctly, and the problems of all other node groups.

    `declared`: the value of `cluster.node_groups`. `sources`: key path -> the place in the config where it was written.
    """
    pools: dict[str, Pool] = {}
    runtime_envs: dict[tuple[str, int], RuntimeEnv] = {}
    broken: list[str] = []
    faults: list[Fault] = []
    text = write(declared, PATH, "node_groups", sources)
    for block in _blocks(text, "bad-node-group", "", faults):
        before = len(faults)
        check_keys(block, _KEYS, faults)
        label = _read_label(entry_of(block, "label"), (*pools, *broken), faults)
        nodes = read_nodes(entry_of(block, "node_ranks"), topology, faults)
        envs: dict[int, RuntimeEnv] = {}
        items: list[HardwareItem] = []
        if label and nodes:
            configs = entry_of(block, "env_configs")
            envs = _read_envs(configs, nodes, topology, faults)
            items = _read_hardware(entry_of(block, "hardware"), nodes, faults)
        if label is None:
            continue
        if nodes is None or len(faults) > before:
            broken.append(label)
            continue

        # The group numbers hardware, accelerators, or nodes where it has neither.
        members = [topology.nodes[n] for n in nodes]
        ignored = bool(entry_of(block, "ignore_hardware").value)
        has_accelerators = any(node.accelerators for node in members)
        if items:
            pools[label] = hardware_pool(items, label)
        elif has_accelerators and not ignored:
            pools[label] = accelerator_pool(members, label)
        else:
            pools[label] = node_pool(members, label)
        for node, env in envs.items():
            runtime_envs[label, node] = env
    groups = NodeGroups(topology, pools, runtime_envs, broken)
    return groups, problems_of(faults)


def _blocks(
    text: Text,
    code: str,
    error: str,
    faults: list[Fault],
    **facts: object,
) -> list[Text]:
    """Return the blocks (mappings) in a list of the config.

    A single block counts as a list with one item, and None as an empty list. For each item that is not a block, a fault
    with `code`, `error` and `facts` is added to `faults`. `facts`: values for the error message.
    """
    texts = [text]
    if text.value is None:
        texts = []
    elif isinstance(text.value, Sequence) and not isinstance(text.value, str):
        texts = [item_of(text, i) for i in range(len(text.value))]
    blocks = []
    for one in texts:
        if isinstance(one.value, Mapping):
            blocks.append(one)
        else:
            faults.append(Fault(code, one, error, facts=facts))
    return blocks


def _read_label(text: Text, taken: Collection[str], faults: list[Fault]) -> str | None:
    """Return the label of a node group; None if the label cannot be used.

    `taken`: the labels of earlier groups. Faults are added to `faults`.
    """
    name = str(text.value).strip()
    code = "bad-label"
    if not isinstance(text.value, str | int) or isinstance(text.value, bool):
        error = "no_name"
    elif name in (WHOLE_CLUSTER, ANY_NODE):
        error = "reserved"
    elif "," in name or not name:
        error = "not_one_name"
    elif name in taken:
        code = "node-group-declared-twice"
        error = ""
    else:
        return name
    facts = {"name": name, "taken": name in taken}
    faults.append(Fault(code, text, error, facts=facts))
    return None


def read_nodes(text: Text, topology: Topology, faults: list[Fault]) -> Ranges | None:
    """Return the nodes that a `node_ranks` value names.

    If the value is wrong, return None and add a fault to `faults`.
    """
    pool = node_pool(topology.nodes)
    segments = read_segments(text, pool, faults)
    if segments is None or not check_exist(text, segments, pool, faults):
        return None
    if not has_no_ranks(text, "only_nodes", faults):
        return None
    return Ranges.of(s.accelerators for s in segments)


def _read_envs(
    text: Text, members: Ranges, topology: Topology, faults: list[Fault]
) -> dict[int, RuntimeEnv]:
    """Return node -> environment of its processes, for all nodes that the entries of `env_configs` name.

    `text`: the value of `env_configs`. `members`: the nodes of the group. Faults are added to `faults`.
    """
    found: dict[int, RuntimeEnv] = {}
    for block in _blocks(text, "bad-env-config", "no_block", faults):
        check_keys(block, _ENV_KEYS, faults)
        env = _read_env(block, faults)
        # Without nodes of its own, an entry is for all nodes of the group.
        ranks = entry_of(block, "node_ranks", str(members))
        nodes = read_nodes(ranks, topology, faults) or Ranges()
        outside = nodes - members
        facts: dict[str, object] = {"members": members}
        if outside:
            facts["nodes"] = outside
            faults.append(Fault("node-outside-group", ranks, "in_env", facts=facts))
        declared = Ranges.of(range(n, n + 1) for n in found)
        twice = nodes & declared
        if twice:
            facts = {"nodes": twice, "left": members - declared}
            faults.append(Fault("overlapping-env-configs", ranks, facts=facts))
        found |= dict.fromkeys(nodes, env)
    return found


def _read_env(block: Text, faults: list[Fault]) -> RuntimeEnv:
    """Return the environment variables and the interpreter of one entry of `env_configs`.

    Faults are added to `faults`.
    """
    interpreter = entry_of(block, "python_interpreter_path")
    if not isinstance(interpreter.value or "", str):
        faults.append(Fault("bad-env-config", interpreter, "no_path"))

    text = entry_of(block, "env_vars")
    variables: dict[str, str] = {}
    for entry in _blocks(text, "bad-env-config", "no_variable", faults):
        for name, written in entry.entries.items():
            if name in variables:
                faults.append(Fault("env-var-twice", text, facts={"name": name}))
            # A number or a truth value as YAML writes it.
            value = written.value
            variables[name] = value if isinstance(value, str) else show(value)
    path = str(interpreter.value or "")
    return RuntimeEnv(env_vars=tuple(variables.items()), interpreter=path)


def _read_hardware(
    text: Text, members: Ranges, faults: list[Fault]
) -> list[HardwareItem]:
    """Return the hardware items that a node group declares correctly, ordered by node.

    `text`: the value of `hardware`. `members`: the nodes of the group. Faults are added to `faults`.
    """
    if text.value is None:
        return []
    type_ = entry_of(text, "type")
    configs = entry_of(text, "configs")
    first = members.pieces[0].start

    # The part that is wrong, or missing, if any.
    no_type = not isinstance(type_.value, str) or type_.value in _NO_TYPES
    if not isinstance(text.value, Mapping):
        wrong = text
        error = "no_keys"
    elif no_type:
        wrong = type_
        error = "no_type"
    else:
        wrong = configs
        error = "no_configs"
    facts: dict[str, object] = {"first": first}
    if wrong is not configs or not configs.value:
        faults.append(Fault("bad-hardware", wrong, error, facts=facts))
        return []

    check_keys(text, ("type", "configs"), faults)
    items: list[HardwareItem] = []
    for block in _blocks(configs, "bad-hardware", "no_block", faults, **facts):
        rank = entry_of(block, "node_rank")
        node = rank.value
        if isinstance(node, int) and not isinstance(node, bool) and node in members:
            config = {key: entry.value for key, entry in block.entries.items()}
            item = HardwareItem(node=node, type=str(type_.value), config=config)
            items.append(item)
        else:
            facts = {"members": members}
            faults.append(Fault("node-outside-group", rank, "of_item", facts=facts))
    return sorted(items, key=lambda item: item.node)

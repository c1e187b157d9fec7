"""`env_configs` of a node group: environment variables and the Python interpreter for subsets of its nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlplace.errors import Problem, Source
from rlplace.placement.language.fit import check_exist
from rlplace.placement.language.grammar import read_segments
from rlplace.placement.language.slots import Surroundings
from rlplace.placement.language.written import check_keys, write_down
from rlplace.placement.machines.pools import node_pool
from rlplace.placement.machines.ranges import Ranges
from rlplace.placement.machines.topology import Topology
from rlplace.structure import show

_KEYS = ("node_ranks", "env_vars", "python_interpreter_path")


def read_environments(
    blocks: object, members: Ranges, path: str, topology: Topology, sources: Mapping[str, Source]
) -> tuple[dict[int, Surroundings], list[Problem]]:
    """Node rank -> surroundings, for the nodes that have an entry."""
    found: dict[int, Surroundings] = {}
    problems: list[Problem] = []
    if blocks is None:
        return found, problems
    if not isinstance(blocks, Sequence) or isinstance(blocks, str):
        written = write_down(path, "env_configs", blocks, sources)
        fix = "env_configs: [{node_ranks: 0, env_vars: [{NAME: value}]}]"
        return found, [written.whole("bad-env-config", "expected a list of blocks", "one entry for some nodes", fix)]
    for i, block in enumerate(blocks):
        here = f"{path}.env_configs[{i}]"
        if not isinstance(block, Mapping):
            written = write_down(f"{path}.env_configs", f"[{i}]", block, sources)
            fix = "- {node_ranks: 0, env_vars: [{NAME: value}]}"
            problems.append(written.whole("bad-env-config", "expected a block of keys", "an entry names nodes", fix))
            continue
        problems += check_keys(block, _KEYS, here, sources)
        surroundings, wrong = _surroundings(block, here, sources)
        nodes, more = _nodes(block.get("node_ranks", str(members)), members, found, here, topology, sources)
        problems += wrong + more
        found |= dict.fromkeys(nodes, surroundings)
    return found, problems


def _nodes(
    value: object,
    members: Ranges,
    found: Mapping[int, Surroundings],
    path: str,
    topology: Topology,
    sources: Mapping[str, Source],
) -> tuple[Ranges, list[Problem]]:
    written = write_down(path, "node_ranks", value, sources)
    pool = node_pool(topology.nodes)
    segments, problems = read_segments(written, pool)
    if problems or (problems := check_exist(written, segments, pool)):
        return Ranges(), problems
    nodes = Ranges.of(s.accelerators for s in segments)
    if strangers := nodes - members:
        what = (
            f"node {strangers} is not in the group"
            if len(strangers) == 1
            else f"nodes {strangers} are not in the group"
        )
        problems.append(
            written.whole("node-outside-group", what, f"the group has nodes {members}", written.line(str(members)))
        )
    if twice := Ranges.of(range(n, n + 1) for n in nodes if n in found):
        what = f"node{'s' * (len(twice) > 1)} {twice} ha{'ve' if len(twice) > 1 else 's'} an entry already"
        why = "a node of a group has one environment"
        left = members - Ranges.of(range(n, n + 1) for n in found)
        fix = written.line(str(left)) if left else "remove this entry"
        problems.append(written.whole("overlapping-env-configs", what, why, fix))
    return nodes, problems


def _surroundings(
    block: Mapping[str, object], path: str, sources: Mapping[str, Source]
) -> tuple[Surroundings, list[Problem]]:
    problems: list[Problem] = []
    interpreter = block.get("python_interpreter_path") or ""
    if not isinstance(interpreter, str):
        written = write_down(path, "python_interpreter_path", interpreter, sources)
        fix = "python_interpreter_path: /opt/venv/bin/python"
        problems.append(written.whole("bad-env-config", "expected a path", "it is the Python to run", fix))
        interpreter = ""
    given = block.get("env_vars") or ()
    entries = [given] if isinstance(given, Mapping) else given
    written = write_down(path, "env_vars", given, sources)
    if (
        isinstance(entries, str)
        or not isinstance(entries, Sequence)
        or not all(isinstance(e, Mapping) for e in entries)
    ):
        why = "each entry of the list is one variable"
        problems.append(
            written.whole("bad-env-config", "expected NAME: value entries", why, "env_vars: [{NAME: value}]")
        )
        return Surroundings(interpreter=interpreter), problems
    variables: dict[str, str] = {}
    for name, value in ((str(k), v) for entry in entries for k, v in entry.items()):
        if name in variables:
            why = "a variable has one value on a node"
            fix = f"name {name} once"
            problems.append(written.whole("env-var-twice", f"{name} is set twice", why, fix))
        variables[name] = show(value)
    return Surroundings(env_vars=tuple(variables.items()), interpreter=interpreter), problems

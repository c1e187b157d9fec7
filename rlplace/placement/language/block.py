"""The `component_placement` block -> one spec per component, with every problem of every line.

::

    actor: 0-7                                                 numbers: int, text, list; "rest"; "1/2"
    actor: {node_group: a800, placement: 0-63}                 numbers of a node group
    actor: {accelerators: [0, 1, 4], ranks_per_accelerator: 2} ranks spread by a rule
    actor: {accelerators: 4}                                   how many; the engine picks them
    rollout: {same_as: actor, tensor_parallel_size: 4}         the place of another component
    rollout: {same_as: env, process: shared}                   and its processes
    reward: cpu                                                on no accelerator: a process of the first node
    reward: {node_group: node, placement: "1:0-3"}             four processes of node 1

or, instead of lines, a named placement: `presets.py`. The steps from a text to its spec:

::

    text        what was written, by its key path and columns
    lines       each line by itself: names, counts, numbers
    fit         do its ranks fit on these numbers?
    resolve     the lines that depend on each other
    specs       one for each component
                         what is wrong on the way is a Fault ──▶ complaints     the problem that a user reads
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from rlplace.errors import COMMAND_LINE, Problem, Source
from rlplace.placement.language.complaints.problems import problems_of
from rlplace.placement.language.faults import Fault
from rlplace.placement.language.fit import check_parallel
from rlplace.placement.language.groups import NodeGroups
from rlplace.placement.language.lines import (
    Line,
    is_cut,
    names_of,
    read_counts,
    read_line,
)
from rlplace.placement.language.presets import expand_preset, preset_roles
from rlplace.placement.language.resolve import Placed, resolve
from rlplace.placement.language.spec import ComponentSpec, Segment, role_of
from rlplace.placement.language.text import PATH, Text, write
from rlplace.placement.machines.pools import Pool

# The ranks of these roles form a process group of their own, and a process joins only one.
_OWN_GROUP = ("actor", "critic", "reference", "teacher", "reward")


def read_block(
    value: object,
    groups: NodeGroups,
    components: Sequence[str] | None,
    sources: Mapping[str, Source],
    optional: Sequence[str] = (),
) -> tuple[dict[str, ComponentSpec], list[Problem]]:
    """Return component -> spec for the components that are placed correctly, and the problems of the block.

    `value`: the `component_placement` block as it was written. `groups`: the node groups. `components`: components that
    the algorithm needs; None: any name may be placed. `sources`: key path -> the place in the config where it was
    written. `optional`: further roles that may be placed.
    """
    faults: list[Fault] = []
    block = write(value, PATH, "component_placement", sources, components or ())
    if not block.entries:
        error = "no_lines"
        if value is None or value == {}:
            error = "nothing"
        facts = {"components": components}
        fault = Fault("empty-placement", block, error, facts=facts)
        return {}, problems_of([fault])

    # Each line by itself; a preset stands for plain lines.
    lines: list[Line] = []
    named: set[str] = set()
    if "preset" in block.entries:
        roles = preset_roles(components)
        counted = ("accelerators", *roles)
        sizes = read_counts(block, counted, ("preset", *counted), faults)
        lines += expand_preset(block, roles, sizes, groups, faults)
        named.update(roles)
        if faults:
            return {}, problems_of(faults)
    else:
        if block.pieces:
            faults.append(Fault("comma-in-braces", block, "in_lines"))
        for text in block.entries.values():
            inherited = [
                name
                for name, other in block.entries.items()
                if _is_of_other(other, text)
            ]
            names, wrong_names = names_of(text, named, components, optional, inherited)
            if not is_cut(block, text, components, faults):
                line = read_line(text, names, groups, faults)
                if line is not None:
                    lines.append(line)
            faults += wrong_names
            named.update(names)

    # Lines that depend on each other, then one spec for each component.
    placed = resolve(lines, named, faults)
    specs = _specs_of(lines, placed, faults)
    for component in components or ():
        if component not in named:
            missing = {"name": component, "components": components, "named": named}
            faults.append(Fault("unplaced-component", block, facts=missing))
    return specs, problems_of(faults)


def _is_of_other(line: Text, text: Text) -> bool:
    """Return whether a line stands in another file than the line `text`. All words of a command line are one file."""
    if line.source is None or text.source is None:
        return False
    files = []
    for each in (line, text):
        file = str(each.source and each.source.file)
        files.append(COMMAND_LINE if file.startswith(COMMAND_LINE) else file)
    return files[0] != files[1]


def _specs_of(
    lines: Sequence[Line], placed: Mapping[int, Placed], faults: list[Fault]
) -> dict[str, ComponentSpec]:
    """Return component -> spec for the components of each line that has a place.

    A segment is a piece `accelerators:ranks` of a placement text. Lines whose parallel sizes do not fit their place are
    left out. `placed`: index of a line -> its pool and segments. Faults are added to `faults`.
    """
    specs: dict[str, ComponentSpec] = {}
    # Where components share their processes, what says so.
    sharers: dict[str, Text] = {}
    for i, (pool, segments) in sorted(placed.items()):
        line = lines[i]
        name = line.names[0]
        if not check_parallel(line.whole, name, line.parallel, pool, segments, faults):
            continue
        for name in line.names:
            if name in specs:
                continue
            specs[name] = _spec(name, line, pool, segments)
            if line.shares_process:
                sharers[name] = line.whole.entries["process"]
    return specs | _join_processes(specs, sharers, faults)


def _spec(
    name: str, line: Line, pool: Pool, segments: Sequence[Segment]
) -> ComponentSpec:
    """Return the spec that places component `name` as its line says.

    `pool`: what the numbers of the segments count. `segments`: in any order.
    """
    by_rank = sorted(segments, key=lambda segment: segment.ranks.start)
    return ComponentSpec(
        name=name,
        pool=pool,
        written=tuple(by_rank),
        key=line.whole.key,
        text=line.whole.text,
        parallel=line.parallel,
    )


def _join_processes(
    specs: Mapping[str, ComponentSpec],
    sharers: Mapping[str, Text],
    faults: list[Fault],
) -> dict[str, ComponentSpec]:
    """Return the specs of components with `process: shared`, with the name of their common process filled in.

    `specs`: component -> spec. `sharers`: component -> its text `process: shared`. Components share processes if equal
    ranks of them have equal places. Faults are added to `faults`. The result is empty if any line has a fault.
    """
    # Where a line could not be read, a component that seems alone may not be.
    complete = not faults
    own = [name for name in sharers if role_of(name) in _OWN_GROUP]
    for name in own:
        faults.append(Fault("process-of-its-own", sharers[name], facts={"name": name}))
    if own or not complete:
        return {}

    # The same place: the same accelerators, rank by rank; without accelerators, the same nodes.
    places: dict[tuple[object, ...], list[str]] = {}
    for name in sharers:
        at = specs[name].locations
        columns = [column.tobytes() for column in (at.node, at.first, at.count)]
        place = (specs[name].node_group, *columns)
        places.setdefault(place, []).append(name)

    # Components that share their processes and are alone at their place; of two that are apart, the second.
    single = [names[0] for names in places.values() if len(names) == 1]
    for name in single[1:] or single:
        others = [other for other in sharers if other != name]
        if others:
            facts: dict[str, object] = {
                "name": name,
                "partner": others[0],
                "place": specs[name].render(),
                "partner_place": specs[others[0]].render(),
            }
            faults.append(Fault("process-apart", sharers[name], facts=facts))
        else:
            able = [c for c in specs if c != name and role_of(c) not in _OWN_GROUP]
            facts = {"name": name, "able": able}
            faults.append(Fault("process-alone", sharers[name], facts=facts))

    joined = {}
    for names in places.values():
        if len(names) > 1:
            process = "+".join(names)
            for name in names:
                joined[name] = dataclasses.replace(specs[name], process=process)
    return joined

"""The whole `component_placement` block -> one spec per component, with every problem of every line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlplace.errors import Problem, Source, did_you_mean
from rlplace.placement.language.groups import NodeGroups
from rlplace.placement.language.lines import Line, names_of, read_line
from rlplace.placement.language.parallel import check_parallel
from rlplace.placement.language.presets import expand_preset, is_preset
from rlplace.placement.language.processes import join_processes
from rlplace.placement.language.relative import Resolution
from rlplace.placement.language.spec import ComponentSpec
from rlplace.placement.language.written import PATH, Written, write_down
from rlplace.structure import show


def read_block(
    block: object, groups: NodeGroups, components: Sequence[str] | None, sources: Mapping[str, Source]
) -> tuple[dict[str, ComponentSpec], list[Problem]]:
    """The specs of the components that are placed rightly, and the problems of the others."""
    if not isinstance(block, Mapping) or not block:
        return {}, [_no_block(block, components, sources.get(PATH))]
    if is_preset(block):
        plain, problems = expand_preset(block, groups.topology.num_accelerators, components, sources)
        return ({}, problems) if problems else read_block(plain, groups, components, sources)
    lines: list[Line] = []
    named: set[str] = set()
    placed: set[str] = set()
    problems = []
    for leaf, value in block.items():
        line, wrong = read_line(str(leaf), value, groups, sources)
        problems += _check_names(write_down(PATH, str(leaf), value, sources), named, components)
        problems += wrong
        named.update(names_of(str(leaf)))
        if line is not None:
            lines.append(line)
            placed.update(line.names)
    resolution = Resolution(lines, frozenset(named - placed))
    problems += resolution.problems
    specs: dict[str, ComponentSpec] = {}
    for i, (pool, segments) in sorted(resolution.answers.items()):
        line = lines[i]
        wrong = check_parallel(line, pool, segments, sources)
        problems += wrong
        for name in line.names if not wrong else ():
            spec = ComponentSpec(
                name=name,
                pool=pool,
                written=segments,
                key=line.whole.key,
                text=line.whole.text,
                parallel=line.parallel,
            )
            specs.setdefault(name, spec)
    sharers = (name for line in lines if line.shares_process for name in line.names)
    marked = [name for name in dict.fromkeys(sharers) if name in specs]
    sharing, wrong = join_processes(specs, marked, sources, complete=not problems)
    specs |= sharing
    problems += wrong
    problems += _unplaced(components or (), named, sources.get(PATH))
    return specs, problems


def _check_names(written: Written, named: set[str], components: Sequence[str] | None) -> list[Problem]:
    problems: list[Problem] = []
    at = 0
    names = names_of(written.leaf)
    for i, name in enumerate(names):
        at = written.leaf.index(name, at)
        span = (at, at + max(1, len(name)))
        at += len(name)
        if name in named or name in names[:i]:
            fix = f"name {name} in one line only"
            what, why = (
                f"{name} is placed twice",
                "a component has one placement; several pieces of it are joined by commas",
            )
            problems.append(_name_problem("component-placed-twice", written, what, span, why, fix))
        elif not name:
            fix = ",".join(n for n in names if n) or "actor"
            why = "a comma in the key gives several components the same placement"
            problems.append(
                _name_problem(
                    "unknown-component", written, "a component name is missing", span, why, f"{fix}: {written.text}"
                )
            )
        elif components is not None and name not in components:
            near = did_you_mean(name, [c for c in components if c not in names])
            what = f"no component is called {name!r}" + (f", did you mean {near!r}?" if near else "")
            why = "the components of this algorithm are " + ", ".join(components)
            fix = f"{near}: {written.text}" if near and len(names) == 1 else f"rename or remove {name}"
            problems.append(_name_problem("unknown-component", written, what, span, why, fix))
    return problems


def _name_problem(code: str, written: Written, what: str, span: tuple[int, int], why: str, fix: str) -> Problem:
    got = f"{written.leaf}: {written.text}"
    return Problem(code=code, key=written.key, what=what, got=got, span=span, source=written.source, why=why, fix=fix)


def _unplaced(components: Sequence[str], named: set[str], source: Source | None) -> list[Problem]:
    # A misspelt name is one problem, told where it stands; not a second one about the name it should have been.
    meant = {did_you_mean(name, components) for name in named if name not in components}
    return [
        Problem(
            code="unplaced-component",
            key=PATH,
            what=f"{component} is not placed",
            source=source,
            why="the algorithm needs " + ", ".join(components) + "; each needs accelerators",
            fix=f"{component}: all",
        )
        for component in components
        if component not in named and component not in meant
    ]


def _no_block(block: object, components: Sequence[str] | None, source: Source | None) -> Problem:
    return Problem(
        code="empty-placement",
        key=PATH,
        what="places no component" if block is None or block == {} else "expected one line per component",
        got=None if block is None else show(block),
        source=source,
        why="it says which accelerators each component uses",
        fix="component_placement: {" + ", ".join(f"{c}: all" for c in components or ("actor",)) + "}",
    )

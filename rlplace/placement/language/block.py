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
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence

from rlplace.config.show import quote
from rlplace.errors import Problem, Source, did_you_mean, suggestion
from rlplace.placement.language.fit import MOST_RANKS_EACH, check_fit, check_parallel, respread
from rlplace.placement.language.grammar import read_segments
from rlplace.placement.language.groups import NodeGroups
from rlplace.placement.language.presets import expand_preset
from rlplace.placement.language.spec import CPU, ComponentSpec, Parallel, Segment, role_of, spread
from rlplace.placement.language.text import PATH, Text
from rlplace.placement.machines.pools import ANY_NODE, WHOLE_CLUSTER, Pool
from rlplace.placement.machines.ranges import Ranges, overlap

_PLACES = ("placement", "accelerators", "same_as")  # exactly one of them
_COUNTS = ("ranks_per_accelerator", "accelerators_per_rank", "tensor_parallel_size", "data_parallel_size")
KEYS = ("node_group", *_PLACES, *_COUNTS, "tensor_parallel_across_nodes", "process")
_FRACTION = re.compile(r"\s*([1-9][0-9]{0,8})\s*/\s*([1-9][0-9]{0,8})\s*")
_OTHER_NAMES = {"ref": "reference"}  # of other libraries
# The ranks of these roles form a process group of their own, and a process joins only one.
_OWN_GROUP = ("actor", "critic", "reference", "reward")
Placed = tuple[Pool, tuple[Segment, ...]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """That many numbers that no other component has; `why` names the source of the count."""

    count: int | None  # None, for `rest`: all that no component with numbers or a count of its own has
    why: str = ""


REST = Count(count=None)


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One line of `component_placement`, read."""

    names: tuple[str, ...]
    whole: Text  # key and value as they stand in `component_placement`
    where: Text  # the part that places
    pool: Pool
    asked: tuple[Segment, ...] | Count | str  # these ranks on these numbers; that many; as the component of this name
    each: int  # accelerators_per_rank
    sharing: int  # ranks_per_accelerator
    parallel: Parallel
    shares_process: bool  # with the other lines of the same place that share theirs


def read_block(
    value: object, groups: NodeGroups, components: Sequence[str] | None, sources: Mapping[str, Source]
) -> tuple[dict[str, ComponentSpec], list[Problem]]:
    """Return the specs of the components that are placed rightly, and the problems of the others."""
    block = Text.of(value, PATH, "component_placement", sources, [])
    if not isinstance(value, Mapping) or not value:
        what = "places no component" if value is None or value == {} else "expected one line per component"
        fix = block.line(dict.fromkeys(components or ("actor",), "all"))
        block.reject("empty-placement", what, "it places each component on accelerators", fix)
        return {}, block.problems
    if "preset" in value:
        plain = expand_preset(block, groups.topology.num_accelerators, components)
        return ({}, block.problems) if block.problems else read_block(plain, groups, components, sources)
    lines: list[Line] = []
    named: set[str] = set()
    for key in value:
        text = block.child(str(key))
        names = tuple(n.strip() for n in text.leaf.split(","))
        line = None if _split_key(block, text, components) else read_line(text, names, groups)
        _check_names(text, names, named, components)
        named.update(names)
        lines += [line] if line is not None else []
    placed = resolve(lines, named - {name for line in lines for name in line.names})
    specs: dict[str, ComponentSpec] = {}
    sharers: dict[str, Text] = {}
    for i, (pool, segments) in sorted(placed.items()):
        whole, parallel = lines[i].whole, lines[i].parallel
        if check_parallel(whole, lines[i].names[0], parallel, pool, segments):
            by_rank = tuple(sorted(segments, key=lambda s: s.ranks.start))
            for name in (name for name in lines[i].names if name not in specs):
                specs[name] = ComponentSpec(
                    name=name, pool=pool, written=by_rank, key=whole.key, text=whole.text, parallel=parallel
                )
                if lines[i].shares_process:
                    sharers[name] = whole.child("process", "shared")
    specs |= _join_processes(specs, sharers, complete=not block.problems)
    # A misspelt name is one problem, reported where it stands; not a second one about the name it should have been.
    meant = {_meant(name, components or ()) for name in named if name not in (components or ())}
    why = "the algorithm needs " + ", ".join(components or ()) + "; each needs accelerators"
    for missing in (c for c in components or () if c not in named and c not in meant):
        what, fix = f"{missing} is not placed", f"{missing}: all"
        problem = Problem(code="unplaced-component", key=PATH, what=what, source=block.source, why=why, fix=fix)
        block.problems.append(problem)
    return specs, block.problems


def _split_key(block: Text, text: Text, components: Sequence[str] | None) -> bool:
    """Reject `{actor,rollout: 0-3}`, which YAML reads as {actor: null, rollout: 0-3}.

    In a block without braces, entries stand on lines of their own; there a key without a value is simply empty.
    """
    assert isinstance(block.value, Mapping)
    keys = [str(k) for k in block.value]
    at = keys.index(text.leaf)
    end = next((i for i, k in enumerate(keys[at:], at) if block.child(k).value is not None), len(keys))
    if text.value is not None or end == len(keys):
        return False
    joined, following = keys[at : end + 1], block.child(keys[end])
    if text.source != following.source or (components is not None and not {*joined} <= {*components}):
        return False
    if at == 0 or block.child(keys[at - 1]).value is not None:  # once for all keys that were split
        what = f"YAML ends a key at the comma, so that {', '.join(joined[:-1])} has no value"
        why = "inside braces, commas separate entries; a key with a comma is quoted there"
        fix = f"{quote(','.join(joined))}: {quote(following.value)}"
        text.reject("comma-in-braces", what, why, fix, got=", ".join([*joined[:-1], f"{joined[-1]}: {following.text}"]))
    return True


def _check_names(text: Text, names: Sequence[str], named: set[str], components: Sequence[str] | None) -> None:
    at = 0
    for i, name in enumerate(names):
        at = text.leaf.index(name, at)
        span = (at, at + max(1, len(name)))
        at += len(name)
        if name in named or name in names[:i]:
            code, what, fix = "component-placed-twice", f"{name} is placed twice", f"name {name} in one line only"
            why = "a component has one placement; several pieces of it are joined by commas"
        elif not name:
            code, what = "unknown-component", "a component name is missing"
            why = "a comma in the key gives several components the same placement"
            fix = f"{','.join(filter(None, names)) or 'actor'}: {quote(text.value)}"
        elif components is not None and name not in components:
            near = _meant(name, [c for c in components if c not in {*names, *named}])
            code, what = "unknown-component", f"no component is called {name!r}" + suggestion(near)
            why = "the components of this algorithm are " + ", ".join(components)
            fix = f"{near}: {quote(text.value)}" if near and len(names) == 1 else f"rename or remove {name}"
        else:
            continue
        text.reject(code, what, why, fix, span=span, got=f"{text.leaf}: {text.text}")


def _meant(name: str, components: Sequence[str]) -> str | None:
    """Return the component that an unknown name probably stands for."""
    alias = _OTHER_NAMES.get(name)
    return alias if alias in components else did_you_mean(name, components)


def read_line(whole: Text, names: tuple[str, ...], groups: NodeGroups) -> Line | None:
    """Read one line; None where a problem was found that needs no other line to be seen."""
    value = whole.value
    if isinstance(value, str) and value.strip() == CPU:
        value = {"node_group": ANY_NODE, "placement": 0}
    where = block = dataclasses.replace(whole, value=value)
    before = len(block.problems)
    pool: Pool | None = groups[WHOLE_CLUSTER]
    counts: dict[str, int] = {}
    if isinstance(value, Mapping):
        block.check_keys(KEYS)
        pool = groups.pool_of(block.child("node_group")) if "node_group" in value else pool
        counts = _read_counts(block)
        places = [k for k in _PLACES if k in value]
        if len(places) != 1:
            left = {k: v for k, v in value.items() if k in KEYS and k not in places[1:]}
            fix = block.line(left if places else left | {"placement": "all"})
            what = "is placed twice: " + " and ".join(places) if places else "is placed nowhere"
            block.reject("bad-placement", what, "exactly one of " + ", ".join(_PLACES) + " is given", fix)
            return None
        where = block.child(places[0])
    asked = None if pool is None else _read_place(where, pool)
    each, sharing = counts.get("accelerators_per_rank", 1), counts.get("ranks_per_accelerator", 1)
    if each > 1 and sharing > 1:
        why = "a rank has several accelerators, or several ranks share one"
        fix = "remove one of accelerators_per_rank and ranks_per_accelerator"
        block.reject("bad-placement", "spreads its ranks both ways", why, fix)
    if pool is None or asked is None or len(block.problems) > before:
        return None
    if isinstance(asked, tuple) and check_fit(where, asked, pool) and each * sharing > 1:
        if ":" in where.text:
            at = where.text.index(":")
            text = ",".join(part.split(":")[0] for part in re.sub(r'[\[\]"]', "", where.text).split(","))
            why = "ranks_per_accelerator and accelerators_per_rank spread the ranks already"
            where.reject("bad-placement", "the ranks are given twice", why, where.line(text), span=(at, at + 1))
        else:
            asked = respread(where, [s.accelerators for s in asked], pool, each, sharing)
    if len(block.problems) > before:
        return None
    parallel = Parallel(
        tensor_parallel_size=counts.get("tensor_parallel_size", 1),
        data_parallel_size=counts.get("data_parallel_size"),
        across_nodes=block.child("tensor_parallel_across_nodes").value is True,
    )
    shares = block.child("process").value == "shared"
    return Line(names, block, where, pool, asked, each, sharing, parallel, shares)


def _read_counts(block: Text) -> dict[str, int]:
    """Return the counts of a block that are right; check its other options as well."""
    assert isinstance(block.value, Mapping)
    counts: dict[str, int] = {}
    for key in (k for k in _COUNTS if k in block.value):
        count = block.child(key).count()
        if count is not None and key == "ranks_per_accelerator" and count > MOST_RANKS_EACH:
            why = f"a rank is a process; more than {MOST_RANKS_EACH:,} on one are taken for a typing mistake"
            block.child(key).reject("too-many-ranks", f"{count:,} ranks on each accelerator", why, f"{key}: 1")
        elif count is not None:
            counts[key] = count
    across, process = block.child("tensor_parallel_across_nodes", False), block.child("process", "own")
    if not isinstance(across.value, bool):
        across.reject("bad-placement", "expected true or false", "it is a permission", across.line(True))
    if process.value not in ("shared", "own"):
        why = "own: each rank has a process; shared: with the rank of another component at the same place"
        process.reject("bad-placement", "expected shared or own", why, "process: shared")
    return counts


def _read_place(where: Text, pool: Pool) -> tuple[Segment, ...] | Count | str | None:
    value = where.value
    if where.leaf == "same_as":
        if isinstance(value, str) and value.strip():
            return value.strip()
        where.reject("bad-placement", "expected a component", "it names one", "same_as: actor")
        return None
    if where.leaf == "accelerators" and isinstance(value, int | str) and re.fullmatch(r"-?[0-9]{1,12}", str(value)):
        if int(value) < 1:
            why = f"it is how many {pool.noun}s are wanted"
            where.reject("bad-count", "expected at least 1", why, "accelerators: 1")
            return None
        return Count(count=int(value), why=f"asked for are {int(value)} {pool.noun}s")
    if isinstance(value, str) and value.strip() == "rest":
        return REST
    if not isinstance(value, str) or not (match := _FRACTION.fullmatch(value)):
        return read_segments(where, pool)
    part, total = int(match[1]), int(match[2])
    if part <= total and pool.count * part % total == 0:
        count = pool.count * part // total
        return Count(count=count, why=f"{part}/{total} of {pool.count} {pool.noun}s are {count}")
    what, fix = f"{part}/{total} is more than all there is", where.line("all")
    if part <= total:
        what = f"{part}/{total} of {pool.count} {pool.noun}s is no whole number"
        near = max(1, pool.count * part // total)
        fix = where.line(near if where.leaf == "accelerators" else {"accelerators": near})
    where.reject("uneven-fraction", what, pool.describe(), fix)
    return None


def _join_processes(
    specs: Mapping[str, ComponentSpec], sharers: Mapping[str, Text], *, complete: bool
) -> dict[str, ComponentSpec]:
    """Give components with `process: shared` one process name for each place, compared rank by rank.

    Not `complete`: some lines could not be read, so a component that seems alone may not be.
    """
    own = [name for name in sharers if role_of(name) in _OWN_GROUP]
    others = [name for name in specs if role_of(name) not in _OWN_GROUP]
    for name in own:
        why = f"the {name} ranks form a process group of their own, and a process can join only one"
        fix = "process: own" + (f"        (those that may share: {', '.join(others)})" if others else "")
        sharers[name].reject("process-of-its-own", f"{name} cannot share its processes", why, fix)
    if own or not complete:
        return {}
    places: dict[tuple[object, ...], list[str]] = {}
    for name in sharers:  # the same accelerators, rank by rank; without accelerators, the same nodes
        at = specs[name].locations
        place = (specs[name].node_group, *(column.tobytes() for column in (at.node, at.first, at.count)))
        places.setdefault(place, []).append(name)
    single = [names[0] for names in places.values() if len(names) == 1]
    for name in single[1:] or single:  # of two that are apart, the second is reported
        partner = next((other for other in sharers if other != name), None)
        if partner is None:
            other = next((c for c in others if c != name), None)
            code, what = "process-alone", f"{name} shares its processes with no other component"
            why = "a process is shared by components at the same place that both have process: shared"
            fix = "process: own" + (f"        (or: {other}: {{same_as: {name}, process: shared}})" if other else "")
        else:
            shown = ", ".join(f"{c} is {specs[c].render()}" for c in (name, partner))
            code, what = "process-apart", f"{name} and {partner} are at different places"
            why = f"rank by rank they need the same accelerators of one node group: {shown}"
            fix = f"{name}: {{same_as: {partner}, process: shared}}"
        sharers[name].reject(code, what, why, fix)
    return {
        name: dataclasses.replace(specs[name], process="+".join(names))
        for names in places.values()
        for name in names
        if len(names) > 1
    }


def resolve(lines: Sequence[Line], broken: Collection[str] = ()) -> dict[int, Placed]:
    """Place the lines that can be placed, by index; problems go to the texts of the others.

    Numbers are settled first, then counts in written order, then rests, then `same_as` along its chain: the result
    depends only on the lines themselves.
    `broken` are components whose own line has problems; lines that depend on them are left out silently.
    """
    placed = _settle(lines)
    unplaced = {*broken}
    line_of = {name: i for i, line in reversed(list(enumerate(lines))) for name in line.names}

    def follow(i: int, chain: Sequence[int]) -> Placed | None:
        """Place line `i` after the line whose place it takes; the lines of `chain` wait for it."""
        line, target = lines[i], lines[i].asked
        if i in placed or not isinstance(target, str):
            return placed.get(i)
        others = [n for n in line_of if n not in line.names]
        if i in chain:
            names = " -> ".join(lines[j].names[0] for j in [*chain[chain.index(i) :], i])
            why = "one of them has to be placed in numbers"
            line.where.reject("circular-placement", f"goes in a circle: {names}", why, line.whole.line("all"))
        elif target not in unplaced and target not in line_of:
            near = did_you_mean(target, others)
            what = f"no component is called {target!r}" + suggestion(near)
            fix = line.where.line(near or others[0]) if others else line.whole.line("all")
            line.where.reject("unknown-component", what, "placed are " + (", ".join(others) or "no others"), fix)
        elif target not in unplaced and (found := follow(line_of[target], [*chain, i])) is not None:
            pool, segments = found
            if line.each * line.sharing > 1:
                segments = respread(line.where, [s.accelerators for s in segments], pool, line.each, line.sharing)
            if segments and not unplaced & {*line.names}:
                placed[i] = (pool, segments)
                return placed[i]
        unplaced.update(line.names)
        return None

    for i in range(len(lines)):
        follow(i, [])
    return placed


def _settle(lines: Sequence[Line]) -> dict[int, Placed]:
    """Place the lines with numbers, then those with counts, then rests."""
    placed: dict[int, Placed] = {}
    used: dict[str, Ranges] = {}  # noun, and the label of pools without accelerators -> numbers taken
    turns = [isinstance(line.asked, Count) + (line.asked == REST) for line in lines]
    for i in sorted(range(len(lines)), key=turns.__getitem__):
        line = lines[i]
        pool, asked = line.pool, line.asked
        if isinstance(asked, str):
            continue
        on_accelerators = pool.holds_accelerators
        key = pool.noun if on_accelerators else f"{pool.noun} {pool.label}"
        taken = used.get(key, Ranges())
        found = asked if isinstance(asked, tuple) else ()
        if isinstance(asked, Count):
            free = pool.all - (pool.inside(taken) if on_accelerators else taken)
            found = _pick(line, asked, free, [n for other in lines if other is not line for n in other.names])
        if not found:
            continue
        placed[i] = (pool, found)
        if asked != REST:  # two rests get the same
            numbers = Ranges.of(s.accelerators for s in found)
            if on_accelerators:
                numbers = Ranges.of(outside for piece in numbers.pieces for _, outside in pool.outside(piece))
            used[key] = taken | numbers
    return placed


def _pick(line: Line, asked: Count, free: Ranges, others: Sequence[str]) -> tuple[Segment, ...]:
    """Take the first free neighbours that are enough; else whole free units from the front."""
    pool, noun, count = line.pool, line.pool.noun, asked.count
    if count is None:
        if free:
            return respread(line.where, free.pieces, pool, line.each, line.sharing)
        why = f"the other components use every {noun}; {pool.describe()}"
        line.where.reject("nothing-left", "there is no rest", why, line.whole.line("all"))
        return ()
    # How many accelerators belong together on one node.
    unit = max(line.each, 1 if line.parallel.across_nodes else line.parallel.tensor_parallel_size)
    if count % unit:
        what = f"{count} {noun}s do not divide into units of {unit}"
        why = f"{asked.why}, in units of {unit} (accelerators_per_rank or tensor_parallel_size)"
        line.where.reject("uneven-ranks", what, why, line.where.line(-(-count // unit) * unit))
        return ()
    pieces = _first_fit(free, pool, count, unit)
    if pieces is not None:
        return spread(pieces, line.each, line.sharing)
    left = f"{free} ({len(free)})" if free else "none"
    why = f"{asked.why}; free are {left}" + (f", in units of {unit} on one node" if unit > 1 else "")
    fix = line.whole.line({"same_as": others[0]} if others else "all")
    line.where.reject("not-enough-free", f"{count} {noun}s are not free", f"{why}; {pool.describe()}", fix)
    return ()


def _first_fit(free: Ranges, pool: Pool, count: int, unit: int) -> list[range] | None:
    for piece in free.pieces:
        starts = [piece.start, *(s.first for s in pool.intervals_in(piece)[1:])] if unit > 1 else [piece.start]
        for start in starts:
            wanted = range(start, start + count)
            if wanted.stop <= piece.stop and pool.cut(wanted, unit) is None:
                return [wanted]
    taken: list[range] = []
    for piece in free.pieces:
        for interval in pool.intervals_in(piece):  # no rank lies across two of them
            part = overlap(interval.numbers, piece)
            if whole := min(count, len(part)) // unit * unit:
                taken.append(part[:whole])
                count -= whole
    return None if count else taken

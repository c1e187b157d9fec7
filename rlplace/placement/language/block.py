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

or, instead of lines, a named placement, `{preset: hybrid, accelerators: 8}`, and the plain lines it stands for::

    colocate_all                              every component on all accelerators
    disaggregated                             every component on accelerators of its own
    hybrid                                    actor (and critic) on all; the others side by side on the same
    colocate_actor_ref+colocate_critic_reward actor with reference, critic with reward, all others alone
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence

from rlplace.config.other_names import COMPONENTS, PLACEMENT_KEYS, meant_word
from rlplace.config.yaml_text import quote
from rlplace.errors import Problem, Source, did_you_mean, one_of, suggestion
from rlplace.placement.language.fit import (
    MOST_RANKS_EACH,
    check_fit,
    check_parallel,
    respread,
)
from rlplace.placement.language.grammar import read_segments
from rlplace.placement.language.groups import NodeGroups
from rlplace.placement.language.spec import (
    CPU,
    ComponentSpec,
    Parallel,
    Segment,
    role_of,
    spread,
)
from rlplace.placement.language.text import PATH, Text
from rlplace.placement.machines.pools import ANY_NODE, WHOLE_CLUSTER, Pool
from rlplace.placement.machines.topology import Ranges, overlap, show_range

_PLACES = ("placement", "accelerators", "same_as")  # exactly one of them
_PARALLEL = ("tensor_parallel_size", "context_parallel_size", "data_parallel_size")
_COUNTS = ("ranks_per_accelerator", "accelerators_per_rank", *_PARALLEL)
KEYS = ("node_group", *_PLACES, *_COUNTS, "tensor_parallel_across_nodes", "process")
_FRACTION = re.compile(r"\s*([1-9][0-9]{0,8})\s*/\s*([1-9][0-9]{0,8})\s*")
# The ranks of these roles form a process group of their own, and a process joins only one.
_OWN_GROUP = ("actor", "critic", "reference", "reward")
_NUMBERS = "<numbers, such as 0-3, or all>"  # in a line to be filled in
Placed = tuple[Pool, tuple[Segment, ...]]
REST = 0  # asked for: all that no component with numbers or a count of its own has


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One line of `component_placement`, read."""

    names: tuple[str, ...]
    whole: Text  # key and value as they stand in `component_placement`
    where: Text  # the part that places
    pool: Pool
    # These ranks on these numbers; a count of numbers; the component with the same place.
    asked: tuple[Segment, ...] | int | str
    each: int  # accelerators_per_rank
    sharing: int  # ranks_per_accelerator
    parallel: Parallel
    # Whether each rank is in one process with ranks of other components at its place.
    shares_process: bool


def read_block(
    value: object,
    groups: NodeGroups,
    components: Sequence[str] | None,
    sources: Mapping[str, Source],
    optional: Sequence[str] = (),
) -> tuple[dict[str, ComponentSpec], list[Problem]]:
    """Return the specs of the components that are placed rightly, and the problems of the others.

    value: the block as it was written. components: those that the algorithm needs; None:
    any name may be placed. optional: roles that the job may have besides.
    """
    block = Text.of(value, PATH, "component_placement", sources, [])
    if not isinstance(value, Mapping) or not value:
        _reject_block(block, components)
        return {}, block.problems

    # A preset stands for plain lines.
    if "preset" in value:
        plain = expand_preset(block, groups.topology.num_accelerators, components)
        if block.problems:
            return {}, block.problems
        return read_block(plain, groups, components, sources, optional)

    # Each line by itself.
    lines: list[Line] = []
    named: set[str] = set()
    keys = block.joined(components or (), lists=True)
    block = dataclasses.replace(block, value=keys)
    for key in keys:
        text = block.child(key)
        names = tuple(name.strip() for name in text.leaf.split(","))
        if not _split_key(block, text, components):
            line = read_line(text, names, groups)
            if line is not None:
                lines.append(line)
        _check_names(text, names, named, components, optional)
        named.update(names)

    # Lines that depend on each other, then sizes that depend on the place.
    placed = resolve(lines, named - {name for line in lines for name in line.names})
    specs: dict[str, ComponentSpec] = {}
    sharers: dict[str, Text] = {}
    for i, (pool, segments) in sorted(placed.items()):
        line = lines[i]
        if check_parallel(line.whole, line.names[0], line.parallel, pool, segments):
            for name in line.names:
                if name not in specs:
                    specs[name] = _spec(name, line, pool, segments)
                    if line.shares_process:
                        sharers[name] = line.whole.child("process", "shared")
    specs |= _join_processes(specs, sharers, complete=not block.problems)
    _check_missing(block, named, components or ())
    return specs, block.problems


def _reject_block(block: Text, components: Sequence[str] | None) -> None:
    """Reject a block that is empty or no mapping."""
    what = "expected one line per component"
    if block.value is None or block.value == {}:
        what = "places no component"
    shown = components or ("actor",)
    why = "it places each component on accelerators: "
    why += ", ".join(f"{component}: ..." for component in shown)
    block.reject("empty-placement", what, why, f"{shown[0]}: {_NUMBERS}")


def _spec(
    name: str, line: Line, pool: Pool, segments: Sequence[Segment]
) -> ComponentSpec:
    """Return the spec of one component of a line; its segments are in the order of ranks."""
    by_rank = sorted(segments, key=lambda segment: segment.ranks.start)
    return ComponentSpec(
        name=name,
        pool=pool,
        written=tuple(by_rank),
        key=line.whole.key,
        text=line.whole.text,
        parallel=line.parallel,
    )


def _check_missing(
    block: Text, named: Collection[str], components: Sequence[str]
) -> None:
    """Reject components that are not placed.

    A misspelt name is one problem, reported where it stands; the component that it means
    is not reported again.
    """
    meant = {_meant(name, components) for name in named if name not in components}
    why = "the algorithm needs " + ", ".join(components)
    for component in components:
        if component not in named and component not in meant:
            what = f"{component} is not placed"
            fix = f"{component}: {_NUMBERS}"
            block.reject("unplaced-component", what, why, fix)


def _split_key(block: Text, text: Text, components: Sequence[str] | None) -> bool:
    """Reject `{actor,rollout: 0-3}`, which YAML reads as {actor: null, rollout: 0-3}.

    In a block without braces, entries stand on lines of their own; there a key without a value is simply empty.
    """
    if text.value is not None:
        return False
    # The next key with a value, to which the keys before it belong.
    values = dict(block.entries())
    keys = list(values)
    at = keys.index(text.leaf)
    following = [key for key in keys[at + 1 :] if values[key] is not None]
    if not following:
        return False
    end = keys.index(following[0])
    joined = keys[at : end + 1]
    if components is not None and not set(joined) <= set(components):
        return False
    last = block.child(keys[end])
    if text.source != last.source:
        return False

    # One problem for all keys that were split, at the first of these.
    is_first = at == 0 or values[keys[at - 1]] is not None
    if is_first:
        empty = ", ".join(joined[:-1])
        what = f"YAML ends a key at the comma, so that {empty} has no value"
        why = "inside braces, a key with a comma is quoted"
        fix = f"{quote(','.join(joined))}: {quote(last.value)}"
        got = f"{', '.join(joined)}: {last.text}"
        text.reject("comma-in-braces", what, why, fix, got=got)
    return True


def _check_names(
    text: Text,
    names: Sequence[str],
    named: set[str],
    components: Sequence[str] | None,
    optional: Sequence[str],
) -> None:
    """Reject names of a line that are empty, unknown or given twice. `named`: in lines before."""
    at = 0
    for i, name in enumerate(names):
        at = text.leaf.index(name, at)
        span = (at, at + max(1, len(name)))
        at += len(name)
        got = f"{text.leaf}: {text.text}"
        if name in named or name in names[:i]:
            what = f"{name} is placed twice"
            why = "a component has one placement; several pieces of it are joined by commas"
            fix = f"name {name} in one line only"
            code = "component-placed-twice"
        elif not name:
            what = "a component name is missing"
            why = "commas in the key join components of the same placement"
            others = ",".join(filter(None, names)) or "actor"
            fix = f"{others}: {quote(text.value)}"
            code = "unknown-component"
        elif components is not None and name not in components:
            # A name that is placed already is not meant here.
            free = [c for c in (*components, *optional) if c not in {*names, *named}]
            near = _meant(name, free)
            what = f"no component is called {name!r}" + suggestion(near)
            why = _known_components(components, optional)
            fix = f"one of these names in place of {name}"
            if near and len(names) == 1:
                fix = f"{near}: {quote(text.value)}"
            code = "unknown-component"
        else:
            continue
        text.reject(code, what, why, fix, span=span, got=got)


def _known_components(components: Sequence[str], optional: Sequence[str]) -> str:
    """Write the components of the algorithm, and those that it may have."""
    why = "the components of this algorithm are " + ", ".join(components)
    more = [role for role in optional if role not in components]
    if more:
        why += f"; it may have {', '.join(more)}"
    return why


def _meant(name: str, components: Sequence[str]) -> str | None:
    """Return the component that an unknown name probably stands for."""
    alias = COMPONENTS.get(name.lower(), name)
    if alias in components:
        return alias
    return did_you_mean(alias, components)


def read_line(whole: Text, names: tuple[str, ...], groups: NodeGroups) -> Line | None:
    """Read one line; None where it has a problem that is seen without the other lines."""
    value = whole.value
    if isinstance(value, str) and value.strip() == CPU:
        value = {"node_group": ANY_NODE, "placement": 0}
    block = dataclasses.replace(whole, value=value)
    before = len(block.problems)

    # What is counted, how many ranks for each, and the part that places.
    pool: Pool | None = groups[WHOLE_CLUSTER]
    counts: dict[str, int] = {}
    where = block
    if isinstance(value, Mapping):
        if "node_group" in value:
            pool = groups.pool_of(block.child("node_group"))
        counts = _read_counts(block)
        places = [key for key in _PLACES if key in value]
        if len(places) != 1:
            renamed = _renamed(value)
            # The wrong name has been reported
            if renamed is not None:
                return read_line(
                    dataclasses.replace(whole, value=renamed), names, groups
                )
            _reject_places(block, places)
            return None
        where = block.child(places[0])

    # The place itself: ranks on numbers, a count, or another component.
    asked = None
    if pool is not None:
        asked = _read_place(where, pool)
    each = counts.get("accelerators_per_rank", 1)
    sharing = counts.get("ranks_per_accelerator", 1)
    if each > 1 and sharing > 1:
        what = "has several accelerators per rank and ranks per accelerator"
        why = "only one of both can be above 1"
        fix = "remove accelerators_per_rank or ranks_per_accelerator"
        block.reject("bad-placement", what, why, fix)
    if pool is None or asked is None or len(block.problems) > before:
        return None

    # Numbers are there now: do ranks fit on them?
    if isinstance(asked, tuple) and check_fit(where, asked, pool):
        why = "ranks_per_accelerator and accelerators_per_rank spread the ranks already"
        if each * sharing > 1 and where.has_no_ranks(why):
            numbers = [segment.accelerators for segment in asked]
            asked = respread(where, numbers, pool, each, sharing)
    if len(block.problems) > before:
        return None
    sizes = {key: counts[key] for key in _PARALLEL if key in counts}
    across = block.child("tensor_parallel_across_nodes").value is True
    return Line(
        names=names,
        whole=block,
        where=where,
        pool=pool,
        asked=asked,
        each=each,
        sharing=sharing,
        parallel=Parallel(**sizes, across_nodes=across),
        shares_process=block.child("process").value == "shared",
    )


def _renamed(value: Mapping[object, object]) -> dict[object, object] | None:
    """Return a line that places nowhere with known other names put right; None where that places nowhere too."""
    if any(key in _PLACES for key in value):
        return None
    renamed = {PLACEMENT_KEYS.get(str(key), key): entry for key, entry in value.items()}
    places = [key for key in renamed if key in _PLACES]
    if len(renamed) == len(value) and len(places) == 1:
        return renamed
    return None


def _reject_places(block: Text, places: Sequence[str]) -> None:
    """Reject a line without a place, or with several of `_PLACES`."""
    assert isinstance(block.value, Mapping)
    known = ", ".join(_PLACES)
    what = "is placed nowhere"
    fix = block.open_line(f"one of {known}")
    if places:
        what = f"is placed twice: {' and '.join(places)}"
        # For each place a line without the others.
        fixes = []
        for kept in places:
            left = {
                key: entry
                for key, entry in block.value.items()
                if key not in places or key == kept
            }
            fixes.append(block.line(left))
        fix = one_of(fixes)
    block.reject("bad-placement", what, f"exactly one of {known} is given", fix)


def _read_counts(block: Text) -> dict[str, int]:
    """Return the counts of a block that are right; check its keys and other options as well."""
    assert isinstance(block.value, Mapping)
    block.check_keys(KEYS)
    counts: dict[str, int] = {}
    for key in _COUNTS:
        if key in block.value:
            count = block.child(key).count()
            if count is not None:
                counts[key] = count

    # A rank is a process: so many on one accelerator are a typing mistake.
    sharing = counts.get("ranks_per_accelerator", 1)
    if sharing > MOST_RANKS_EACH:
        text = block.child("ranks_per_accelerator")
        what = f"{sharing:,} ranks on each"
        why = f"a rank is a process; more than {MOST_RANKS_EACH:,} are a typing mistake"
        text.reject("too-many-ranks", what, why, text.open_line("a number"))

    # The two options that are no counts; their defaults are right.
    across = block.child("tensor_parallel_across_nodes", False)
    if not isinstance(across.value, bool):
        what = "expected true or false"
        fix = across.open_line("true or false")
        across.reject("bad-placement", what, "it is a permission", fix)

    process = block.child("process", "own")
    if process.value not in ("shared", "own"):
        what = "expected shared or own"
        why = "own: each rank has a process; shared: with the rank of another component at the same place"
        fix = one_of(["process: shared", "process: own"])
        process.reject("bad-placement", what, why, fix)
    return counts


def _read_place(where: Text, pool: Pool) -> tuple[Segment, ...] | int | str | None:
    """Read the part of a line that places, as `Line.asked` has it; None where it has a problem."""
    if where.leaf == "same_as":
        return _read_same_as(where)
    value = where.value
    word = str(value).strip()
    is_count = isinstance(value, int | str) and re.fullmatch(
        r"-?[0-9]{1,12}", str(value)
    )
    if where.leaf == "accelerators" and is_count:
        if int(word) >= 1:
            return int(word)
        why = f"it is how many {pool.noun}s are wanted"
        fix = where.open_line("a number")
        where.reject("bad-count", "expected at least 1", why, fix)
        return None
    if isinstance(value, str):
        if word == "rest":
            return REST
        fraction = _FRACTION.fullmatch(word)
        if fraction is not None:
            return _read_fraction(where, pool, int(fraction[1]), int(fraction[2]))
    return read_segments(where, pool)


def _read_same_as(where: Text) -> str | None:
    """Read the name of another component."""
    if isinstance(where.value, str) and where.value.strip():
        return where.value.strip()
    fix = where.open_line("a component")
    where.reject("bad-placement", "expected a component", "it names one", fix)
    return None


def _read_fraction(where: Text, pool: Pool, part: int, total: int) -> int | None:
    """Return how many of the pool are `part`/`total` of all; None where that is no whole number."""
    count, remainder = divmod(pool.count * part, total)
    if part <= total and remainder == 0:
        return count
    what = f"{part}/{total} is more than all there is"
    fix = where.line("all")
    if part <= total:
        what = f"{part}/{total} of {pool.count} {pool.noun}s is no whole number"
        count = max(1, count)
        fix = where.line({"accelerators": count})
        if where.leaf == "accelerators":
            fix = where.line(count)
    where.reject("uneven-fraction", what, pool.describe(), fix)
    return None


def _join_processes(
    specs: Mapping[str, ComponentSpec], sharers: Mapping[str, Text], *, complete: bool
) -> dict[str, ComponentSpec]:
    """Give components with `process: shared` one process name for each place, compared rank by rank.

    Not `complete`: some lines could not be read, so a component that seems alone may not be.
    """
    own = [name for name in sharers if role_of(name) in _OWN_GROUP]
    for name in own:
        what = f"{name} cannot share its processes"
        why = f"the {name} ranks form a process group of their own, and a process can join only one"
        sharers[name].reject("process-of-its-own", what, why, "process: own")
    if own or not complete:
        return {}

    # The same place: the same accelerators, rank by rank; without accelerators, the same nodes.
    places: dict[tuple[object, ...], list[str]] = {}
    for name in sharers:
        at = specs[name].locations
        columns = [column.tobytes() for column in (at.node, at.first, at.count)]
        place = (specs[name].node_group, *columns)
        places.setdefault(place, []).append(name)
    _check_alone(specs, sharers, places.values())

    joined = {}
    for names in places.values():
        if len(names) > 1:
            process = "+".join(names)
            for name in names:
                joined[name] = dataclasses.replace(specs[name], process=process)
    return joined


def _check_alone(
    specs: Mapping[str, ComponentSpec],
    sharers: Mapping[str, Text],
    places: Collection[Sequence[str]],
) -> None:
    """Reject components that share their processes and are alone at their place."""
    single = [names[0] for names in places if len(names) == 1]
    # Of two that are apart, the second is reported.
    for name in single[1:] or single:
        others = [other for other in sharers if other != name]
        if others:
            partner = others[0]
            code = "process-apart"
            what = f"{name} and {partner} are at different places"
            shown = ", ".join(f"{c} is {specs[c].render()}" for c in (name, partner))
            why = f"rank by rank they need the same accelerators of one node group: {shown}"
            fix = f"{name}: {{same_as: {partner}, process: shared}}"
        else:
            code = "process-alone"
            what = f"{name} shares its processes with no other component"
            why = "a process is shared by components at the same place that both have process: shared"
            fix = "process: own"
            able = [c for c in specs if c != name and role_of(c) not in _OWN_GROUP]
            if able:
                line = f"{able[0]}: {{same_as: {name}, process: shared}}"
                fix += f"        (or: {line})"
        sharers[name].reject(code, what, why, fix)


def resolve(lines: Sequence[Line], broken: Collection[str] = ()) -> dict[int, Placed]:
    """Place the lines that can be placed, by index; problems go to the texts of the others.

    Numbers come first, then counts in written order, then rests, then `same_as` along its
    chain: the result depends only on the lines themselves. `broken`: components whose own
    line has problems; lines that depend on them are left out silently.
    """
    placed = _settle(lines)
    unplaced = {*broken}
    # Of a component that is placed twice, the first line counts.
    line_of: dict[str, int] = {}
    for i, line in reversed(list(enumerate(lines))):
        line_of |= dict.fromkeys(line.names, i)

    def follow(i: int, chain: Sequence[int]) -> Placed | None:
        """Place line `i` after the line whose place it takes; the lines of `chain` wait for it."""
        line = lines[i]
        target = line.asked
        if i in placed or not isinstance(target, str):
            return placed.get(i)
        # A circle, an unknown name, or a line that is placed before this one.
        if i in chain:
            circle = [lines[j].names[0] for j in (*chain[chain.index(i) :], i)]
            what = f"goes in a circle: {' -> '.join(circle)}"
            why = "one of them needs numbers"
            fix = line.whole.line("all")
            line.where.reject("circular-placement", what, why, fix)
        elif target not in unplaced and target not in line_of:
            _reject_target(line, target, line_of)
        elif target not in unplaced:
            found = follow(line_of[target], [*chain, i])
            if found is not None:
                # The same numbers; ranks of another size are spread over them again.
                pool, segments = found
                if line.each * line.sharing > 1:
                    numbers = [segment.accelerators for segment in segments]
                    segments = respread(
                        line.where, numbers, pool, line.each, line.sharing
                    )
                if segments and not unplaced & {*line.names}:
                    placed[i] = (pool, segments)
                    return placed[i]
        unplaced.update(line.names)
        return None

    for i in range(len(lines)):
        follow(i, [])
    return placed


def _reject_target(line: Line, target: str, placed: Collection[str]) -> None:
    """Reject a `same_as` that names no component. `placed`: the components of all lines."""
    others = [name for name in placed if name not in line.names]
    near = _meant(target, others)
    what = f"no component is called {target!r}" + suggestion(near)
    why = "placed are " + ", ".join(placed)
    if near:
        fix = line.where.line(near)
    elif others:
        fix = line.where.open_line("one of these")
    else:
        fix = line.where.open_line("a component")
    line.where.reject("unknown-component", what, why, fix)


def _settle(lines: Sequence[Line]) -> dict[int, Placed]:
    """Place the lines with numbers, then those with counts, then rests."""
    placed: dict[int, Placed] = {}
    # Noun of the pool (with its label where it holds no accelerators) -> numbers taken.
    used: dict[str, Ranges] = {}
    for i in sorted(range(len(lines)), key=lambda i: _turn(lines[i])):
        line = lines[i]
        pool = line.pool
        on_accelerators = pool.holds_accelerators
        key = pool.noun
        if not on_accelerators:
            key = f"{pool.noun} {pool.label}"
        taken = used.get(key, Ranges())

        found: tuple[Segment, ...] = ()
        if isinstance(line.asked, tuple):
            found = line.asked
        elif isinstance(line.asked, int):
            # Accelerators are taken by their global numbers, all else by those of the pool.
            here = taken
            if on_accelerators:
                here = pool.inside(taken)
            others = [n for other in lines if other is not line for n in other.names]
            found = _pick(line, line.asked, pool.all - here, others)
        if found:
            placed[i] = (pool, found)
        # Two rests get the same
        if line.asked != REST:
            used[key] = taken | _global_numbers(pool, found)
    return placed


def _turn(line: Line) -> int:
    """Return 0 for lines with numbers or another component, 1 for counts, 2 for rests."""
    if line.asked == REST:
        return 2
    return int(isinstance(line.asked, int))


def _global_numbers(pool: Pool, segments: Sequence[Segment]) -> Ranges:
    """Return global numbers of accelerators; numbers of the pool where it holds none."""
    numbers = [segment.accelerators for segment in segments]
    if not pool.holds_accelerators:
        return Ranges.of(numbers)
    found: list[range] = []
    for piece in numbers:
        found += (outside for _, outside in pool.outside(piece))
    return Ranges.of(found)


def _pick(
    line: Line, count: int, free: Ranges, others: Sequence[str]
) -> tuple[Segment, ...]:
    """Take the first free neighbours that are enough; else whole free units from the front.

    others: components of the other lines, whose place a fix may offer.
    """
    pool = line.pool
    noun = pool.noun
    if count == REST:
        if free:
            return respread(line.where, free.pieces, pool, line.each, line.sharing)
        what = f"no {noun} is left"
        why = f"other components use all; {pool.describe()}"
        line.where.reject("nothing-left", what, why, line.whole.open_line())
        return ()

    # How many accelerators belong together on one node.
    unit = line.each
    if not line.parallel.across_nodes:
        unit = max(unit, line.parallel.tensor_parallel_size)
    if count % unit:
        what = f"{count} {noun}s do not divide into units of {unit}"
        why = "a unit is accelerators_per_rank or tensor_parallel_size"
        next_multiple = -(-count // unit) * unit
        fix = line.where.line(next_multiple)
        line.where.reject("uneven-ranks", what, why, fix)
        return ()

    pieces = _first_fit(free, pool, count, unit)
    if pieces is not None:
        return spread(pieces, line.each, line.sharing)
    why = "none is free"
    if free:
        why = f"free are {free} ({len(free)})"
    if unit > 1:
        why += f", in units of {unit} on one node"
    why += f"; {pool.describe()}"
    fix = line.where.open_line("a number")
    if others:
        fix = one_of(line.whole.line({"same_as": other}) for other in others)
    line.where.reject("not-enough-free", f"{count} {noun}s are not free", why, fix)
    return ()


def _first_fit(free: Ranges, pool: Pool, count: int, unit: int) -> list[range] | None:
    """Return `count` free numbers in whole units; None where there are not enough.

    Neighbours on one piece are better; a unit never lies on two intervals.
    """
    for piece in free.pieces:
        starts = [piece.start]
        if unit > 1:
            starts += [i.first for i in pool.intervals_in(piece)[1:]]
        for start in starts:
            wanted = range(start, start + count)
            if wanted.stop <= piece.stop and pool.cut(wanted, unit) is None:
                return [wanted]

    # Not in one piece: whole units of each interval, from the front.
    taken: list[range] = []
    for piece in free.pieces:
        for interval in pool.intervals_in(piece):
            part = overlap(interval.numbers, piece)
            whole = min(count, len(part)) // unit * unit
            if whole:
                taken.append(part[:whole])
                count -= whole
    if count:
        return None
    return taken


# ── Presets ──────────────────────────────────────────────────────────────────────────

# Names with and without colocate_ -> components of the pair.
_TOGETHER = {
    "actor_ref": ("actor", "reference"),
    "critic_reward": ("critic", "reward"),
}
PRESETS = (
    "hybrid",
    "colocate_all",
    "disaggregated",
    *(f"colocate_{pair}" for pair in _TOGETHER),
)
_PPO = ("actor", "env", "rollout")
_LEARNERS = ("actor", "critic")
Sets = list[tuple[str, ...]]  # each of components that share accelerators


def expand_preset(
    block: Text, total: int, components: Sequence[str] | None
) -> dict[str, str]:
    """Map components (None: those of a PPO job) to lines on `total` accelerators; record problems in `block`."""
    assert isinstance(block.value, Mapping)
    # The rollout comes last on the accelerators.
    names = sorted(components or _PPO, key=lambda name: name == "rollout")
    block.check_keys(("preset", "accelerators", *names))
    sizes: dict[str, int] = {}
    for key in ("accelerators", *names):
        if key in block.value:
            count = block.child(key).count()
            if count is not None:
                sizes[key] = count

    rows = _rows_of(block.child("preset"), names)
    room = sizes.pop("accelerators", total)
    if room > total:
        what = f"{room} accelerators do not exist"
        why = f"this cluster has {total}"
        _reject_size(block, "accelerators", what, why, total)
    lines: dict[str, str] = {}
    for sets in rows:
        if not block.problems:
            lines |= _side_by_side(block, sets, room, sizes)
    return {name: lines[name] for name in names if name in lines}


def _rows_of(preset: Text, names: Sequence[str]) -> list[Sets]:
    """Return rows of sets: those of a row lie side by side, and each row begins at the first accelerator."""
    words = [word.strip() for word in str(preset.value).split("+")]
    if words == ["hybrid"]:
        learners: list[Sets] = [[(name,)] for name in names if name in _LEARNERS]
        return [*learners, [(name,) for name in names if name not in _LEARNERS]]
    if words == ["colocate_all"]:
        return [[tuple(names)]]
    if words == ["disaggregated"]:
        words = []

    # Pairs that share accelerators, in the order of their first components; others alone.
    together: Sets = []
    for word in words:
        pair = _TOGETHER.get(word.removeprefix("colocate_"))
        if pair is None:
            _reject_preset(preset, word)
            return []
        members = tuple(name for name in names if role_of(name) in pair)
        if members:
            together.append(members)
    alone = []
    for name in names:
        if not any(name in members for members in together):
            alone.append((name,))
    return [sorted([*together, *alone], key=lambda members: names.index(members[0]))]


def _reject_preset(preset: Text, word: str) -> None:
    """Reject a preset, or a part of one, that does not exist."""
    near = meant_word(word, (*PRESETS, *_TOGETHER))
    what = f"there is no preset {word!r}" + suggestion(near)
    why = f"presets are {', '.join(PRESETS)}; the last two can be joined by +"
    fix = preset.open_line("one of these")
    at = preset.text.find(word)
    if near and at >= 0:
        after = preset.text[at + len(word) :]
        fix = f"preset: {preset.text[:at]}{near}{after}"
    preset.reject("unknown-preset", what, why, fix)


def _side_by_side(
    block: Text, sets: Sets, room: int, sizes: Mapping[str, int]
) -> dict[str, str]:
    """Place each set on the next accelerators; sets without a size share evenly what is left.

    room: accelerators. sizes: accelerators of the components that have a size.
    """
    # The size of each set, by any of its components; None: it has no size.
    asked: list[int | None] = []
    for members in sets:
        sized = [name for name in members if name in sizes]
        given = {sizes[name]: name for name in reversed(sized)}
        if len(given) > 1:
            texts = " and ".join(f"{name}: {sizes[name]}" for name in sized)
            what = f"{texts} are together and differ in size"
            why = f"this preset puts {' and '.join(members)} on the same accelerators"
            _reject_size(block, given[min(given)], what, why, max(given))
            return {}
        asked.append(next(iter(given), None))

    # Sets without a size get at least one accelerator each.
    taken = sum(size or 0 for size in asked)
    unsized = asked.count(None)
    if room - taken < unsized:
        _reject_sum(block, sets, room, sizes, taken, unsized)
        return {}
    lines: dict[str, str] = {}
    start = 0
    for members, size in zip(sets, asked, strict=True):
        count = size
        if count is None:
            count = (room - taken) // unsized
        lines |= dict.fromkeys(members, show_range(range(start, start + count)))
        start += count
    return lines


def _reject_sum(
    block: Text,
    sets: Sets,
    room: int,
    sizes: Mapping[str, int],
    taken: int,
    unsized: int,
) -> None:
    """Reject sizes that together are too large. `unsized`: sets that have none."""
    sized = [name for members in sets for name in members if name in sizes]
    what = f"{taken} accelerators are asked for"
    if unsized:
        what += f", and {unsized} more sets get some"
    why = f"there are {room} for {len(sets)} sets"
    fix = f"accelerators: {len(sets)}"
    if sized:
        even = max(1, room // len(sets))
        fix = "\n".join(f"{name}: {even}" for name in sized)
    largest = max(sized, key=lambda name: sizes[name], default=sets[0][0])
    _reject_size(block, largest, what, why, 1, fix)


def _reject_size(
    block: Text, key: str, what: str, why: str, size: int, fix: str = ""
) -> None:
    """Reject the size of a component. `size`: for the fix, where `fix` is not given."""
    text = block.child(key, 0)
    fix = fix or f"{key}: {max(1, size)}"
    text.reject("preset-sizes", what, why, fix, got=f"{key}: {text.text}")

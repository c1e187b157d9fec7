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
Placed = tuple[Pool, tuple[Segment, ...]]
REST = 0  # asked for: all that no component with numbers or a count of its own has


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One line of `component_placement`, read."""

    names: tuple[str, ...]
    whole: Text  # key and value as they stand in `component_placement`
    where: Text  # the part that places
    pool: Pool
    asked: (
        tuple[Segment, ...] | int | str
    )  # these ranks on these numbers; that many; as the component of this name
    each: int  # accelerators_per_rank
    sharing: int  # ranks_per_accelerator
    parallel: Parallel
    shares_process: bool  # with the other lines of the same place that share theirs


def read_block(
    value: object,
    groups: NodeGroups,
    components: Sequence[str] | None,
    sources: Mapping[str, Source],
    optional: Sequence[str] = (),
) -> tuple[dict[str, ComponentSpec], list[Problem]]:
    """Return the specs of the components that are placed rightly, and the problems of the others."""
    block = Text.of(value, PATH, "component_placement", sources, [])
    if not isinstance(value, Mapping) or not value:
        what = (
            "places no component"
            if value is None or value == {}
            else "expected one line per component"
        )
        why = "it places each component on accelerators: " + ", ".join(
            f"{c}: ..." for c in components or ("actor",)
        )
        block.reject(
            "empty-placement",
            what,
            why,
            f"{(components or ('actor',))[0]}: <numbers, such as 0-3, or all>",
        )
        return {}, block.problems
    if "preset" in value:
        plain = expand_preset(block, groups.topology.num_accelerators, components)
        if block.problems:
            return ({}, block.problems)
        return read_block(plain, groups, components, sources, optional)
    lines: list[Line] = []
    named: set[str] = set()
    keys = block.joined(components or (), lists=True)
    block = dataclasses.replace(block, value=keys)
    for key in keys:
        text = block.child(key)
        names = tuple(n.strip() for n in text.leaf.split(","))
        line = (
            None
            if _split_key(block, text, components)
            else read_line(text, names, groups)
        )
        _check_names(text, names, named, components, optional)
        named.update(names)
        lines += [line] if line is not None else []
    placed = resolve(lines, named - {name for line in lines for name in line.names})
    specs: dict[str, ComponentSpec] = {}
    sharers: dict[str, Text] = {}
    for i, (pool, segments) in sorted(placed.items()):
        whole = lines[i].whole
        parallel = lines[i].parallel
        if check_parallel(whole, lines[i].names[0], parallel, pool, segments):
            by_rank = tuple(sorted(segments, key=lambda s: s.ranks.start))
            for name in (name for name in lines[i].names if name not in specs):
                specs[name] = ComponentSpec(
                    name=name,
                    pool=pool,
                    written=by_rank,
                    key=whole.key,
                    text=whole.text,
                    parallel=parallel,
                )
                if lines[i].shares_process:
                    sharers[name] = whole.child("process", "shared")
    specs |= _join_processes(specs, sharers, complete=not block.problems)
    # A misspelt name is one problem, reported where it stands; not a second one about the name it should have been.
    meant = {
        _meant(name, components or ())
        for name in named
        if name not in (components or ())
    }
    why = "the algorithm needs " + ", ".join(components or ())
    for missing in (c for c in components or () if c not in named and c not in meant):
        block.reject(
            "unplaced-component",
            f"{missing} is not placed",
            why,
            f"{missing}: <numbers, such as 0-3, or all>",
        )
    return specs, block.problems


def _split_key(block: Text, text: Text, components: Sequence[str] | None) -> bool:
    """Reject `{actor,rollout: 0-3}`, which YAML reads as {actor: null, rollout: 0-3}.

    In a block without braces, entries stand on lines of their own; there a key without a value is simply empty.
    """
    values = dict(block.entries())
    keys = list(values)
    at = keys.index(text.leaf)
    end = next(
        (i for i, key in enumerate(keys) if i > at and values[key] is not None), None
    )
    if text.value is not None or end is None:
        return False
    joined = keys[at : end + 1]
    following = block.child(keys[end])
    if text.source != following.source or (
        components is not None and not {*joined} <= {*components}
    ):
        return False
    if at == 0 or values[keys[at - 1]] is not None:  # once for all keys that were split
        what = f"YAML ends a key at the comma, so that {', '.join(joined[:-1])} has no value"
        fix = f"{quote(','.join(joined))}: {quote(following.value)}"
        got = f"{', '.join(joined)}: {following.text}"
        text.reject(
            "comma-in-braces",
            what,
            "inside braces, a key with a comma is quoted",
            fix,
            got=got,
        )
    return True


def _check_names(
    text: Text,
    names: Sequence[str],
    named: set[str],
    components: Sequence[str] | None,
    optional: Sequence[str],
) -> None:
    at = 0
    for i, name in enumerate(names):
        at = text.leaf.index(name, at)
        span = (at, at + max(1, len(name)))
        at += len(name)
        code = "unknown-component"
        fix = ""
        if name in named or name in names[:i]:
            code = "component-placed-twice"
            what = f"{name} is placed twice"
            fix = f"name {name} in one line only"
            why = "a component has one placement; several pieces of it are joined by commas"
        elif not name:
            what = "a component name is missing"
            why = "commas in the key join components of the same placement"
            fix = f"{','.join(filter(None, names)) or 'actor'}: {quote(text.value)}"
        elif components is not None and name not in components:
            near = _meant(
                name, [c for c in (*components, *optional) if c not in {*names, *named}]
            )
            what = f"no component is called {name!r}" + suggestion(near)
            more = [role for role in optional if role not in components]
            why = "the components of this algorithm are " + ", ".join(components)
            why += f"; it may have {', '.join(more)}" if more else ""
            fix = (
                f"{near}: {quote(text.value)}"
                if near and len(names) == 1
                else f"one of these names in place of {name}"
            )
        else:
            continue
        text.reject(code, what, why, fix, span=span, got=f"{text.leaf}: {text.text}")


def _meant(name: str, components: Sequence[str]) -> str | None:
    """Return the component that an unknown name probably stands for."""
    alias = COMPONENTS.get(name.lower(), name)
    if alias in components:
        return alias
    return did_you_mean(alias, components)


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
        pool = (
            groups.pool_of(block.child("node_group")) if "node_group" in value else pool
        )
        counts = _read_counts(block)
        places = [k for k in _PLACES if k in value]
        if len(places) != 1:
            meant = {PLACEMENT_KEYS.get(k, k): v for k, v in value.items()}
            if (
                not places
                and len(meant) == len(value)
                and sum(k in _PLACES for k in meant) == 1
            ):
                return read_line(
                    dataclasses.replace(whole, value=meant), names, groups
                )  # the name is reported
            fix = one_of(
                block.line(
                    {k: v for k, v in value.items() if k not in places or k == kept}
                )
                for kept in places
            )
            fix = fix if places else block.open_line("one of " + ", ".join(_PLACES))
            what = (
                "is placed twice: " + " and ".join(places)
                if places
                else "is placed nowhere"
            )
            block.reject(
                "bad-placement",
                what,
                "exactly one of " + ", ".join(_PLACES) + " is given",
                fix,
            )
            return None
        where = block.child(places[0])
    asked = None if pool is None else _read_place(where, pool)
    each = counts.get("accelerators_per_rank", 1)
    sharing = counts.get("ranks_per_accelerator", 1)
    if each > 1 and sharing > 1:
        why = "only one of both can be above 1"
        fix = "remove accelerators_per_rank or ranks_per_accelerator"
        block.reject(
            "bad-placement",
            "has several accelerators per rank and ranks per accelerator",
            why,
            fix,
        )
    if pool is None or asked is None or len(block.problems) > before:
        return None
    why = "ranks_per_accelerator and accelerators_per_rank spread the ranks already"
    if (
        isinstance(asked, tuple)
        and check_fit(where, asked, pool)
        and each * sharing > 1
        and where.has_no_ranks(why)
    ):
        asked = respread(where, [s.accelerators for s in asked], pool, each, sharing)
    if len(block.problems) > before:
        return None
    parallel = Parallel(
        **{key: counts[key] for key in _PARALLEL if key in counts},
        across_nodes=block.child("tensor_parallel_across_nodes").value is True,
    )
    shares = block.child("process").value == "shared"
    return Line(names, block, where, pool, asked, each, sharing, parallel, shares)


def _read_counts(block: Text) -> dict[str, int]:
    """Return the counts of a block that are right; check its keys and other options as well."""
    assert isinstance(block.value, Mapping)
    block.check_keys(KEYS)
    texts = [block.child(key) for key in _COUNTS if key in block.value]
    counts = {text.leaf: count for text in texts if (count := text.count()) is not None}
    if (sharing := counts.get("ranks_per_accelerator", 1)) > MOST_RANKS_EACH:
        why = f"a rank is a process; more than {MOST_RANKS_EACH:,} are a typing mistake"
        text = block.child("ranks_per_accelerator")
        text.reject(
            "too-many-ranks",
            f"{sharing:,} ranks on each",
            why,
            text.open_line("a number"),
        )
    across = block.child("tensor_parallel_across_nodes", False)
    process = block.child("process", "own")
    if not isinstance(across.value, bool):
        across.reject(
            "bad-placement",
            "expected true or false",
            "it is a permission",
            across.open_line("true or false"),
        )
    if process.value not in ("shared", "own"):
        why = "own: each rank has a process; shared: with the rank of another component at the same place"
        process.reject(
            "bad-placement",
            "expected shared or own",
            why,
            one_of(["process: shared", "process: own"]),
        )
    return counts


def _read_place(where: Text, pool: Pool) -> tuple[Segment, ...] | int | str | None:
    value, is_text = where.value, isinstance(where.value, str)
    word = str(value).strip()
    if where.leaf == "same_as":
        if is_text and word:
            return word
        where.reject(
            "bad-placement",
            "expected a component",
            "it names one",
            where.open_line("a component"),
        )
        return None
    if (
        where.leaf == "accelerators"
        and isinstance(value, int | str)
        and re.fullmatch(r"-?[0-9]{1,12}", str(value))
    ):
        if int(value) >= 1:
            return int(value)
        where.reject(
            "bad-count",
            "expected at least 1",
            f"it is how many {pool.noun}s are wanted",
            where.open_line("a number"),
        )
        return None
    if is_text and word == "rest":
        return REST
    match = _FRACTION.fullmatch(word) if is_text else None
    if match is None:
        return read_segments(where, pool)
    part = int(match[1])
    total = int(match[2])
    count, remainder = divmod(pool.count * part, total)
    if part <= total and remainder == 0:
        return count
    what = f"{part}/{total} is more than all there is"
    fix = where.line("all")
    if part <= total:
        what = f"{part}/{total} of {pool.count} {pool.noun}s is no whole number"
        count = max(1, count)
        fix = where.line(
            count if where.leaf == "accelerators" else {"accelerators": count}
        )
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
        why = f"the {name} ranks form a process group of their own, and a process can join only one"
        sharers[name].reject(
            "process-of-its-own",
            f"{name} cannot share its processes",
            why,
            "process: own",
        )
    if own or not complete:
        return {}
    places: dict[tuple[object, ...], list[str]] = {}
    for name in (
        sharers
    ):  # the same accelerators, rank by rank; without accelerators, the same nodes
        at = specs[name].locations
        place = (
            specs[name].node_group,
            *(column.tobytes() for column in (at.node, at.first, at.count)),
        )
        places.setdefault(place, []).append(name)
    single = [names[0] for names in places.values() if len(names) == 1]
    for name in single[1:] or single:  # of two that are apart, the second is reported
        partner = next((other for other in sharers if other != name), None)
        if partner is None:
            other = next(
                (c for c in specs if c != name and role_of(c) not in _OWN_GROUP), None
            )
            code = "process-alone"
            what = f"{name} shares its processes with no other component"
            why = "a process is shared by components at the same place that both have process: shared"
            fix = "process: own" + (
                f"        (or: {other}: {{same_as: {name}, process: shared}})"
                if other
                else ""
            )
        else:
            code = "process-apart"
            what = f"{name} and {partner} are at different places"
            shown = ", ".join(f"{c} is {specs[c].render()}" for c in (name, partner))
            why = f"rank by rank they need the same accelerators of one node group: {shown}"
            fix = f"{name}: {{same_as: {partner}, process: shared}}"
        sharers[name].reject(code, what, why, fix)
    shared = {
        name: "+".join(names)
        for names in places.values()
        for name in names
        if len(names) > 1
    }
    return {
        name: dataclasses.replace(specs[name], process=process)
        for name, process in shared.items()
    }


def resolve(lines: Sequence[Line], broken: Collection[str] = ()) -> dict[int, Placed]:
    """Place the lines that can be placed, by index; problems go to the texts of the others.

    Numbers are settled first, then counts in written order, then rests, then `same_as` along its chain: the result
    depends only on the lines themselves.
    `broken` are components whose own line has problems; lines that depend on them are left out silently.
    """
    placed = _settle(lines)
    unplaced = {*broken}
    line_of = {
        name: i for i, line in reversed(list(enumerate(lines))) for name in line.names
    }

    def follow(i: int, chain: Sequence[int]) -> Placed | None:
        """Place line `i` after the line whose place it takes; the lines of `chain` wait for it."""
        line = lines[i]
        target = lines[i].asked
        if i in placed or not isinstance(target, str):
            return placed.get(i)
        if i in chain:
            what = "goes in a circle: " + " -> ".join(
                lines[j].names[0] for j in [*chain[chain.index(i) :], i]
            )
            line.where.reject(
                "circular-placement",
                what,
                "one of them needs numbers",
                line.whole.line("all"),
            )
        elif target not in unplaced and target not in line_of:
            others = [n for n in line_of if n not in line.names]
            near = _meant(target, others)
            what = f"no component is called {target!r}" + suggestion(near)
            why = "placed are " + ", ".join(line_of)
            fix = (
                line.where.line(near)
                if near
                else line.where.open_line("one of these" if others else "a component")
            )
            line.where.reject("unknown-component", what, why, fix)
        elif (
            target not in unplaced
            and (found := follow(line_of[target], [*chain, i])) is not None
        ):
            pool, segments = found
            if line.each * line.sharing > 1:
                numbers = [s.accelerators for s in segments]
                segments = respread(line.where, numbers, pool, line.each, line.sharing)
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
    used: dict[
        str, Ranges
    ] = {}  # noun, and the label of pools without accelerators -> numbers taken
    turns = [isinstance(line.asked, int) + (line.asked == REST) for line in lines]
    for i in sorted(range(len(lines)), key=turns.__getitem__):
        line = lines[i]
        pool = lines[i].pool
        asked = lines[i].asked
        on_accelerators = pool.holds_accelerators
        key = pool.noun if on_accelerators else f"{pool.noun} {pool.label}"
        taken = used.get(key, Ranges())
        found = asked if isinstance(asked, tuple) else ()
        if isinstance(asked, int):
            free = pool.all - (pool.inside(taken) if on_accelerators else taken)
            found = _pick(
                line,
                asked,
                free,
                [n for other in lines if other is not line for n in other.names],
            )
        if found:
            placed[i] = (pool, found)
        if asked != REST:  # two rests get the same
            numbers = [s.accelerators for s in found]
            if on_accelerators:
                numbers = [
                    outside for piece in numbers for _, outside in pool.outside(piece)
                ]
            used[key] = taken | Ranges.of(numbers)
    return placed


def _pick(
    line: Line, count: int, free: Ranges, others: Sequence[str]
) -> tuple[Segment, ...]:
    """Take the first free neighbours that are enough; else whole free units from the front."""
    pool, noun = line.pool, line.pool.noun
    if count == REST:
        if free:
            return respread(line.where, free.pieces, pool, line.each, line.sharing)
        why = f"other components use all; {pool.describe()}"
        line.where.reject(
            "nothing-left", f"no {noun} is left", why, line.whole.open_line()
        )
        return ()
    # How many accelerators belong together on one node.
    unit = max(
        line.each,
        1 if line.parallel.across_nodes else line.parallel.tensor_parallel_size,
    )
    if count % unit:
        what = f"{count} {noun}s do not divide into units of {unit}"
        fix = line.where.line(-(-count // unit) * unit)
        line.where.reject(
            "uneven-ranks",
            what,
            "a unit is accelerators_per_rank or tensor_parallel_size",
            fix,
        )
        return ()
    pieces = _first_fit(free, pool, count, unit)
    if pieces is not None:
        return spread(pieces, line.each, line.sharing)
    why = f"free are {free} ({len(free)})" if free else "none is free"
    why += (
        f", in units of {unit} on one node" if unit > 1 else ""
    ) + f"; {pool.describe()}"
    fix = (
        one_of(line.whole.line({"same_as": other}) for other in others)
        if others
        else line.where.open_line("a number")
    )
    line.where.reject("not-enough-free", f"{count} {noun}s are not free", why, fix)
    return ()


def _first_fit(free: Ranges, pool: Pool, count: int, unit: int) -> list[range] | None:
    for piece in free.pieces:
        starts = (
            [piece.start, *(s.first for s in pool.intervals_in(piece)[1:])]
            if unit > 1
            else [piece.start]
        )
        for start in starts:
            wanted = range(start, start + count)
            if wanted.stop <= piece.stop and pool.cut(wanted, unit) is None:
                return [wanted]
    taken: list[range] = []
    for part in (
        overlap(i.numbers, piece)
        for piece in free.pieces
        for i in pool.intervals_in(piece)
    ):
        if (
            whole := min(count, len(part)) // unit * unit
        ):  # no rank lies across two intervals
            taken.append(part[:whole])
            count -= whole
    if count:
        return None
    return taken


# ── Presets ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_TOGETHER = {
    "actor_ref": ("actor", "reference"),
    "critic_reward": ("critic", "reward"),
}  # with and without colocate_
PRESETS = (
    "hybrid",
    "colocate_all",
    "disaggregated",
    *(f"colocate_{pair}" for pair in _TOGETHER),
)
_PPO = ("actor", "env", "rollout")
Sets = list[tuple[str, ...]]  # each of components that share accelerators


def expand_preset(
    block: Text, total: int, components: Sequence[str] | None
) -> dict[str, str]:
    """Map components (None: those of a PPO job) to lines on `total` accelerators; record problems in `block`."""
    assert isinstance(block.value, Mapping)
    names = sorted(
        components or _PPO, key=lambda name: name == "rollout"
    )  # it comes last on the accelerators
    block.check_keys(("preset", "accelerators", *names))
    counts = {
        key: block.child(key).count()
        for key in ("accelerators", *names)
        if key in block.value
    }
    sizes = {key: count for key, count in counts.items() if count is not None}
    rows = _rows_of(block.child("preset"), names)
    room = sizes.pop("accelerators", total)
    if room > total:
        _reject_size(
            block,
            "accelerators",
            f"{room} accelerators do not exist",
            f"this cluster has {total}",
            total,
        )
    lines: dict[str, str] = {}
    for sets in rows:
        lines |= {} if block.problems else _side_by_side(block, sets, room, sizes)
    return {n: lines[n] for n in names if n in lines}


def _rows_of(preset: Text, names: Sequence[str]) -> list[Sets]:
    """Return rows of sets: those of a row lie side by side, and each row begins at the first accelerator."""
    words = [w.strip() for w in str(preset.value).split("+")]
    if words == ["hybrid"]:
        learners: list[Sets] = [[(n,)] for n in names if n in ("actor", "critic")]
        return [*learners, [(n,) for n in names if n not in ("actor", "critic")]]
    if words == ["colocate_all"]:
        return [[tuple(names)]]
    together: Sets = []
    for word in words if words != ["disaggregated"] else []:
        pair = _TOGETHER.get(word.removeprefix("colocate_"))
        if pair is None:
            near = meant_word(word, (*PRESETS, *_TOGETHER))
            at = preset.text.find(word)
            fix = (
                f"preset: {preset.text[:at]}{near}{preset.text[at + len(word) :]}"
                if near and at >= 0
                else preset.open_line("one of these")
            )
            what = f"there is no preset {word!r}" + suggestion(near)
            why = (
                "presets are "
                + ", ".join(PRESETS)
                + "; the last two can be joined by +"
            )
            preset.reject("unknown-preset", what, why, fix)
            return []
        together += (
            [members]
            if (members := tuple(n for n in names if n.partition(".")[0] in pair))
            else []
        )
    alone = [(n,) for n in names if not any(n in members for members in together)]
    return [sorted([*together, *alone], key=lambda members: names.index(members[0]))]


def _side_by_side(
    block: Text, sets: Sets, room: int, sizes: Mapping[str, int]
) -> dict[str, str]:
    """Place each set on the next accelerators; sets without a size share evenly what is left."""
    asked: list[int | None] = []
    for members in sets:
        given = {sizes[n]: n for n in reversed(members) if n in sizes}
        if len(given) > 1:
            what = (
                " and ".join(f"{n}: {sizes[n]}" for n in members if n in sizes)
                + " are together and differ in size"
            )
            why = f"this preset puts {' and '.join(members)} on the same accelerators"
            _reject_size(block, given[min(given)], what, why, max(given))
            return {}
        asked.append(next(iter(given), None))
    left = room - sum(a or 0 for a in asked)
    open_ = asked.count(None)
    if left < open_:
        sized = [n for members in sets for n in members if n in sizes]
        what = f"{room - left} accelerators are asked for" + (
            f", and {open_} more sets get some" if open_ else ""
        )
        fix = (
            "\n".join(f"{n}: {max(1, room // len(sets))}" for n in sized)
            or f"accelerators: {len(sets)}"
        )
        largest = max(sized, key=lambda n: sizes[n], default=sets[0][0])
        _reject_size(
            block, largest, what, f"there are {room} for {len(sets)} sets", 1, fix
        )
        return {}
    lines: dict[str, str] = {}
    start = 0
    for members, own in zip(sets, asked, strict=True):
        count = left // open_ if own is None else own
        lines |= dict.fromkeys(members, show_range(range(start, start + count)))
        start += count
    return lines


def _reject_size(
    block: Text, key: str, what: str, why: str, size: int, fix: str = ""
) -> None:
    text = block.child(key, 0)
    text.reject(
        "preset-sizes",
        what,
        why,
        fix or f"{key}: {max(1, size)}",
        got=f"{key}: {text.text}",
    )

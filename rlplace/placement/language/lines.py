"""Parse one line of `component_placement`: the components in its key, the counted resource, and the placement.

Each line is parsed separately. `rest` and `same_as`, which depend on other lines, are resolved later.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence

from rlplace.config.other_names import COMPONENTS, NODE_KEYS, PLACEMENT_KEYS
from rlplace.errors import did_you_mean
from rlplace.placement.language.faults import Fault
from rlplace.placement.language.fit import (
    MOST_RANKS_EACH,
    check_fit,
    has_no_ranks,
    respread,
)
from rlplace.placement.language.grammar import read_segments
from rlplace.placement.language.groups import NodeGroups
from rlplace.placement.language.spec import CPU, Parallel, Segment, Spread
from rlplace.placement.language.text import COUNTS, KEYS, PARALLEL, PLACES, Text
from rlplace.placement.machines.pools import ANY_NODE, WHOLE_CLUSTER, Pool

MOST_COUNTED = 10**6  # processes, accelerators; a larger count is a typing mistake
REST = 0  # asked for: all that no component with numbers or a count of its own has
_FRACTION = re.compile(r"\s*([1-9][0-9]{0,8})\s*/\s*([1-9][0-9]{0,8})\s*")
# A label of a node group, between commas.
_LABEL = re.compile(r"[^\s,](?:[^,]*[^\s,])?")
_INTEGER = re.compile(r"-?[0-9]{1,12}")


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One line of `component_placement` after it was read by itself. Its ranks have no place yet.

    `names`: the components in its key. `whole`: key and value of the line. `where`: the part of the value that gives
    the place. `pool`: the accelerators, nodes or other hardware that its numbers count. `asked`: what the line asks
    for: segments (ranks on numbers); a count of numbers; REST: all numbers that are left; or the name of the component
    whose place it takes. `spread`: how ranks are spread over a count of numbers. `parallel`: the parallel sizes that
    the line gives. `shares_process`: whether its ranks share processes with ranks of other components at the same
    place.
    """

    names: tuple[str, ...]
    whole: Text  # key and value as they stand in `component_placement`
    where: Text  # the part that places
    pool: Pool
    # Segments: ranks on numbers. A whole number: how many numbers; REST: all that are left. A text: the component whose
    # place it takes.
    asked: tuple[Segment, ...] | int | str
    spread: Spread = dataclasses.field(default_factory=Spread)
    parallel: Parallel = dataclasses.field(default_factory=Parallel)
    # Whether each rank is in one process with ranks of other components at its place.
    shares_process: bool = False


def read_line(
    whole: Text, names: tuple[str, ...], groups: NodeGroups, faults: list[Fault]
) -> Line | None:
    """Return one line of `component_placement`; None if the line is wrong by itself. Faults are added to `faults`.

    `whole`: key and value of the line. `names`: the components in its key. `groups`: the node groups.
    """
    if isinstance(whole.value, str) and whole.value.strip() == CPU:
        # One process of the first node.
        segment = Segment(accelerators=range(1), ranks=range(1))
        return Line(names, whole, whole, groups[ANY_NODE], (segment,))
    before = len(faults)

    # What is counted, how many ranks for each, and the part that places.
    pool: Pool | None = groups[WHOLE_CLUSTER]
    counts: dict[str, int] = {}
    where = whole
    if isinstance(whole.value, Mapping):
        if "node_group" in whole.entries:
            label = read_label(whole.entries["node_group"], groups, faults)
            pool = None
            if label is not None:
                pool = groups[label]
        node = next((key for key in NODE_KEYS if key in whole.entries), None)
        if node is not None and pool is not None:
            facts = {"node": node, "pool": pool}
            faults.append(Fault("bad-placement", whole, "of_node", facts=facts))
            return None
        counts = _read_options(whole, faults)
        places = [key for key in PLACES if key in whole.entries]
        if len(places) != 1:
            renamed = _renamed(whole)
            # The wrong name has been reported.
            if renamed is not None:
                return read_line(renamed, names, groups, faults)
            error = "nowhere"
            if places:
                error = "two_places"
            facts = {"places": places}
            faults.append(Fault("bad-placement", whole, error, facts=facts))
            return None
        where = whole.entries[places[0]]

    # The place itself: ranks on numbers, a count, or another component.
    asked = None
    if pool is not None:
        asked = _read_place(where, pool, faults)
    spread = Spread(
        each=counts.get("accelerators_per_rank", 1),
        sharing=counts.get("ranks_per_accelerator", 1),
    )
    if spread.each > 1 and spread.sharing > 1:
        faults.append(Fault("bad-placement", whole, "two_rules"))
    if pool is None or asked is None or len(faults) > before:
        return None

    # Numbers are there now: do ranks fit on them?
    if isinstance(asked, tuple):
        fits = check_fit(where, asked, pool, faults)
        spreads = not spread.is_plain
        if fits and spreads and has_no_ranks(where, "spread_already", faults):
            numbers = [segment.accelerators for segment in asked]
            asked = respread(where, numbers, pool, spread, faults)
    if len(faults) > before:
        return None
    sizes = {key: counts[key] for key in PARALLEL if key in counts}
    across = whole.entries.get("tensor_parallel_across_nodes")
    may_cross = across is not None and across.value is True
    process = whole.entries.get("process")
    return Line(
        names=names,
        whole=whole,
        where=where,
        pool=pool,
        asked=asked,
        spread=spread,
        parallel=Parallel(**sizes, across_nodes=may_cross),
        shares_process=process is not None and process.value == "shared",
    )


def names_of(
    text: Text,
    named: Collection[str],
    components: Sequence[str] | None,
    optional: Sequence[str],
    inherited: Collection[str] = (),
) -> tuple[tuple[str, ...], list[Fault]]:
    """Return the component names in the key of a line, and faults for names that are empty, unknown or given twice.

    `text`: the line. `named`: the components in earlier lines. `components`: components of the algorithm; None: any
    name may be placed. `optional`: further roles that may be placed. `inherited`: components that another file places,
    such as the config that this one extends; a line for one of them replaces that of the other file.
    """
    names = tuple(name.strip() for name in text.leaf.split(","))
    faults: list[Fault] = []
    at = 0
    for i, name in enumerate(names):
        at = text.leaf.index(name, at)
        span = (at, at + max(1, len(name)))
        at += len(name)
        if name in named or name in names[:i]:
            facts: dict[str, object] = {"name": name}
            faults.append(Fault("component-placed-twice", text, "", span, facts))
        elif not name:
            facts = {"names": names}
            faults.append(Fault("unknown-component", text, "no_name", span, facts))
        elif components is not None and name not in components:
            # A name that is placed already is not meant here.
            roles = (*components, *optional)
            free = [role for role in roles if role not in {*names, *named}]
            alias = COMPONENTS.get(name.lower(), name)
            # A line for a component of another file replaces that of the file
            if alias in inherited:
                free.append(alias)
            elif did_you_mean(alias, free) is None:
                free += [role for role in roles if role in inherited]
            facts = {
                "name": name,
                "names": names,
                "free": free,
                "components": components,
                "optional": optional,
            }
            faults.append(Fault("unknown-component", text, "in_key", span, facts))
    return names, faults


def is_cut(
    block: Text, text: Text, components: Sequence[str] | None, faults: list[Fault]
) -> bool:
    """Return whether YAML has cut the key of a line at a comma.

    YAML reads `{actor,rollout: 0-3}` as {actor: null, rollout: 0-3}. A line without a value outside of braces is not
    cut, it is only empty. `text`: the line. `block`: the block that has the line. `components`: components of the
    algorithm; None: any name may be placed. One fault for all pieces of a cut key is added to `faults`.
    """
    if text.value is not None:
        return False
    # The next key with a value, to which the keys before it belong.
    keys = list(block.entries)
    at = keys.index(text.leaf)
    end = at
    while end < len(keys) and block.entries[keys[end]].value is None:
        end += 1
    if end == len(keys):
        return False
    cut = keys[at : end + 1]
    if components is not None and not set(cut) <= set(components):
        return False
    last = block.entries[keys[end]]
    if text.source != last.source:
        return False

    # One fault for all keys that were cut, at the first of these.
    is_first = at == 0 or block.entries[keys[at - 1]].value is not None
    if is_first:
        facts = {"keys": cut, "last": last}
        faults.append(Fault("comma-in-braces", text, "in_key", facts=facts))
    return True


def read_counts(
    block: Text, keys: Sequence[str], known: Sequence[str], faults: list[Fault]
) -> dict[str, int]:
    """Return key -> count for each key in `keys` for which the block has a valid count.

    `known`: all keys that the block may have. A fault is added to `faults` for each other key, and for each count that
    is not valid.
    """
    check_keys(block, known, faults)
    counts: dict[str, int] = {}
    for key in keys:
        if key in block.entries:
            count = _read_count(block.entries[key], faults)
            if count is not None:
                counts[key] = count
    return counts


def check_keys(block: Text, known: Sequence[str], faults: list[Fault]) -> None:
    """Add a fault for each key of the block that is not in `known`.

    If YAML has cut a value of the block at a comma, add one fault for that instead of one for each piece.
    """
    if block.pieces:
        faults.append(Fault("comma-in-braces", block, "in_value"))
    for key, entry in block.entries.items():
        if key not in known and key not in block.pieces:
            facts = {"known": known, "given": block.entries}
            faults.append(Fault("unknown-key", entry, "in_placement", facts=facts))


def _read_count(text: Text, faults: list[Fault]) -> int | None:
    """Return the value of `text` if it is a whole number from 1 to MOST_COUNTED.

    For any other value, return None and add a fault to `faults`.
    """
    value = text.value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        faults.append(Fault("bad-count", text, "no_number"))
        return None
    if value > MOST_COUNTED:
        facts = {"most": MOST_COUNTED}
        faults.append(Fault("bad-count", text, "too_many", facts=facts))
        return None
    return value


def read_label(text: Text, groups: NodeGroups, faults: list[Fault]) -> str | None:
    """Return the labels in a `node_group` value, joined by commas; None if a group does not exist or has problems.

    The value is one label, several labels with commas, or a list of labels. Faults are added to `faults`.
    """
    found: list[str] = []
    for start, stop, _ in text.items:
        for match in _LABEL.finditer(text.text, start, stop):
            label = match[0]
            if label in groups.broken:
                return None
            fault = _misjoined(text, match.span(), label, found, groups)
            if fault is not None:
                faults.append(fault)
                return None
            found.append(label)
    if not found:
        facts = {"labels": groups.labels}
        faults.append(Fault("unknown-node-group", text, "no_label", facts=facts))
        return None
    return ",".join(found)


def _misjoined(
    text: Text,
    span: tuple[int, int],
    label: str,
    found: Sequence[str],
    groups: NodeGroups,
) -> Fault | None:
    """Return a fault if a node group does not exist or cannot be joined to the groups that are named before it.

    Return None if there is no fault. `span`: columns of the label in the text. `label`: label of the group. `found`:
    the labels before it.
    """
    facts: dict[str, object] = {"label": label}
    if label not in groups.labels:
        facts["labels"] = groups.labels
        return Fault("unknown-node-group", text, "no_group", span, facts)
    if not found:
        return None

    # Joined groups: each once, of one kind, without a common node.
    first = found[0]
    facts["first"] = first
    if label in found:
        facts["found"] = tuple(found)
        return Fault("node-group-repeated", text, "", span, facts)
    noun = groups[label].noun
    if noun != groups[first].noun:
        facts["noun"] = noun
        facts["first_noun"] = groups[first].noun
        return Fault("mixed-node-groups", text, facts=facts)
    before: set[int] = set()
    for other in found:
        before |= groups[other].nodes
    both = groups[label].nodes & before
    if both:
        facts["node"] = min(both)
        return Fault("overlapping-node-groups", text, "", span, facts)
    return None


def _renamed(line: Text) -> Text | None:
    """Return the line with keys of other libraries replaced by rlplace's keys.

    Return None if the line already has a key of rlplace that gives a place, or if the replaced keys do not give exactly
    one place.
    """
    if any(key in PLACES for key in line.entries):
        return None
    values: dict[object, object] = {}
    entries: dict[str, Text] = {}
    for key, entry in line.entries.items():
        ours = PLACEMENT_KEYS.get(key) or did_you_mean(key, PLACES) or key
        values[ours] = entry.value
        entries[ours] = dataclasses.replace(entry, key=f"{line.key}.{ours}", leaf=ours)
    places = [key for key in entries if key in PLACES]
    if len(entries) == len(line.entries) and len(places) == 1:
        return dataclasses.replace(line, value=values, entries=entries)
    return None


def _read_options(line: Text, faults: list[Fault]) -> dict[str, int]:
    """Return key -> count for the valid counts of a line.

    Faults of these counts, of unknown keys and of the other options are added to `faults`.
    """
    counts = read_counts(line, COUNTS, KEYS, faults)

    # A rank is a process: so many on one accelerator are a typing mistake.
    sharing = counts.get("ranks_per_accelerator", 1)
    if sharing > MOST_RANKS_EACH:
        text = line.entries["ranks_per_accelerator"]
        facts = {"ranks": sharing, "most": MOST_RANKS_EACH}
        faults.append(Fault("too-many-ranks", text, "asked", facts=facts))

    # The two options that are no counts.
    across = line.entries.get("tensor_parallel_across_nodes")
    if across is not None and not isinstance(across.value, bool):
        faults.append(Fault("bad-placement", across, "no_permission"))
    process = line.entries.get("process")
    if process is not None and process.value not in ("shared", "own"):
        faults.append(Fault("bad-placement", process, "no_process"))
    return counts


def _read_place(
    where: Text, pool: Pool, faults: list[Fault]
) -> tuple[Segment, ...] | int | str | None:
    """Return the place that a line asks for; None if it is wrong.

    The place is segments, a count of numbers, REST, or the name of the component whose place the line takes. `where`:
    the part of the line that gives the place. `pool`: what its numbers count. A fault is added to `faults` if the place
    is wrong.
    """
    value = where.value
    word = str(value).strip()
    if where.leaf == "same_as":
        if isinstance(value, str) and word:
            return word
        faults.append(Fault("bad-placement", where, "no_component"))
        return None
    is_count = isinstance(value, int | str) and _INTEGER.fullmatch(str(value))
    if where.leaf == "accelerators" and is_count:
        if int(word) >= 1:
            return int(word)
        faults.append(Fault("bad-count", where, "none_wanted", facts={"pool": pool}))
        return None
    if isinstance(value, str):
        if word == "rest":
            return REST
        fraction = _FRACTION.fullmatch(word)
        if fraction is not None:
            return _read_fraction(
                where, pool, int(fraction[1]), int(fraction[2]), faults
            )
    return read_segments(where, pool, faults)


def _read_fraction(
    where: Text, pool: Pool, part: int, total: int, faults: list[Fault]
) -> int | None:
    """Return how many numbers are `part`/`total` of a pool.

    If that is not a whole number, or more than the pool has, return None and add a fault to `faults`. `where`: the
    fraction as it was written.
    """
    count, remainder = divmod(pool.count * part, total)
    if part <= total and remainder == 0:
        return count
    error = "more_than_all"
    if part <= total:
        error = "no_whole_number"
    facts = {"part": part, "total": total, "count": count, "pool": pool}
    faults.append(Fault("uneven-fraction", where, error, facts=facts))
    return None

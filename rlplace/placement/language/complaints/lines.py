"""Words about the block, its keys and names, the options of a line, lines that depend on each other, presets."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rlplace.config.other_names import (
    COMPONENTS,
    NO_SUCH,
    PLACEMENT_KEYS,
    SPLITS,
    WITHOUT_LINE,
    meant_word,
)
from rlplace.config.yaml_text import quote
from rlplace.errors import COMMAND_LINE, did_you_mean, one_of, suggestion
from rlplace.placement.language.complaints.meant import (
    meant_component,
    meant_numbers,
    several_components,
)
from rlplace.placement.language.complaints.paste import line_of, open_line
from rlplace.placement.language.complaints.writer import Facts, Writer
from rlplace.placement.language.faults import Fault
from rlplace.placement.language.grammar import BASE
from rlplace.placement.language.presets import PRESETS, TOGETHER
from rlplace.placement.language.text import PLACES, Text, entry_of, joined, one_line
from rlplace.placement.machines.pools import Pool
from rlplace.placement.machines.topology import Ranges, show_range

# Names of other libraries for the number of ranks
_RANKS = ("ranks", "num_ranks", "n_ranks", "workers", "num_workers", "processes")

# ── The block, its keys and names ───────────────────────────────────────────────────


def _empty_block(fault: Fault) -> Facts:
    """Return name -> value for the error message about an empty `component_placement` block.

    `lines`: one line for each component that has to be placed. `first`: the first of these components.
    """
    shown = fault.facts["components"] or ("actor",)
    lines = ", ".join(f"{component}: ..." for component in shown)
    return {"lines": lines, "first": shown[0]}


def _cut_key(fault: Fault) -> Facts:
    """Return name -> value for the error message about a key that YAML has cut at a comma.

    `got`: the pieces as YAML reads them. `empty`: the pieces without a value. `line`: a corrected line with the whole
    key in quotes.
    """
    keys = fault.facts["keys"]
    last = fault.facts["last"]
    return {
        "got": f"{', '.join(keys)}: {last.text}",
        "empty": ", ".join(keys[:-1]),
        "line": f"{quote(','.join(keys))}: {quote(last.value)}",
    }


def _cut_value(fault: Fault) -> Facts:
    """Return name -> value for the error message about a block with values that YAML has cut at commas.

    `pieces`: the keys that are pieces of values. `line`: a corrected line of the block.
    """
    return _cut(fault.text, _whole(fault.text))


def _cut_lines(fault: Fault) -> Facts:
    """Return name -> value for the error message about a block with keys and values that YAML has cut at commas.

    `pieces`: the keys that are pieces of values. `line`: a corrected line of the block. A key without a value belongs
    to the next key: {actor: null, env: 0-3} was written as {actor,env: 0-3}.
    """
    found: dict[str, object] = {}
    names: list[str] = []
    for key, value in _whole(fault.text).items():
        names.append(key)
        if value is not None:
            found[",".join(names)] = value
            names = []
    return _cut(fault.text, found | dict.fromkeys(names))


def _whole(block: Text) -> dict[str, object]:
    """Return a block in which values that YAML has cut at commas are joined again."""
    assert isinstance(block.value, Mapping)
    keys = [str(key) for key in block.value if str(key) not in block.pieces]
    return joined(block.value, keys)[0]


def _cut(block: Text, meant: Mapping[str, object]) -> Facts:
    """Return name -> value for the error message about a block that YAML has cut at commas.

    `meant`: the block as it was meant. Returned are `pieces`, the keys that are pieces of values, and `line`, a
    corrected line of the block.
    """
    assert isinstance(block.value, Mapping)
    # A piece such as 4:7 has become the number 247.
    remarks = []
    for key in block.value:
        if isinstance(key, int) and key >= BASE:
            a, b = divmod(key, BASE)
            remarks.append(f"or {a}:{b} instead of {key}: YAML takes it for base 60")
    pieces = ", ".join(block.pieces)
    return {"pieces": pieces, "line": line_of(block, meant, ", ".join(remarks))}


def _whole_line(fault: Fault) -> Facts:
    """Return {"got": text}, where the text is the key and value of the line. The error message then shows this text."""
    return {"got": f"{fault.text.leaf}: {fault.text.text}"}


def _placed_twice(fault: Fault) -> Facts:
    """Return name -> value for the error message about a component with two lines.

    `got`: the line. `fix`: for a line with several names, a line for this component alone, which replaces a line of
    another config file, too; else, words that say what to do.
    """
    name = fault.facts["name"]
    fix = f"name {name} in one line only"
    if fault.text.leaf.count(",") and fault.text.leaf.count(name) == 1:
        line = f"{name}: {quote(fault.text.value)}"
        fix = f"{line}        (one line for each name, in place of this one and the other)"
    return _whole_line(fault) | {"fix": fix}


def _no_name(fault: Fault) -> Facts:
    """Return name -> value for the error message about an empty name in a key, such as `actor,,env`.

    `got`: the line. `line`: a corrected line without the empty name.
    """
    others = ",".join(filter(None, fault.facts["names"])) or "actor"
    return _whole_line(fault) | {"line": f"{others}: {quote(fault.text.value)}"}


def _unknown_name(fault: Fault) -> Facts:
    """Return name -> value for the error message about a component that does not exist.

    `got`: the line. `meant`: the suggestion of a similar name, if there is one. `known`: the names that are allowed.
    `line`: if the key has only this name, a corrected line with the similar name; else, words that say what to replace.
    """
    name = fault.facts["name"]
    components = fault.facts["components"]
    meant = meant_component(name, fault.facts["free"])
    known = ", ".join(components)
    more = [role for role in fault.facts["optional"] if role not in components]
    if more:
        known += f"; it may have {', '.join(more)}"
    fix = f"one of these names in place of {name}"
    is_alone = len(fault.facts["names"]) == 1
    if meant and is_alone:
        fix = f"{meant}: {quote(fault.text.value)}"
    several = several_components(name, fault.facts["free"])
    if len(several) > 1 and is_alone:
        fix = one_of(f"{each}: {quote(fault.text.value)}" for each in several)
    # The work of a component of other jobs, which needs no line here
    alias = COMPONENTS.get(name.lower()) or name
    worker = None if alias in {*components, *more} else WITHOUT_LINE.get(alias)
    if not meant and worker and is_alone:
        known += f"; {worker}"
        fix = f"remove {name}"
        if str(fault.text.source).startswith(COMMAND_LINE):
            fix = f"leave out {fault.text.key}={fault.text.text}"
    facts = {"meant": suggestion(meant), "known": known, "line": fix}
    return _whole_line(fault) | facts


def _unknown_key(fault: Fault) -> Facts:
    """Return name -> value for the error message about a key that does not exist.

    `meant`: the suggestion of a key that the line does not have yet: rlplace's name for a key of another library, or a
    similar key. `known`: the keys that are allowed. `line`: a corrected line with the suggested key.
    """
    key = fault.text.leaf
    known = fault.facts["known"]
    left = [name for name in known if name not in fault.facts["given"]]
    meant: str | None = PLACEMENT_KEYS.get(key)
    if meant not in left:
        meant = did_you_mean(key, left)
    value = one_line(fault.text.value)
    why = f"known keys here: {', '.join(known)}"
    if re.split("_", key)[0] in SPLITS:
        why = f"{NO_SUCH}; {why}"
    fix = f"one of the known keys in place of {key}"
    if meant:
        fix = f"{meant}: {value}"
    elif key in _RANKS:
        fix = _spread_over(fault.text.value, fault.facts["given"]) or fix
    return {
        "got": f"{key}: {value}",
        "span": (0, max(1, len(key))),
        "meant": suggestion(meant),
        "known": why,
        "line": fix,
    }


def _spread_over(ranks: object, given: Mapping[str, Text]) -> str | None:
    """Return the line that spreads a number of ranks over the accelerators of a component.

    `given`: key -> value of the component's block. Return None if the ranks are not spread evenly, or if the block has
    no accelerators by their numbers.
    """
    place = next((given[key].value for key in PLACES if key in given), None)
    numbers = _numbers_in(place)
    if not numbers or not isinstance(ranks, int) or ranks < 1:
        return None
    count = sum(map(len, numbers))
    if ranks >= count and ranks % count == 0:
        return f"ranks_per_accelerator: {ranks // count}"
    if count % ranks == 0:
        return f"accelerators_per_rank: {count // ranks}"
    return None


# ── The options of a line ───────────────────────────────────────────────────────────


def _two_places(fault: Fault) -> Facts:
    assert isinstance(fault.text.value, Mapping)
    places = fault.facts["places"]
    # For each place a line without the others.
    lines = []
    for kept in places:
        others = [key for key in places if key != kept]
        left = {
            key: value for key, value in fault.text.value.items() if key not in others
        }
        lines.append(line_of(fault.text, left))
    facts = {"given": " and ".join(places), "lines": one_of(lines)}
    return _known_places(fault) | facts


def _of_node(fault: Fault) -> Facts:
    """Return {"line": line} for the error message about a line that names a machine beside accelerators of it.

    The line has the numbers that these accelerators have in the whole cluster.
    """
    text = fault.text
    pool: Pool = fault.facts["pool"]
    rank = text.entries[fault.facts["node"]].value
    others: dict[str, object] = {}
    numbers: object = "all"
    for key, entry in text.entries.items():
        ours = PLACEMENT_KEYS.get(key, key)
        if ours in PLACES:
            numbers = entry.value
            # A count of accelerators does not say which
            if ours == "accelerators" and isinstance(numbers, int):
                numbers = None
        elif key != fault.facts["node"]:
            others[key] = entry.value
    ranges = [i.numbers for i in pool.intervals if i.node == rank]
    counted = _numbers_in(numbers)
    if isinstance(rank, bool) or len(ranges) != 1 or counted is None:
        return {"line": open_line(text)}
    # The same numbers, counted from the first accelerator of the machine
    machine = ranges[0]
    pieces = counted or [range(len(machine))]
    if any(piece.stop > len(machine) for piece in pieces):
        return {"line": open_line(text)}
    shown = ",".join(show_range(machine[piece.start : piece.stop]) for piece in pieces)
    if others:
        return {"line": line_of(text, {"placement": shown, **others})}
    return {"line": line_of(text, shown)}


def _numbers_in(value: object) -> list[range] | None:
    """Return the ranges in a value such as `0-3`, `cuda:0-3,6` or [0, 1]; None if it has another form.

    The list is empty if the value means all numbers.
    """
    items = value if isinstance(value, list) else [value]
    found: list[range] = []
    for item in items:
        numbers = meant_numbers(str(item))
        if numbers == "all":
            return []
        for piece in (numbers or "").split(","):
            ends = re.fullmatch(r" *([0-9]{1,7})(?: *- *([0-9]{1,7}))? *", piece)
            if ends is None:
                return None
            first = int(ends[1])
            last = int(ends[2] or first)
            if last < first:
                return None
            # Neighbours are one range
            if found and found[-1].stop == first:
                first = found.pop().start
            found.append(range(first, last + 1))
    return found


def _known_places(fault: Fault) -> Facts:
    return {"known": ", ".join(PLACES)}


def _no_count(fault: Fault) -> Facts:
    """Return name -> value for the error message about a value that is not a count.

    `line`: a corrected line. If the value is a number in quotes, the line has this number; else, it has a placeholder.
    """
    value = fault.text.value
    line = open_line(fault.text, "a number")
    # A range from the first number on, where every preset begins with the actor: 0-7
    first = re.fullmatch(r"\s*0\s*-\s*([0-9]{1,6})\s*", str(value))
    if first is not None and fault.text.leaf in ("actor", "accelerators"):
        line = line_of(fault.text, int(first[1]) + 1)
    if isinstance(value, str) and re.fullmatch(r"\s*0*[1-9][0-9]{0,5}\s*", value):
        line = line_of(fault.text, int(value))
    return {"line": line}


def _no_fraction(fault: Fault) -> Facts:
    """Return name -> value for the error message about a fraction of the accelerators that is not a whole number.

    `line`: a corrected line with the next smaller whole number, at least 1.
    """
    count = max(1, fault.facts["count"])
    line = line_of(fault.text, {"accelerators": count})
    if fault.text.leaf == "accelerators":
        line = line_of(fault.text, count)
    return {"line": line}


def _alone(fault: Fault) -> Facts:
    """Return name -> value for the error message about `process: shared` if no other component shares the process.

    `remark`: a line for a component that could share the process; "" if there is no such component.
    """
    able = fault.facts["able"]
    remark = ""
    if able:
        line = f"{able[0]}: {{same_as: {fault.facts['name']}, process: shared}}"
        remark = f"        (or: {line})"
    return {"remark": remark}


# ── Lines that depend on each other ─────────────────────────────────────────────────


def _circle(fault: Fault) -> Facts:
    circle = " -> ".join(fault.facts["circle"])
    return {"circle": circle, "line": line_of(fault.facts["line"].whole, "all")}


def _unknown_target(fault: Fault) -> Facts:
    """Return name -> value for the error message about `same_as` with a component that is not placed.

    `meant`: the suggestion of a similar component, if there is one. `line`: a corrected line with that component.
    """
    text = fault.text
    names = fault.facts["line"].names
    others = [name for name in fault.facts["placed"] if name not in names]
    meant = meant_component(fault.facts["name"], others)
    if meant:
        line = line_of(text, meant)
    elif others:
        line = open_line(text, "one of these")
    else:
        line = open_line(text, "a component")
    return {"meant": suggestion(meant), "line": line}


def _nothing_left(fault: Fault) -> Facts:
    return {"line": open_line(fault.facts["line"].whole)}


def _no_units(fault: Fault) -> Facts:
    """Return name -> value for the error message about a count of accelerators that is not a multiple of a unit.

    A unit is the accelerators that must be on one node. `multiple`: the next larger multiple.
    """
    unit = fault.facts["unit"]
    return {"multiple": -(-fault.facts["count"] // unit) * unit}


def _not_free(fault: Fault) -> Facts:
    """Return name -> value for the error message about a count that is larger than the number of free accelerators.

    `left`: which accelerators are free, in words. `line`: corrected lines that use the place of another component.
    """
    free: Ranges = fault.facts["free"]
    unit = fault.facts["unit"]
    left = "none is free"
    if free:
        left = f"free are {free} ({len(free)})"
    if unit > 1:
        left += f", in units of {unit} on one node"
    fix = open_line(fault.text, "a number")
    whole = fault.facts["line"].whole
    others = fault.facts["others"]
    if others:
        fix = one_of(line_of(whole, {"same_as": other}) for other in others)
    return {"left": left, "line": fix}


# ── Presets ─────────────────────────────────────────────────────────────────────────


def _unknown_preset(fault: Fault) -> Facts:
    """Return name -> value for the error message about a preset that does not exist.

    `meant`: the suggestion of a similar preset, if there is one. `known`: all presets. `line`: a corrected line.
    """
    word = fault.facts["word"]
    text = fault.text.text
    meant = meant_word(word, (*PRESETS, *TOGETHER))
    line = open_line(fault.text, "one of these")
    at = text.find(word)
    if meant and at >= 0:
        line = f"preset: {text[:at]}{meant}{text[at + len(word) :]}"
    known = ", ".join(PRESETS)
    return {"meant": suggestion(meant), "known": known, "line": line}


def _no_such_number(fault: Fault) -> Facts:
    total = max(1, fault.facts["total"])
    return _size(fault, "accelerators") | {"line": f"accelerators: {total}"}


def _sizes_differ(fault: Fault) -> Facts:
    """Return name -> value for the error message about a preset whose components share accelerators but differ in size.

    `given`: the size of each of these components. `together`: their names. `line`: a line that gives the component with
    the smallest size the largest size. `at`, `got`: the entry to which the error points, and this entry as text.
    """
    sized: Mapping[str, int] = fault.facts["sized"]
    smallest = min(sized, key=lambda name: sized[name])
    return _size(fault, smallest) | {
        "given": " and ".join(f"{name}: {size}" for name, size in sized.items()),
        "together": " and ".join(fault.facts["members"]),
        "line": f"{smallest}: {max(sized.values())}",
    }


def _too_few(fault: Fault) -> Facts:
    """Return name -> value for the error message about a preset with too few accelerators for its sets of components.

    `line`: corrected lines: equal sizes for all components that have a size, or, if none has a size, a total of one
    accelerator per set. `at`, `got`: the entry to which the error points, and this entry as text.
    """
    sets = fault.facts["sets"]
    sizes = fault.facts["sizes"]
    sized = [name for members in sets for name in members if name in sizes]
    more = ""
    if fault.facts["unsized"]:
        more = f", and {fault.facts['unsized']} more sets get some"
    line = f"accelerators: {len(sets)}"
    if sized:
        even = max(1, fault.facts["room"] // len(sets))
        line = "\n".join(f"{name}: {even}" for name in sized)
    largest = max(sized, key=lambda name: sizes[name], default=sets[0][0])
    facts = {"more": more, "num_sets": len(sets), "line": line}
    return _size(fault, largest) | facts


def _size(fault: Fault, key: str) -> Facts:
    """Return the values `at` and `got`, with which an error points to one entry of a block instead of the whole block.

    `key`: the key of that entry, which gives a number of accelerators: the name of a component, or "accelerators".
    """
    text = entry_of(fault.text, key, 0)
    return {"at": text, "got": f"{key}: {text.text}"}


WRITERS: Mapping[tuple[str, str], Writer] = {
    ("empty-placement", "no_lines"): _empty_block,
    ("empty-placement", "nothing"): _empty_block,
    ("comma-in-braces", "in_key"): _cut_key,
    ("comma-in-braces", "in_value"): _cut_value,
    ("comma-in-braces", "in_lines"): _cut_lines,
    ("component-placed-twice", ""): _placed_twice,
    ("unknown-component", "no_name"): _no_name,
    ("unknown-component", "in_key"): _unknown_name,
    ("unknown-key", "in_placement"): _unknown_key,
    ("bad-placement", "nowhere"): _known_places,
    ("bad-placement", "two_places"): _two_places,
    ("bad-placement", "of_node"): _of_node,
    ("bad-count", "no_number"): _no_count,
    ("uneven-fraction", "no_whole_number"): _no_fraction,
    ("process-alone", ""): _alone,
    ("circular-placement", ""): _circle,
    ("unknown-component", "same_as"): _unknown_target,
    ("nothing-left", ""): _nothing_left,
    ("uneven-ranks", "count"): _no_units,
    ("not-enough-free", ""): _not_free,
    ("unknown-preset", ""): _unknown_preset,
    ("preset-sizes", "no_such_number"): _no_such_number,
    ("preset-sizes", "differ"): _sizes_differ,
    ("preset-sizes", "too_few"): _too_few,
    ("empty-placement", "no_numbers"): _whole_line,
}

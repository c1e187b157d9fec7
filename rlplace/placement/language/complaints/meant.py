"""What a user probably meant: numbers in another notation, a component or a group by another name."""

from __future__ import annotations

import re
from collections.abc import Collection
from fractions import Fraction

from rlplace.config.other_names import COMPONENTS, PARALLEL, SEVERAL_COMPONENTS
from rlplace.errors import did_you_mean
from rlplace.placement.language.complaints.paste import LONGEST, line_of, open_line
from rlplace.placement.language.grammar import DASHES, SEGMENTS
from rlplace.placement.language.text import Text
from rlplace.placement.machines.pools import Pool
from rlplace.placement.machines.topology import show_range

_OTHER_RANGES = re.compile(r"\s*(?:\.\.+|~|(?<![a-z])to(?![a-z])|…)\s*")
_DEVICE_NAMES = re.compile(
    r"\b(?:cuda|gpus?|npus?|devices?|accelerators?)[\s:_]*(?=[0-9[])", re.IGNORECASE
)
_MACHINES = re.compile(
    r"(?:nodes?|machines?|hosts?)[\s:_-]*([0-9]{1,6})(?:\s*-\s*([0-9]{1,6}))?(?::\s*([0-9]{1,6})(?:-([0-9]{1,6}))?)?",
    re.IGNORECASE,
)
_BRACKETS = re.compile(r"\[(.*)\]|\((.*)\)|\{(.*)\}")
_PYTHON_RANGE = re.compile(
    r"(?:list\()?range\(\s*(?:([0-9]{1,9})\s*,\s*)?([0-9]{1,9})\s*\)\)?"
)


def meant_component(name: str, components: Collection[str]) -> str | None:
    """Return the component that a wrong name probably stands for; None if no component has a similar name."""
    if name.lower() in SEVERAL_COMPONENTS:
        several = several_components(name, components)
        return several[0] if len(several) == 1 else None
    alias = COMPONENTS.get(name.lower(), name)
    if alias in components:
        return alias
    return did_you_mean(alias, components)


def several_components(name: str, components: Collection[str]) -> list[str]:
    """Return the components that a name may mean equally well: a policy is trained by one, and used by another."""
    having = SEVERAL_COMPONENTS.get(name.lower(), ())
    return [role for role in having if role in components]


def meant_numbers(piece: str) -> str | None:
    """Return the numbers in `piece` in the notation of placement texts; None if the notation of `piece` is not known.

    Known notations are `cuda:0-7`, `0..7`, `0-3;4-7`, `50%`, `range(0,8)` and similar ones.
    """
    guess = DASHES.sub("-", piece.lower()).strip()
    if guess in ("*", "everything", "all"):
        return "all"
    python_range = _PYTHON_RANGE.fullmatch(guess)
    if python_range is not None:
        start = int(python_range[1] or 0)
        stop = int(python_range[2])
        if start < stop:
            return show_range(range(start, stop))
        return None

    half = re.fullmatch(
        r"(?:the )?(first|lower|second|last|upper|other)[ -]half", guess
    )
    if half is not None and half[1] != "other":
        return f"part {1 if half[1] in ('first', 'lower') else 2}/2"
    parts = {"half": "1/2", "a half": "1/2", "third": "1/3", "quarter": "1/4"}
    if guess in parts:
        return f"part {parts[guess]}"
    first = re.fullmatch(r"all ([1-9][0-9]{0,6})", guess)
    if first is not None:
        return show_range(range(int(first[1])))

    # Without brackets and names of devices, with plain hyphens and commas.
    inside = _BRACKETS.fullmatch(guess)
    guess = inside[inside.lastindex or 0] if inside else guess
    guess = re.sub(r"\s+and\s+|\s*[&+]\s*", ",", guess)
    guess = _OTHER_RANGES.sub("-", _DEVICE_NAMES.sub("", guess))
    # Behind the name of a device, as Slurm writes them: gpu[0-3]
    inside = _BRACKETS.fullmatch(guess)
    guess = inside[inside.lastindex or 0] if inside else guess
    guess = re.sub(r"\s*[;|]\s*|(?<=[0-9])\s+(?=[0-9])", ",", guess)
    percent = re.fullmatch(r"\s*([0-9]{1,3})\s*%\s*", guess)
    if percent is not None:
        share = Fraction(int(percent[1]), 100)
        if 0 < share < 1:
            return f"{share.numerator}/{share.denominator}"
        if share == 1:
            return "all"
        return None
    # A count, such as `8 GPUs` or `first 4`
    counted = re.fullmatch(
        r"(?:the )?first ([1-9][0-9]{0,6})(?: gpus?)?|([1-9][0-9]{0,6}) ?(?:x ?gpus?|gpus|npus|cards)",
        guess,
    )
    if counted is not None:
        return show_range(range(int(counted[1] or counted[2])))
    if SEGMENTS.fullmatch(guess):
        return guess
    return None


def of_machines(piece: str, pool: Pool) -> str | None:
    """Return the numbers of the accelerators of machines, such as `node0`, `nodes 0-1` or `node1:0-3`; else None.

    `pool`: what numbers count. None is also returned if the pool has no such accelerators.
    """
    machines = _MACHINES.fullmatch(piece.strip())
    if machines is None or not pool.holds_accelerators:
        return None
    first = int(machines[1])
    last = int(machines[2] or first)
    having = [i.numbers for i in pool.intervals if first <= i.node <= last]
    missing = {*range(first, last + 1)} - pool.nodes if last - first < 1000 else {first}
    if missing or not having:
        return None
    numbers = range(having[0].start, having[-1].stop)
    if len(numbers) != sum(map(len, having)):
        return None
    if machines[3] is not None:
        begin = int(machines[3])
        end = int(machines[4] or begin)
        numbers = numbers[begin : end + 1]
        if len(numbers) != end + 1 - begin:
            return None
    return show_range(numbers)


def other_place(text: Text) -> str | None:
    """Return a corrected line for a value in words, such as `CPU`, `same as actor` or `all tp=2`; None if unknown."""
    words = text.text.strip().lower()
    if re.fullmatch("cpus?|none|host|no gpu|cpu[ _-]only", words):
        return line_of(text, "cpu")
    if re.fullmatch("all (?:the )?(?:gpus|accelerators|devices|cards)", words):
        return line_of(text, "all")
    same = re.fullmatch(
        r"(?:same(?:_as| as)?:? ?|with |like |(?:co-?l+ocated?|together|shared?) with )?(?:the )?([a-z_]+)",
        words,
    )
    if same is not None and same[1] in {*COMPONENTS.values(), "env"} - {"", text.leaf}:
        return line_of(text, {"same_as": same[1]})
    # Several ranks on each: 0-3 x 2
    each = re.fullmatch(r"([0-9]+(?:-[0-9]+)?) ?[x*×] ?([1-9][0-9]?)", words)
    if each is not None:
        spread = {"accelerators": each[1], "ranks_per_accelerator": int(each[2])}
        return line_of(text, spread)
    split = re.fullmatch(r"(.+?)[ ,;]+([a-z_]+) ?[=:]? ?([0-9]+)", words)
    if split is not None and split[2] in PARALLEL:
        numbers = meant_numbers(split[1]) or split[1]
        sized = {"accelerators": numbers, PARALLEL[split[2]]: int(split[3])}
        return line_of(text, sized)
    return None


def meant_line(text: Text) -> str | None:
    """Return a corrected line in which every piece of the value has the notation of placement texts.

    Return None if the value is not a single text, or if the notation of a piece is not known.
    """
    if not isinstance(text.value, str) or len(text.text) > LONGEST:
        return None
    meant = meant_numbers(text.text)
    if meant is None:
        pieces = []
        for piece in re.split("[,;|]", text.text):
            piece = piece.strip()
            if not piece:
                continue
            if not SEGMENTS.fullmatch(piece):
                translated = meant_numbers(piece)
                if translated is None:
                    return None
                piece = translated
            pieces.append(piece)
        if not pieces:
            return None
        meant = ",".join(pieces)
    return line_of(text, re.sub(r"([0-9]+)\s*-\s*([0-9]+)", _forwards, meant))


def _forwards(match: re.Match[str]) -> str:
    """Return the range in `match` as text, with the smaller number first."""
    first, last = sorted((int(match[1]), int(match[2])))
    return f"{first}-{last}"


def without_gaps(text: Text) -> str:
    """Return a corrected line without the empty pieces between commas.

    If the value has no empty pieces, or its other pieces cannot be read, return the line with a placeholder as its
    value.
    """
    pieces = [piece.strip() for piece in text.text.split(",")]
    rest = ",".join(filter(None, pieces))
    if "" in pieces and SEGMENTS.fullmatch(rest):
        return line_of(text, rest)
    return open_line(text)

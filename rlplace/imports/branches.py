"""Choose one branch of each `if` and `case` of a shell script without running the script.

A condition is evaluated if it only compares texts or numbers that the script itself sets, such as
`[ "$DEVICE" = npu ]`. A variable that is not set is empty. Any other condition, such as whether a file exists, is
unknown, and its branch is not taken. The line numbers stay the same: lines of other branches become empty lines.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from typing import NamedTuple

from rlplace.units import clipped

# (script before a text, text) -> the text with its variables replaced; None if a value is unknown
Expand = Callable[[str, str], str | None]

_LONGEST = 60  # characters of a condition in the report
_ONE_LINE = re.compile(
    r"(?P<blank>\s*)if\s+(?P<test>.+?)\s*;\s*then\s+(?P<yes>.+?)"
    r"(?:;\s*else\s+(?P<no>.+?))?;?\s*fi\s*(?:#.*)?"
)
_IF = re.compile(
    r"\s*(?P<word>if|elif)\s+(?P<test>.+?)\s*(?:;\s*then\b(?P<rest>.*)|;?\s*(?:#.*)?)"
)
_THEN = re.compile(r"\s*then\b")
_WITH_REST = re.compile(r"\s*(?:then|else)\b(?P<rest>.*)")
_LONGEST_LINE = 4_000  # most characters of a line that is read as a condition
_NOT_FOLLOWED = "all branches are read: the conditions could not be followed"
_CASE = re.compile(r"\s*case\s+(?P<subject>.+?)\s+in\s*(?:#.*)?")
_PATTERN = re.compile(r"\s*\(?(?P<patterns>[^()]+?)\)(?P<body>.*)", re.DOTALL)
_BRACKETS = re.compile(r"\[\[?\s+(?P<inner>.*?)\s+\]\]?")
_WORD = re.compile(r'(?:"(?:\\.|[^"\\])*"|' + r"'[^']*'|\$\{[^}]*\}|[^\s'" + r'"])+')
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": int.__eq__,
    "-ne": int.__ne__,
    "-gt": int.__gt__,
    "-ge": int.__ge__,
    "-lt": int.__lt__,
    "-le": int.__le__,
}


class Branch(NamedTuple):
    """The branch of a condition that was chosen.

    `line`: line of the condition. `condition`: its text. `taken`: what was chosen, in words.
    """

    line: int
    condition: str
    taken: str


class _Frame:
    """An `if` or `case` statement whose end was not read yet.

    `subject`: text that a `case` compares; None for an `if`. `active`: whether the present branch is the chosen one.
    `done`: whether a branch was chosen. `parent`: whether the statement itself is in a chosen branch. `line`, `text`:
    line and condition of the statement.
    """

    def __init__(self, parent: bool, line: int, text: str) -> None:
        self.subject: str | None = None
        self.is_case = False
        self.active = False
        self.done = False
        self.parent = parent
        self.line = line
        self.text = text


def choose_branches(text: str, expand: Expand) -> tuple[str, list[Branch]]:
    """Return (shell script with only the chosen branches, the choices).

    `expand`: replaces the variables of a text.
    """
    kept: list[str] = []
    chosen: list[Branch] = []
    frames: list[_Frame] = []
    continued = False

    def value(condition: str) -> str | None:
        return expand("\n".join(kept), condition)

    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        counts = all(frame.active and frame.parent for frame in frames)
        whole = not continued and len(line) < _LONGEST_LINE
        # A here-document may have lines of another language that begin with `if`
        found = _IF.fullmatch(line) if whole else None
        if found is not None and found["rest"] is None:
            behind = next((each for each in lines[number:] if each.strip()), "")
            whole = bool(_THEN.match(behind))
        continued = line.rstrip().endswith("\\")
        if whole and (match := _ONE_LINE.fullmatch(line)):
            true = counts and _holds(match["test"], value)
            body = match["yes"] if true else match["no"]
            kept.append(f"{match['blank']}{body}" if counts and body else "")
            if counts:
                taken = "then" if true else "else" if body else "not taken"
                chosen.append(Branch(number, _shown(match["test"]), taken))
            continue
        handled = whole and _keyword(line, number, frames, counts, value, chosen)
        # Commands may follow a keyword or a pattern of `case` on the same line
        rest = _rest(line) if handled and frames and frames[-1].active else ""
        if handled and frames and frames[-1].is_case and frames[-1].active:
            inner = _PATTERN.fullmatch(line)
            if inner and not _CASE.fullmatch(line):
                rest = inner["body"]
        if frames and frames[-1].is_case and line.split("#")[0].rstrip().endswith(";;"):
            rest = re.sub(r";;\s*$", "", rest)
            kept.append(_before_end(line, rest, handled, counts))
            frames[-1].active = False
            continue
        kept.append(rest if handled else line if counts else "")
    if frames:
        return text, [Branch(frames[0].line, frames[0].text, _NOT_FOLLOWED)]
    return "\n".join(kept), chosen


def _rest(line: str) -> str:
    """Return the text after `then` or `else` on a line; "" if there is none."""
    match = _IF.fullmatch(line) or _WITH_REST.fullmatch(line)
    rest = match["rest"] if match is not None else None
    return "" if rest is None or rest.lstrip().startswith("#") else rest


def _before_end(line: str, rest: str, handled: bool, counts: bool) -> str:
    """Return the part of a line that still belongs to a branch of `case`: the text before `;;`."""
    if handled:
        return rest
    if counts:
        return re.sub(r";;\s*(?:#.*)?$", "", line)
    return ""


def _keyword(
    line: str,
    number: int,
    frames: list[_Frame],
    counts: bool,
    value: Callable[[str], str | None],
    chosen: list[Branch],
) -> bool:
    """Return whether a line begins, continues or ends an `if` or `case`, and update the frames.

    `number`: number of the line. `frames`: statements that are being read, the innermost last. `counts`: whether the
    line counts. `value`: replaces the variables of a text. `chosen`: the choices so far.
    """
    word = line.strip().split("#")[0].strip()
    top = frames[-1] if frames else None
    if (match := _IF.fullmatch(line)) and match["word"] == "if":
        frame = _Frame(counts, number, _shown(match["test"]))
        frames.append(frame)
        _enter(frame, counts and _holds(match["test"], value), "then", chosen)
        return True
    if match := _CASE.fullmatch(line):
        frame = _Frame(counts, number, _shown(f"case {match['subject']}"))
        frame.is_case = True
        frame.subject = value(match["subject"]) if counts else None
        frames.append(frame)
        return True
    if top is None:
        return False
    first = word.partition(" ")[0]
    if first == "then" and not top.is_case:
        return True
    if not top.is_case and (found := _IF.fullmatch(line)) and found["word"] == "elif":
        holds = top.parent and not top.done and _holds(found["test"], value)
        _enter(top, holds, f"elif {_shown(found['test'])}", chosen)
        return True
    if first == "else" and not top.is_case:
        _enter(top, top.parent and not top.done, "else", chosen)
        return True
    if re.match(r"(fi|esac)\b", word) and (word[0] == "e") == top.is_case:
        if top.parent and not top.done:
            chosen.append(Branch(top.line, top.text, "not taken"))
        frames.pop()
        return True
    if top.is_case and not top.active and (found := _PATTERN.fullmatch(line)):
        patterns = [p.strip().strip("\"'") for p in found["patterns"].split("|")]
        matches = top.subject is not None and any(
            fnmatch.fnmatchcase(top.subject, pattern) for pattern in patterns
        )
        unknown = top.subject is None and "*" in patterns
        taken = top.parent and not top.done and (matches or unknown)
        _enter(top, taken, f"{found['patterns'].strip()})", chosen)
        return True
    return False


def _enter(frame: _Frame, taken: bool, name: str, chosen: list[Branch]) -> None:
    """Begin the next branch of a statement. `taken`: whether it is chosen. `name`: its name in the report."""
    frame.active = taken
    if taken:
        frame.done = True
        chosen.append(Branch(frame.line, frame.text, name))


def _shown(condition: str) -> str:
    return clipped(" ".join(condition.split()), _LONGEST)


def _holds(condition: str, value: Callable[[str], str | None]) -> bool:
    """Return whether a condition is known to hold. `value`: replaces the variables of a text."""
    parts = re.split(r"\s+(\|\||&&)\s+(?![^\[]*\]\])", condition)
    result = _test(parts[0], value)
    for sign, part in zip(parts[1::2], parts[2::2], strict=True):
        other = _test(part, value)
        result = (result or other) if sign == "||" else (result and other)
    return result


def _test(text: str, value: Callable[[str], str | None]) -> bool:
    """Return whether one test in brackets is known to hold. A test without a known value does not hold."""
    denied = text.startswith("! ")
    match = _BRACKETS.fullmatch(text.removeprefix("! ").strip())
    if match is None:
        return False
    inner = match["inner"]
    for sign in ("||", "&&"):
        if f" {sign} " in inner:
            results = [_test(f"[ {i} ]", value) for i in inner.split(f" {sign} ")]
            return (any(results) if sign == "||" else all(results)) is not denied
    words = [value(word) for word in _words(inner)]
    if any(word is None for word in words):
        return False
    found = _compared([word or "" for word in words])
    return found is not None and found is not denied


def _words(text: str) -> list[str]:
    """Return the words of a test, each with its quotes."""
    return _WORD.findall(text)


def _compared(words: list[str]) -> bool | None:
    """Return the result of a test, from its words without quotes; None if it cannot be known."""
    match words:
        case ["-z", text]:
            return not text
        case ["-n", text] | [text]:
            return bool(text)
        case [a, "=" | "==", b]:
            return fnmatch.fnmatchcase(a, b)
        case [a, "!=", b]:
            return not fnmatch.fnmatchcase(a, b)
        case [a, sign, b] if sign in _COMPARISONS:
            if re.fullmatch(r"-?\d{1,18}", a) and re.fullmatch(r"-?\d{1,18}", b):
                return _COMPARISONS[sign](int(a), int(b))
    return None

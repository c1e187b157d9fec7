"""Rewards of mathematical answers: read by rules of our own, or by the library math-verify (extra `math`)."""

from __future__ import annotations

import re
from decimal import Decimal

from rlplace.envs.text.contract import Transcript
from rlplace.envs.text.rewards import fact

_NUMBER = r"[-+]?(?:\d(?:[\d,]|\{,\})*)?\.?\d+(?:[eE][-+]?\d+)?(?:\s*/\s*\d+)?"
_NAMED = r"[A-Za-z]\^\{?\d+\}?"  # as in cm^2: says nothing of the answer
# is no number as it stands
_OTHER = r"\\sqrt\s*(?:\[[^\]]*\])?\s*(?:\{[^{}]*\}|\d)|[A-Za-z]_\{?\w+\}?|\d\s*\^\{?-?\d+\}?"
_LAST = re.compile(f"{_NAMED}|(?P<other>{_OTHER})|(?P<number>{_NUMBER})")
_SPACING = re.compile(r"\\(?:left|right|displaystyle|quad|qquad|[!,;:> ])|~|\$|\\\$")
_MIXED = re.compile(  # 3\frac{1}{2} and 3 1/2: three and a half
    r"(?<![\d.,])(\d{1,9})(?:\s*\\frac\s*\{(\d{1,9})\}\s*\{(\d{1,9})\}|\s+(\d{1,9})\s*/\s*(\d{1,9}))(?!\d)"
)
_UNIT = re.compile(r"\\(?:text|mathrm|textbf|mbox|textit)\s*\{([^{}]*)\}")


def math_answer(transcript: Transcript) -> float:
    r"""1 if the number in the last \boxed{}, else the last one, is the fact `answer`; a fact of words, as text.

    Of a fact that is a whole solution, what is boxed counts, else what is behind its last `####`, as in GSM8K.
    """
    right = _right(transcript)
    return float(_same(_given(transcript.answer), last_boxed(right) or right))


def math_verify(transcript: Transcript) -> float:
    r"""1 if math-verify finds the last \boxed{}, else the last expression, equal to the fact `answer`.

    Roots, intervals, sets, matrices and equations too. What `math_answer` finds equal is so here.
    """
    from math_verify import parse, verify

    if math_answer(transcript):
        return 1.0
    right = _right(transcript)
    boxed = right if last_boxed(right) is not None else f"${right.strip().strip('$')}$"
    # Its own limits of time are signals; the process that runs this has one.
    gold, given = (
        parse(text, parsing_timeout=None, raise_on_error=False)
        for text in (boxed, transcript.answer)
    )
    return float(verify(gold, given, timeout_seconds=None, raise_on_error=False))


def _right(transcript: Transcript) -> str:
    right = fact(transcript, "answer")
    if last_boxed(right) is not None:
        return right
    return right.rpartition("####")[2]


def _given(answer: str) -> str:
    boxed = last_boxed(answer)
    if boxed is not None:
        return boxed
    found = [
        match for match in _LAST.finditer(answer) if match["number"] or match["other"]
    ]
    if found:
        return found[-1]["number"] or ""
    return ""


def _same(given: str, right: str) -> bool:
    one = _plain(given)
    other = _plain(right)
    numbers = number(one), number(other)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return bool(one) and one == other


def _plain(text: str) -> str:
    """Return an answer without what is written around it: spacing, units, a name before an equal sign."""
    text = _SPACING.sub(
        "", text.replace("{,}", ",").replace("\\%", "").replace("%", "")
    )
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree", "", text)
    bare = _UNIT.sub("", text).strip()
    text = bare or _UNIT.sub(r"\1", text)
    text = re.sub(r"^\s*[A-Za-z]\s*(?:=|\\in)", "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text)
    text = _MIXED.sub(_improper, text)
    return "".join(text.split()).rstrip(".")


def _improper(found: re.Match[str]) -> str:
    whole, *parts = (int(each) for each in found.groups() if each is not None)
    above, below = parts
    if above < below:
        return f"{whole * below + above}/{below}"
    return found[0]  # else a product


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete \boxed{...}, with braces within it; None without one."""
    begins = {match.end() - 1 for match in re.finditer(r"\\boxed\s*\{", text)}
    found = (-1, 0)
    opened = list[int]()
    # Once, however many are never closed
    for brace in re.finditer(r"[{}]", text) if begins else ():
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened and (begin := opened.pop()) in begins:
            found = max(found, (begin, brace.start()))
    begin, end = found
    if begin >= 0:
        return text[begin + 1 : end]
    return None


def number(text: str) -> Decimal | None:
    r"""Read 1,234.50, 3/4 or \frac{3}{4} as a number; None if `text` is none."""
    text = (
        re.sub(r"(?<!\d)\\d?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2", text)
        .strip()
        .strip("$")
    )
    if not re.fullmatch(r"[^,]*|[-+]?\d{1,3}(?:,\d{3})+[^,]*", text):
        return None  # a list
    above, slash, below = text.replace(",", "").partition("/")
    try:
        value = (
            Decimal(above.strip()) / Decimal(below.strip()) if slash else Decimal(above)
        )
    except ArithmeticError:  # no number, a division by zero, beyond all exponents
        return None
    if value.is_finite():
        return value
    return None

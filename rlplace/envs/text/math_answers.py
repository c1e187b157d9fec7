"""Rewards for mathematical answers, which are compared by this module or by the library math-verify (extra `math`)."""

from __future__ import annotations

import re
from decimal import Decimal

from rlplace.envs.text.contract import Transcript
from rlplace.envs.text.rewards import fact

_NUMBER = r"[-+]?(?:\d(?:[\d,]|\{,\})*)?\.?\d+(?:[eE][-+]?\d+)?(?:\s*/\s*\d+)?"
# Powers of a letter, such as the unit cm^2: skipped, they are not part of the answer
_NAMED = r"[A-Za-z]\^\{?\d+\}?"
# Roots, indexed letters and powers: the answer is not a plain number
_OTHER = r"\\sqrt\s*(?:\[[^\]]*\])?\s*(?:\{[^{}]*\}|\d)|[A-Za-z]_\{?\w+\}?|\d\s*\^\{?-?\d+\}?"
_LAST = re.compile(f"{_NAMED}|(?P<other>{_OTHER})|(?P<number>{_NUMBER})")
# Spacing and dollar signs of LaTeX
_SPACING = re.compile(r"\\(?:left|right|displaystyle|quad|qquad|[!,;:> ])|~|\$|\\\$")
# Mixed fractions: 3\frac{1}{2} and 3 1/2 are three and a half
_MIXED = re.compile(
    r"(?<![\d.,])(\d{1,9})(?:\s*\\frac\s*\{(\d{1,9})\}\s*\{(\d{1,9})\}|\s+(\d{1,9})\s*/\s*(\d{1,9}))(?!\d)"
)
_UNIT = re.compile(r"\\(?:text|mathrm|textbf|mbox|textit)\s*\{([^{}]*)\}")


def math_answer(transcript: Transcript) -> float:
    r"""Return 1 if the policy's last answer has the right result, else 0.

    The right result is `transcript.facts["answer"]`. If this is a whole solution, its result is the content of its last
    \boxed{}, else the text after its last `####`, as in GSM8K. The policy's result is the content of its last \boxed{},
    else its last number. Results are compared as numbers if both are numbers, else as text.
    """
    right = _right(transcript)
    return float(_same(_given(transcript.answer), last_boxed(right) or right))


def math_verify(transcript: Transcript) -> float:
    r"""Return 1 if the library math-verify finds the policy's last answer right, else 0.

    The right result is `transcript.facts["answer"]`. The policy's result is the content of its last \boxed{}, else its
    last expression. Roots, intervals, sets, matrices and equations can be compared, too. An answer that `math_answer`
    accepts is right without asking the library.
    """
    from math_verify import parse, verify

    if math_answer(transcript):
        return 1.0
    right = _right(transcript)
    boxed = right if last_boxed(right) is not None else f"${right.strip().strip('$')}$"
    # The library's own time limits use signals; the grading process has a limit already
    gold = parse(boxed, parsing_timeout=None, raise_on_error=False)
    given = parse(transcript.answer, parsing_timeout=None, raise_on_error=False)
    return float(verify(gold, given, timeout_seconds=None, raise_on_error=False))


def _right(transcript: Transcript) -> str:
    r"""Return the right result, from `transcript.facts["answer"]`.

    If that is a solution without \boxed{}, only the text after its last `####` is returned.
    """
    right = fact(transcript, "answer")
    if last_boxed(right) is not None:
        return right
    return right.rpartition("####")[2]


def _given(answer: str) -> str:
    r"""Return the result in the policy's answer: the content of its last \boxed{}, else its last number.

    Return "" if the answer has neither, or if its last expression is not a plain number.
    """
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
    """Return whether two results are equal: as numbers if both are numbers, else as text."""
    one = _plain(given)
    other = _plain(right)
    number_given = number(one)
    number_right = number(other)
    if number_given is not None and number_right is not None:
        return number_given == number_right
    return bool(one) and one == other


def _plain(text: str) -> str:
    """Return a result in a uniform notation, so that equal results become equal texts.

    Spacing, units and a name before an equal sign are removed, and fractions are written in the same way.
    """
    text = text.replace("{,}", ",").replace("\\%", "").replace("%", "")
    text = _SPACING.sub("", text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree", "", text)
    # Units; a text that is nothing but a unit is the answer
    bare = _UNIT.sub("", text).strip()
    text = bare or _UNIT.sub(r"\1", text)
    # x = ..., and x \in ...
    text = re.sub(r"^\s*[A-Za-z]\s*(?:=|\\in)", "", text)
    # Fractions and roots with and without braces
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text)
    text = _MIXED.sub(_improper, text)
    return "".join(text.split()).rstrip(".")


def _improper(found: re.Match[str]) -> str:
    """Return a mixed number that matched `_MIXED`, such as 3 1/2, as one fraction, 7/2; any other text unchanged."""
    whole, *parts = (int(each) for each in found.groups() if each is not None)
    above, below = parts
    if above < below:
        return f"{whole * below + above}/{below}"
    # With a larger numerator it is a product, not a mixed fraction
    return found[0]


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete \boxed{...}, including inner braces; None without a complete one."""
    # Opening braces of boxes
    begins = {match.end() - 1 for match in re.finditer(r"\\boxed\s*\{", text)}
    if not begins:
        return None
    # One pass over all braces, however many are never closed
    found = (-1, 0)
    opened = list[int]()
    for brace in re.finditer(r"[{}]", text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened and (begin := opened.pop()) in begins:
            found = max(found, (begin, brace.start()))
    begin, end = found
    if begin >= 0:
        return text[begin + 1 : end]
    return None


def number(text: str) -> Decimal | None:
    r"""Return the value of a text such as 1,234.50, 3/4 or \frac{3}{4}; None if the text is not a finite number."""
    # A fraction as a division
    fraction = r"(?<!\d)\\d?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"
    text = re.sub(fraction, r"\1/\2", text).strip().strip("$")
    # Commas must separate thousands; otherwise it is a list
    if not re.fullmatch(r"[^,]*|[-+]?\d{1,3}(?:,\d{3})+[^,]*", text):
        return None
    above, slash, below = text.replace(",", "").partition("/")
    try:
        value = Decimal(above.strip())
        if slash:
            value /= Decimal(below.strip())
    except ArithmeticError:  # not a number, a division by zero, or out of range
        return None
    if value.is_finite():
        return value
    return None

"""Asks the library math-verify whether two results are equal. Limits prevent that the library computes for hours.

There are two limits. `limited` ends every computation, but only after seconds of processor time. On a busy machine
these may last longer than a reward function may take. `explodes` refuses many computations that are too large at once,
but does not recognise all of them.
"""

from __future__ import annotations

import math
import os
import re

from rlplace.envs.text.math_reading import last_boxed, plain_numbers, without_marks
from rlplace.envs.text.time_limit import TooLong, limited

# Longest end of an answer that the library reads; its patterns take time by the square of the length
_READ = 2_000
# Most marks of math in it: the library tries each opening with each closing
_MARKS = 80
_MARK = re.compile(r"\$|\\boxed|\\[\[(]")
# Variables with which the library computes with Python's whole numbers. A signal can end computations with these. It
# cannot end those of gmpy2, which may last for hours, or end the process if memory is short
PYTHON_NUMBERS = {"SYMPY_GROUND_TYPES": "python", "MPMATH_NOGMPY": "1"}
# Longest processor time of one comparison
_SECONDS = 3.0
# Most digits of a number, the largest exponent and factorial, and the deepest nesting
_DIGITS = 300
_EXPONENT = 20_000
_FACTORIAL = 10_000
_NESTED = 15
_LONG_NUMBER = re.compile(rf"\d{{{_DIGITS},}}")
_POWER = re.compile(r"\^|\*\*")
_BLANKS_AT_POWERS = re.compile(r"\s{0,9}(\^|\*\*)\s{0,9}")
_NUMBERS = re.compile(r"\d+(?:\.\d+)?")
# Largest exponent of a sum with letters, which the library multiplies out
_MULTIPLIED_OUT = 60
# Most powers within each other's exponents, and the longest exponent
_TOWER = 3
_LONG_EXPONENT = 300
_NUMERIC_TOWER = re.compile(
    r"\d+(?:\.\d+)?(?:[\s)}]{0,3}(?:\^|\*\*)[\s({]{0,3}[-+]?\d+(?:\.\d+)?)+"
)
_FACTORIALS = re.compile(r"(\d+)\s{0,9}!|[)}!]\s{0,9}!")
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])")
_CHOSEN = re.compile(r"\\[dt]?binom\s{0,9}\{?\s{0,9}(\d+)")
_OPEN = "({["
_CLOSED = ")}]"
# Delimiters of LaTeX in a right result
_DELIMITED = re.compile(r"\$|\\\[|\\\(")
_PLAIN_NUMBER = re.compile(r"[-+]?[\d.,\s]*\d[\d.,\s]*%?")


def verified(answer: str, right: str) -> bool:
    r"""Return whether math-verify finds the result in an answer right. `right`: the right result.

    Return False if the answer has numbers that the library would compute for very long, or if it has not finished after
    some seconds of processor time.
    """
    # The variables have an effect only before the first import of the library
    os.environ.update(PYTHON_NUMBERS)
    from math_verify import parse, verify

    answer = _end(plain_numbers(without_marks(answer)))
    if not answer.strip() or not right.strip() or explodes(answer):
        return False
    try:
        with limited(_SECONDS):
            # The library's own time limits use signals, too
            gold = parse(_as_gold(right), parsing_timeout=None, raise_on_error=False)
            given = parse(answer, parsing_timeout=None, raise_on_error=False)
            return bool(verify(gold, given, timeout_seconds=None, raise_on_error=False))
    except (TooLong, RecursionError, MemoryError):
        return False


def _as_gold(right: str) -> str:
    r"""Return a right result as the library reads it: in dollar signs, if it is neither delimited nor a number."""
    if last_boxed(right) is not None or _DELIMITED.search(right):
        return right
    if _PLAIN_NUMBER.fullmatch(right.strip()):
        return right
    return f"${right.strip()}$"


def _end(answer: str) -> str:
    r"""Return the part of an answer that the library reads: all of a short one, else its last \boxed{} or its end."""
    if len(answer) <= _READ and len(_MARK.findall(answer)) <= _MARKS:
        return answer
    boxed = last_boxed(answer)
    if boxed is not None:
        return f"\\boxed{{{boxed[:_READ]}}}"
    # What follows the last announcement of an answer
    written = answer.lower()
    announced = max(written.rfind("final answer"), 0) or written.rfind("answer")
    if announced >= 0:
        return answer[announced:][: _READ // 4]
    # The end, from a word's beginning on
    return answer[-_READ // 4 :].partition(" ")[2]


def explodes(text: str) -> bool:
    """Return whether a text has numbers, powers or factorials that are too large to compute, or is deeply nested."""
    if _LONG_NUMBER.search(text):
        return True
    text = _BLANKS_AT_POWERS.sub(r"\1", text)
    deepest = 0
    depth = 0
    for character in text:
        if character in _OPEN:
            depth += 1
            deepest = max(deepest, depth)
        elif character in _CLOSED:
            depth -= 1
    if deepest > _NESTED:
        return True
    for found in _FACTORIALS.finditer(text):
        # Also the factorial of a factorial
        if found[1] is None or float(found[1]) > _FACTORIAL:
            return True
    if any(float(found[1]) > _FACTORIAL for found in _CHOSEN.finditer(text)):
        return True
    for power in _POWER.finditer(text):
        exponent = _exponent(text, power.end())
        largest = _EXPONENT
        if _sum_with_letters(text, power.start()):
            largest = _MULTIPLIED_OUT
        if exponent > largest:
            return True
    return False


def _sum_with_letters(text: str, at: int) -> bool:
    """Return whether brackets with letters end at `at`, the base of a power."""
    base = text[:at].rstrip()
    if not base.endswith(tuple(_CLOSED)):
        return False
    depth = 0
    for begin in range(len(base) - 1, -1, -1):
        if base[begin] in _CLOSED:
            depth += 1
        elif base[begin] in _OPEN:
            depth -= 1
        if depth == 0:
            return bool(_LETTER.search(base, begin))
    return False


def _exponent(text: str, at: int) -> float:
    """Return an upper estimate of the exponent that begins at `at`; inf if powers stand in it one in the other."""
    operand = _operand(text, at)
    if len(operand) > _LONG_EXPONENT or _is_tower(operand):
        return math.inf
    # 3^4 in an exponent counts as 81, all other numbers as they are
    numbers = [_tower_value(found[0]) for found in _NUMERIC_TOWER.finditer(operand)]
    numbers += [float(n) for n in _NUMBERS.findall(_NUMERIC_TOWER.sub(" ", operand))]
    return math.prod(max(each, 1.0) for each in numbers)


def _operand(text: str, at: int) -> str:
    """Return the exponent that begins at `at`: to the end of its brackets, else of its digits and powers."""
    end = at
    depth = 0
    while end < len(text):
        character = text[end]
        if character in _OPEN:
            depth += 1
        elif character in _CLOSED:
            depth -= 1
            if depth <= 0:
                end += 1
                break
        elif depth == 0 and not _continues(text, at, end):
            break
        end += 1
    return text[at:end]


def _continues(text: str, at: int, end: int) -> bool:
    """Return whether the character at `end` belongs to an exponent without brackets, which begins at `at`."""
    character = text[end]
    if character in "+-":
        # A sign, and no sum
        return end == at or text[end - 1] in "^*"
    if character == "*":
        return "**" in text[end - 1 : end + 2]
    return character.isalnum() or character in "^."


def _is_tower(operand: str, height: int = 1) -> bool:
    """Return whether an exponent has too many powers within each other's exponents. `height`: powers around it."""
    if height > _TOWER:
        return True
    return any(
        _is_tower(_operand(operand, power.end()), height + 1)
        for power in _POWER.finditer(operand)
    )


def _tower_value(written: str) -> float:
    """Return the value of numbers that are raised to each other, such as 2^{3^2}; inf if it is a large one."""
    numbers = [float(each) for each in _NUMBERS.findall(written)]
    value = numbers[-1]
    for base in reversed(numbers[:-1]):
        if value * math.log10(max(base, 1.0)) > math.log10(_EXPONENT):
            return math.inf
        value = base**value
    return value

"""Rewards for mathematical answers, compared by own rules or by the library math-verify (extra `math`)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from rlplace.envs.text.contract import Transcript
from rlplace.envs.text.math_library import verified
from rlplace.envs.text.math_reading import (
    has_list_of_boxes,
    last_boxed,
    last_number,
    marked,
    number,
    plain_characters,
    same,
)
from rlplace.envs.text.rewards import QUICK_UP_TO, final_answer, right_answers
from rlplace.envs.text.time_limit import TooLong, limited

# Longest processor time of one comparison; ordinary answers take less than a millisecond
_SECONDS = 3.0

__all__ = ["last_boxed", "math_answer", "math_verify", "number"]


def math_answer(transcript: Transcript) -> float:
    r"""Return 1 if the policy's last answer has the right result, else 0.

    The right result is `transcript.facts["answer"]`, or each of them if that is a list. If it is a whole solution, its
    result is the content of its last \boxed{}, else the text after its last `####`, as in GSM8K. The policy's result is
    the content of its last \boxed{}, else the number after its last `####`, else its last number; thoughts in
    <think></think> are left out. Results are compared as numbers if both are numbers, else as text. An answer that
    takes some seconds of processor time is not right.
    """
    rights = [_result(_right(right)) for right in right_answers(transcript)]
    # Setting the time limit takes longer than grading a short answer
    bounded: AbstractContextManager[None] = nullcontext()
    if len(transcript.answer) > QUICK_UP_TO:
        bounded = limited(_SECONDS)
    try:
        with bounded:
            given = _read(_given(transcript))
            return float(any(same(given, right) for right in rights))
    except TooLong:
        return 0.0


def math_verify(transcript: Transcript) -> float:
    r"""Return 1 if the library math-verify finds the policy's last answer right, else 0.

    The right result is `transcript.facts["answer"]`, or each of them if that is a list. The policy's result is the
    content of its last \boxed{}, else its last expression. Roots, intervals, sets, matrices and equations can be
    compared, too. A result in \boxed{} or after `####` that `math_answer` accepts is right without asking the library.
    An answer that would take the library very long, such as a tower of powers, is not right.
    """
    answer = _given(transcript)
    given = _stated(answer)
    rights = [_right(right) for right in right_answers(transcript)]
    # Of a list of boxes, one alone is not the result
    if given is not None and not has_list_of_boxes(answer):
        single = [right for right in rights if not has_list_of_boxes(right)]
        if any(same(given, _result(right)) for right in single):
            return 1.0
    # Of a solution with ####, only the number after it is the result
    if given is not None and last_boxed(answer) is None:
        stated = given.replace("$", " ").strip()
        answer = f"${stated}$"
    return float(any(verified(answer, plain_characters(right)) for right in rights))


def _read(answer: str) -> str:
    r"""Return the result of an answer: the text in \boxed{} or after ####, else the last number."""
    given = _stated(answer)
    if given is None:
        return last_number(answer)
    return given


def _given(transcript: Transcript) -> str:
    """Return the policy's last answer without its thoughts, with signs and digits of Unicode written in ASCII."""
    return plain_characters(final_answer(transcript))


def _stated(answer: str) -> str | None:
    r"""Return the result that an answer marks as such, by \boxed{} or by ####; None if it marks none."""
    boxed = last_boxed(answer)
    if boxed is not None:
        return boxed
    return marked(answer)


def _right(right: str) -> str:
    r"""Return a right result; of a solution without \boxed{} only the text after its last `####`."""
    if last_boxed(right) is not None:
        return right
    return right.rpartition("####")[2]


def _result(right: str) -> str:
    r"""Return a right result without \boxed{} around it."""
    boxed = last_boxed(right)
    if boxed is None:
        return right
    return boxed

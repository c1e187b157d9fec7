"""Shipped reward functions: score an answer by its text and the facts of its task."""

from __future__ import annotations

import logging
import re
from decimal import Decimal

from rlplace.envs.text.contract import Transcript

_LOG = logging.getLogger(__name__)

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*)?\.?\d+(?:[eE][-+]?\d+)?(?:\s*/\s*\d+)?")


def fact(transcript: Transcript, name: str) -> str:
    """Return a fact of the episode as text. Raises ValueError where the task gives no such fact."""
    if name not in transcript.facts:
        known = ", ".join(transcript.facts) or "none"
        raise ValueError(f"the task gives no fact {name!r}; its facts: {known}")
    return str(transcript.facts[name])


def exact_match(transcript: Transcript, *, ignore_case: bool = False) -> float:
    """1 if the last answer is the fact `answer`, blanks at both ends aside."""
    given, right = transcript.answer.strip(), fact(transcript, "answer").strip()
    if ignore_case:
        given, right = given.casefold(), right.casefold()
    return float(given == right)


def contains(transcript: Transcript) -> float:
    """1 if the fact `answer` stands anywhere in the last answer."""
    return float(fact(transcript, "answer").strip() in transcript.answer)


def math_answer(transcript: Transcript) -> float:
    r"""1 if the number in the last \boxed{}, else the last number of the answer, equals the fact `answer`.

    Where that fact is no number, the texts are compared, blanks aside.
    """
    given = last_boxed(transcript.answer)
    if given is None:
        numbers = _NUMBER.findall(transcript.answer)
        given = numbers[-1] if numbers else ""
    right = fact(transcript, "answer")
    right = last_boxed(right) or right
    one, other = number(given), number(right)
    if one is not None and other is not None:
        return float(one == other)
    return float("".join(given.split()) == "".join(right.split()))


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete \boxed{...}, with braces within it; None without one."""
    for start in reversed([match.end() for match in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for place in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[start:place]
    return None


def number(text: str) -> Decimal | None:
    r"""Read 1,234.50, 3/4 or \frac{3}{4} as a number; None if `text` is none."""
    text = re.sub(r"\\d?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2", text).strip().strip("$").replace(",", "")
    above, slash, below = text.partition("/")
    try:
        value = Decimal(above.strip()) / Decimal(below.strip()) if slash else Decimal(text)
    except ArithmeticError:  # no number, a division by zero, beyond all exponents
        return None
    return value if value.is_finite() else None


def matches(transcript: Transcript, *, pattern: str = r"<think>.*?</think>\s*<answer>.*?</answer>") -> float:
    """1 if every answer is, from its first to its last character, of the form of the regular expression `pattern`."""
    form = re.compile(pattern, re.DOTALL)
    return float(all(form.fullmatch(answer.strip()) for answer in transcript.answers))


def score(transcript: Transcript) -> float:
    """Return the task's own score: its fact `score`."""
    return float(fact(transcript, "score"))


def length_penalty(transcript: Transcript, *, free_tokens: int, longest_tokens: int) -> float:
    """0 up to `free_tokens`, then falling evenly to -1 at `longest_tokens`: the soft punishment of overlong answers.

    Source: Yu et al. 2025, DAPO, arXiv:2503.14476, equation 13.
    """
    if longest_tokens <= free_tokens:
        raise ValueError(f"longest_tokens must be above free_tokens, got {longest_tokens} and {free_tokens}")
    over = (transcript.tokens - free_tokens) / (longest_tokens - free_tokens)
    return -min(1.0, max(0.0, over))


def unscored(transcript: Transcript) -> float:
    """Always 0: other components score."""
    return 0.0


def code_block(answer: str) -> str:
    """Return the last fenced block of an answer; all of it where nothing is fenced."""
    blocks = re.findall(r"```(?:python|py)?[ \t]*\n(.*?)```", answer, re.DOTALL)
    return blocks[-1] if blocks else answer


def unit_tests(transcript: Transcript, *, timeout_s: float = 10.0, memory_bytes: int = 512 << 20) -> float:
    """Share of the fact `tests` (Python texts, each run after the code of the answer) that pass, in a process apart."""
    from rlplace.envs.text.code_runner import run_tests

    fact(transcript, "tests")
    tests = transcript.facts["tests"]
    tests = [tests] if isinstance(tests, str) else list(tests)
    passed = run_tests(code_block(transcript.answer), tests, timeout_s=timeout_s, memory_bytes=memory_bytes)
    return passed / len(tests) if tests else 0.0


def reasoning_score(transcript: Transcript) -> float:
    """Score the last answer by the library's verifier: all of it, or its last <answer></answer>."""
    from reasoning_gym import get_score_answer_fn

    entry = transcript.facts["entry"]
    verify = get_score_answer_fn(entry["metadata"]["source_dataset"])
    tagged = re.findall(r"<answer>(.*?)</answer>", transcript.answer, re.DOTALL)
    try:
        return float(verify(answer=(tagged[-1] if tagged else transcript.answer).strip(), entry=entry))
    except Exception as error:  # noqa: BLE001  # one of a hundred foreign verifiers fails on this answer
        _LOG.warning("an answer scores 0: the verifier of %s raised %r", entry["metadata"]["source_dataset"], error)
        return 0.0

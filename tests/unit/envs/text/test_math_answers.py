"""Answers as models write them, read by the project's own rules and by math-verify."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import types
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlplace.envs.text import Transcript, math_answers, math_library
from rlplace.envs.text import rewards as v
from rlplace.envs.text.math_answers import last_boxed, math_answer, math_verify, number
from rlplace.errors import ConfigError

# Pairs of a right answer and an answer of a policy; the file says of each in which style it is. `own`: whether
# math_answer is held to the value, too. `library`: the value that math-verify gives, where that is not the right one
CORPUS = Path(__file__).parents[3] / "data" / "math_answers.jsonl"
PAIRS = [json.loads(line) for line in CORPUS.read_text().splitlines()]


def transcript(said: str, **facts: Any) -> Transcript:
    return Transcript(
        prompt="?", answers=(said,), replies=(), facts=facts, tokens=0, truncated=False
    )


# Answer, right answer, value, and whether the library is needed to see it.
FORMS = [
    (r"\boxed{\frac12}", "1/2", 1, False),
    (r"\boxed{\frac{1}{2}}", "0.5", 1, False),
    (r"\boxed{\dfrac{3}{4}}", "0.75", 1, False),
    (r"\boxed{\tfrac{3}{4}}", r"\frac{3}{4}", 1, False),
    (r"\boxed{x=5}", "5", 1, False),
    (r"so $x = 5$", "5", 1, False),
    (r"\boxed{5\text{ cm}}", "5", 1, False),
    (r"\boxed{5 \mathrm{~cm}}", "5", 1, False),
    (r"\boxed{50\%}", "50", 1, False),
    (r"\boxed{50\%}", r"50\%", 1, False),
    (r"\boxed{10^\circ}", "10", 1, False),
    (r"\boxed{10^{\circ}}", r"10^\circ", 1, False),
    (r"\boxed{1{,}000}", "1000", 1, False),
    (r"\boxed{1,000}", "1000", 1, False),
    (r"\boxed{\$18}", "18", 1, False),
    (r"\boxed{\left(3,\frac{\pi}{2}\right)}", r"(3, \frac{\pi}{2})", 1, False),
    (r"\boxed{(3,\frac{\pi}{2})}", r"\left( 3, \frac{\pi}{2} \right)", 1, False),
    (r"\boxed{\text{A}}", "A", 1, False),
    (r"\boxed{\sqrt3}", r"\sqrt{3}", 1, False),
    (r"\boxed{2\sqrt3}", r"\sqrt{12}", 1, True),
    (r"\boxed{\{1,2\}}", r"\{2,1\}", 1, True),
    (r"\boxed{(x+1)^2}", r"x^2+2x+1", 1, True),
    (r"\boxed{3\frac{1}{2}}", "7/2", 1, False),
    (r"\boxed{-3\dfrac12}", "-3.5", 1, False),
    (r"\boxed{3 1/2}", r"3\frac{1}{2}", 1, False),
    (r"\boxed{3\frac{1}{2}}", "31/2", 0, False),
    (r"\boxed{31/2}", "3 1/2", 0, False),
    (r"\boxed{\frac{\sqrt{2}}{2}}", r"\frac{1}{\sqrt{2}}", 1, True),
    (r"\boxed{7}", r"\boxed{8}", 0, False),
    (r"the root is \sqrt{2}", "2", 0, False),
    (r"the term x_2", "2", 0, False),
    (r"that makes 2^3", "3", 0, False),
    (r"\boxed{12}", "1,2", 0, False),
    (r"an area of 5 cm^2", "5", 1, False),
    (r"\boxed{}", "", 0, False),
]


@pytest.mark.parametrize(("answer", "right", "value", "library"), FORMS)
def test_forms_by_own_rules(
    answer: str, right: str, value: float, library: bool
) -> None:
    assert math_answer(transcript(answer, answer=right)) == (0 if library else value)


@pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None,
    reason="the extra math is not installed",
)
@pytest.mark.parametrize(("answer", "right", "value", "library"), FORMS)
def test_forms_by_the_library(
    answer: str, right: str, value: float, library: bool
) -> None:
    assert math_verify(transcript(answer, answer=right)) == value


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair["own"]])
def test_the_corpus_by_own_rules(pair: dict[str, Any]) -> None:
    told = transcript(pair["answer"], answer=pair["right"])
    assert math_answer(told) == pair["value"]


@pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None,
    reason="the extra math is not installed",
)
@pytest.mark.parametrize("pair", PAIRS)
def test_the_corpus_by_the_library(pair: dict[str, Any]) -> None:
    told = transcript(pair["answer"], answer=pair["right"])
    assert math_verify(told) == pair.get("library", pair["value"])


# Answers of which a pattern or a library might never see the end
ENDLESS = {
    "roots": r"\sqrt[" * 20_000,
    "fractions": r"\frac{" * 20_000,
    "braces": "{" * 100_000,
    "closed braces": r"\boxed{" + "{" * 50_000 + "5" + "}" * 50_001,
    "a tower of powers": "10**10**9",
    "a tower with blanks": "10 ** 10 ** 9",
    "a tower of LaTeX": r"\boxed{9^{9^{9}}}",
    "a tower of letters": r"\boxed{e^{e^{e^{e^{e}}}}}",
    "a large power": r"\boxed{10^{10000000000}}",
    "a large power of a sum": r"\boxed{(x+y+z+1)^{200}}",
    "a factorial": r"\boxed{1000000000!}",
    "factorials": r"\boxed{(9!)!}",
    "a binomial": r"\boxed{\binom{1000000}{500000}}",
    "a continued fraction": r"\boxed{" + r"\frac{1}{1+" * 25 + "1" + "}" * 26,
    "digits": "9" * 100_000,
    "digits in a box": r"\boxed{" + "9" * 100_000 + "}",
    "commas": "1," * 50_000,
    "blanks": "1" + " " * 100_000 + "2",
    "mixed numbers": "1 1/1 " * 20_000,
    "powers": "1^{" * 30_000,
    "marks": "#### " * 20_000,
    "headings": "#### 1. a\n" * 10_000,
    "dollars": "$" * 50_000,
    "minus signs": "\u2212" * 100_000,
    "thoughts": "<think>" * 20_000,
    "denials": "not 5 " * 20_000,
    "millions": "1 million " * 20_000,
    "blanks before a million": "1" + " " * 50_000 + "million",
    "sums": "#### 5" + " + 5" * 20_000,
}


@pytest.mark.parametrize("answer", ENDLESS.values(), ids=ENDLESS)
@pytest.mark.parametrize("right", ["4", r"\frac{1}{2}"])
def test_no_answer_holds_up_its_grading(answer: str, right: str) -> None:
    told = transcript(answer, answer=right)
    assert math_answer(told) == 0
    if importlib.util.find_spec("math_verify") is not None:
        assert math_verify(told) == 0


@pytest.mark.parametrize(
    ("text", "large"),
    [
        ("e^{x^2+y^2+z^2}", False),
        ("e^{x^{2^n}}", False),
        ("2^{2^{10}}", False),
        ("10^{100}", False),
        ("x^{2023}", False),
        ("(x+1)^{10}", False),
        (r"(\frac{2}{3})^{100}", False),
        (r"\frac{1}{1+\frac{1}{2}}", False),
        ("100!", False),
        ("10^-3*5", False),
        ("2^{3^{4^5}}", True),
        ("9**9**9", True),
        ("10 ** 10 ** 9", True),
        ("10^{(10^9)}", True),
        ("(x+1)^{100}", True),
        (r"\left(10^{9}\right)!", True),
        ("9" * 400, True),
    ],
)
def test_what_is_too_large_to_compute(text: str, large: bool) -> None:
    assert math_library.explodes(text) is large


@pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="no math_verify"
)
@pytest.mark.parametrize(
    "answer",
    [
        r"\boxed{\binom{10^9}{5*10^8}}",
        r"\boxed{10^9 !}",
        r"\boxed{\Gamma(1000000000)}",
        r"\boxed{(10^{9000})^{9000}}",
    ],
)
def test_what_is_not_seen_to_be_too_large_is_ended_all_the_same(
    answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not math_library.explodes(answer)
    monkeypatch.setattr(math_library, "_SECONDS", 0.3)
    assert math_library.verified(answer, "1") is False


@pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="no math_verify"
)
@pytest.mark.parametrize("answer", ENDLESS.values(), ids=ENDLESS)
def test_processor_time_alone_ends_each_answer(
    answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(math_library, "explodes", lambda text: False)
    monkeypatch.setattr(math_library, "_SECONDS", 0.3)
    assert math_library.verified(answer, r"\frac{7}{9}") is False


def test_the_library_computes_with_numbers_whose_computation_can_be_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With gmpy2, a factorial ended its process, and with it the run."""
    found: list[tuple[str | None, ...]] = []

    def parse(*_: object, **__: object) -> list[object]:
        names = ("SYMPY_GROUND_TYPES", "MPMATH_NOGMPY")
        found.append(tuple(map(os.environ.get, names)))
        return []

    library = types.SimpleNamespace(parse=parse, verify=lambda *_, **__: False)
    monkeypatch.setitem(sys.modules, "math_verify", library)
    for name in math_library.PYTHON_NUMBERS:
        monkeypatch.setenv(name, "gmpy")
    assert math_library.verified("1", "1") is False
    assert set(found) == {("python", "1")}


def test_a_library_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is ended by processor time, and whatever it catches."""

    def endless(*_: object, **__: object) -> None:
        while True:
            with contextlib.suppress(Exception):
                while True:
                    pass

    library = types.SimpleNamespace(parse=endless, verify=endless)
    monkeypatch.setitem(sys.modules, "math_verify", library)
    monkeypatch.setattr(math_library, "_SECONDS", 0.01)
    assert math_library.verified("1", "1") is False


def test_each_of_several_right_answers_is_right() -> None:
    assert math_answer(transcript("4", answer=["3", "4"])) == 1
    assert math_answer(transcript("5", answer=["3", "4"])) == 0


def test_the_library_is_asked_for_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "math_verify", None)
    with pytest.raises(ConfigError, match="no module math_verify") as caught:
        v.named_reward("math_verify", {}, key="env.rewards[0]", leaf="name")
    assert caught.value.codes == ("missing-library",)


@pytest.mark.parametrize(
    ("answer", "right", "value"),
    [
        ("4", "4", 1),
        ("2 + 2 = 4", "4", 1),
        ("no idea", "4", 0),
        ("the answer is -4", "-4", 1),
        ("1,234.50", "1234.5", 1),
        (".5", "0.5", 1),
        ("3/4", "0.75", 1),
        ("4/0", "4", 0),
        (r"\boxed{7} or \boxed{8}", "8", 1),
        (r"\boxed{\frac{3}{4}}", "3/4", 1),
        (r"\boxed{x^{2} + 1}", "x^{2}+1", 1),
        (r"\boxed{x}", "y", 0),
        (r"4 \boxed{5", "5", 1),
        ("42", r"\boxed{42}", 1),
        (
            "The answer is 72.",
            "She sold 48/2 = <<48/2=24>>24, so 48+24 = 72.\n#### 72",
            1.0,
        ),  # GSM8K has solutions
        (
            "The answer is 24.",
            "She sold 48/2 = <<48/2=24>>24, so 48+24 = 72.\n#### 72",
            0.0,
        ),
    ],
)
def test_math_answer(answer: str, right: str, value: float) -> None:
    assert math_answer(transcript(answer, answer=right)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", "1"),
        ("$1,000$", "1000"),
        ("1/8", "0.125"),
        ("1/0", None),
        ("nan", None),
        ("inf", None),
        ("two", None),
    ],
)
def test_number(text: str, value: str | None) -> None:
    assert number(text) == (None if value is None else Decimal(value))


@given(
    answer=st.text() | st.text("0123456789.,/eE+-\\{}boxedfrac $", max_size=60),
    right=st.sampled_from(["4", "x", "1/3"]),
)
@example(answer=r"\boxed{1e999999/1}, \boxed{1e999999/0.1}", right="4")
@example(answer="1e999999999999999999999", right="4")
@example(answer="9" * 10_000, right="4")
def test_whatever_a_policy_says_it_gets_a_number(answer: str, right: str) -> None:
    told = transcript(answer, answer=right)
    for function in (math_answer, v.exact_match, v.contains, v.matches):
        assert function(told) in (0, 1)


def test_an_answer_that_goes_round_in_circles_is_read_once() -> None:
    """A policy that has lost its way writes one thing until its last token: of these, all are looked at together."""
    assert last_boxed("\\boxed{7}" + "\\boxed{" * 50_000) == "7"
    assert last_boxed("\\boxed{" * 50_000) is None
    assert last_boxed("\\boxed{1}{\\boxed {2}} } \\boxed{\\boxed{3} {4}}") == "3"


# Answer; value by own rules; value by the library with what is done before it. The library alone gives 0 to most.
PLAIN = [
    *((answer, 1, 1) for answer in ("(42)", "`42`", "answer:42", "Answer:42", "+42")),
    *((answer, 1, 1) for answer in ("_42_", "*42*", "***42***", "_**42**_", "> 42")),
    *((answer, 1, 1) for answer in ("The answer is (42).", "so `42`.", "x = +42")),
    *(
        (answer, 1, 1)
        for answer in ("**Final answer:** (42)", '"42"', "\u201c42\u201d")
    ),
    *((answer, 1, 1) for answer in ("#### `42`", "#### _42_", "#### +42", "#### (42)")),
    *((answer, 1, 1) for answer in (r"\boxed{(42)}", r"\boxed{`42`}", r"\boxed{_42_}")),
    *((answer, 1, 1) for answer in (r"\boxed{answer: 42}", r"\boxed{Answer:42}")),
    # What is no number of its own
    *((answer, 0, 0) for answer in ("(42, 1)", "x_42", "a_42_", "x>42", "CO_42_")),
    *((answer, 0, 0) for answer in ("`42 + 1`", "*42*3", "(42)^2", r"\boxed{(42,1)}")),
    *((answer, 0, 0) for answer in ("7 +42x", r"\boxed{f(42)}")),
]


@pytest.mark.parametrize(("answer", "own", "library"), PLAIN)
def test_a_number_counts_with_the_marks_around_it(
    answer: str, own: float, library: float
) -> None:
    told = transcript(answer, answer="42")
    assert math_answer(told) == own
    assert math_verify(told) == library


@pytest.mark.parametrize(
    ("answer", "right", "value"),
    [
        (r"\boxed{(3,4)}", "34", 0),
        (r"\boxed{(1,200)}", "1200", 0),
        ("The answer is (3,4)", "34", 0),
        ("equation (3) gives 7", "3", 0),
        ("equation (3) gives 7", "7", 1),
        ("2 +42", "2", 0),
        ("it is 3 _or_ 4", "4", 1),
    ],
)
def test_marks_that_are_left_out_make_no_other_number(
    answer: str, right: str, value: float
) -> None:
    told = transcript(answer, answer=right)
    assert math_answer(told) == value
    assert math_verify(told) == value


# Answer, right answer, value by own rules, value by the library
CHANGED = [
    # What follows a number on its line makes it another value
    *((f"#### {line}", "5", 0, 0) for line in ("5 or 6", "5 (or 6)", "5 to 6", "5-6")),
    *((f"#### {line}", "5", 0, 0) for line in ("5^2", "5 * 10", "5 + 3", "5 6", "5!")),
    *(
        (f"#### {line}", "5", 0, 0)
        for line in ("5:30", "5x", "5\u00d710", "$5$ or $6$")
    ),
    ("#### 10 million", "10", 0, 0),
    ("#### 10k", "10", 0, 0),
    ("#### 10 million", "10000000", 1, 1),
    ("It costs $1.2 million.", "1200000", 1, 1),
    (r"\boxed{10 \text{ million}}", "10", 0, 0),
    # And what does not
    *((f"#### {line}", "42", 1, 1) for line in ("42 apples", "42.", "42 (2 each)")),
    *((f"#### {line}", "42", 1, 1) for line in ("**42**", "$42$", "42\n7 steps")),
    # What a sentence denies
    ("The answer is not 42", "42", 0, 0),
    ("I had 42. The answer isn't 42.", "42", 0, 0),
    ("So 42 is wrong", "42", 0, 0),
    ("The answer is not 41 but 42", "42", 1, 1),
    ("The answer is 42, not 41", "42", 1, 1),
    ("42 is not only right", "42", 1, 1),
    # What is calculated with
    ("The answer is 5 \u00d7 10", "5", 0, 0),
    ("2\u00d75", "5", 0, 0),
    ("2\u00b75", "5", 0, 0),
    ("the answer: 7 + 5", "5", 0, 0),
    ("the answer: 2*5", "5", 0, 0),
    ("7 + 5 = 12", "12", 1, 1),
    (r"\boxed{2 \times 10^3}", "2000", 1, 1),
    ("$2 \u00d7 10^3$", "2000", 1, 1),
]


@pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="no math_verify"
)
@pytest.mark.parametrize(("answer", "right", "own", "library"), CHANGED)
def test_a_number_counts_only_where_it_is_the_result(
    answer: str, right: str, own: float, library: float
) -> None:
    told = transcript(answer, answer=right)
    assert math_answer(told) == own
    assert math_verify(told) == library


# Answers that are no single number, and a number in them
PARTS = [
    # Several results
    *((answer, "3") for answer in ("x = 2 or x = 3", "So $x=2$ or $x=3$.", "2 or 3")),
    *((answer, "3") for answer in ("x = 2, x = 3", "x_1 = 2, x_2 = 3", "x = 2 and 3")),
    *((answer, "3") for answer in ("The roots are 2 and 3.", "x = 2, 3", "{2, 3}")),
    *((answer, "3") for answer in ("<2, 3>", r"\langle 2, 3 \rangle", "1, 2, 3")),
    *((answer, "3") for answer in (r"x = \pm 3", "x = \u00b13", "+/- 3", r"2 \pm 3")),
    (r"\begin{pmatrix} 2 \\ 3 \end{pmatrix}", "3"),
    (r"\begin{cases} x = 2 \\ y = 3 \end{cases}", "3"),
    # Ratios and ranges
    *((answer, "7") for answer in ("5 in 7", "The odds are 5 in 7", "5 of 7", "5 : 7")),
    *((answer, "5") for answer in ("between 3 and 5", "3 to 5", "3-5", "2/3 of 5")),
    *((answer, "5") for answer in ("5 or more", "5+", "no solutions below 5")),
    # Arguments and calculations
    *((answer, "2") for answer in ("f(2)", "the answer is f(2)", "log 2", "ln(2)")),
    *((answer, "2") for answer in ("3(2)", "-(2)", "0.(2)", r"0.\overline{2}", "|2|")),
    *((answer, "2") for answer in ("x + 2", "n/2", r"\pi + 2", "3 x 2", "5 choose 2")),
    *((answer, "6") for answer in ("half of 6", "the square root of 6", "6 squared")),
    *((answer, "6") for answer in ("negative 6", "42 divided by 6", "5 remainder 6")),
    *((answer, "3") for answer in ("$3!$", "3 pi", "3 i", "3e", "3 and a half")),
    ("x -3", "-3"),
    ("|-3|", "-3"),
    (r"\lfloor 3.5 \rfloor", "3.5"),
    ("3 x 10^5", "100000"),
    # Names, dates and measures
    *((answer, "5") for answer in ("5-th", r"5\text{th}", "Step 5", "figure 5", "5D")),
    *(
        (answer, "17")
        for answer in ("2024-05-17", "2024/05/17", r"x \equiv 5 \pmod{17}")
    ),
    *((answer, "7") for answer in ("5'7\"", "5_{7}", "x = 5 (mod 7)")),
    ("1 000", "0"),
    ("1'000", "0"),
    # The same in a box, and after ####
    *((rf"\boxed{{{part}}}", "6") for part in ("6th", "6 squared", "6 factorial")),
    (r"\boxed{5\text{th}}", "5"),
    (r"\boxed{3.333...}", "3.333"),
    *((f"#### {part}", "3") for part in ("3rd", "3 i", "3 or more", "3 x 10^5", "3e")),
    *((f"#### {part}", "3") for part in (r"[3, \infty)", "3 and a half", "{2, 3}")),
    (r"#### 0.\overline{3}", "0"),
]
# Answers in whose neighbourhood there is such a text, and which are a number
SINGLE = [
    *((answer, "5") for answer in ("5 (Step 3)", "f(2) = 5", "x - 3 = 2, so x = 5")),
    *((answer, "5") for answer in ("|x| = 5", "5 (mod 7)", "x = -2 + 7, so 5.")),
    *(
        (answer, "5")
        for answer in ("No, 5.", "No solution other than 5", "from 3 to 5")
    ),
    *((answer, "5") for answer in ("5 and 5", "x = 5, x = 5", "2 and 3 make 5", "5!")),
    *((answer, "5") for answer in ("x = 10/2, x = 5", "In case 2, 5", "x = 2, y = 5")),
    *((answer, "5") for answer in ("half of 10 is 5", "Room 5", "no. 5", "#5", "5 pm")),
    ("no such number is above 7, so 7", "7"),
    ("3 x 10^5", "300000"),
    (r"\boxed{6th}", "6th"),
    ("negative 6", "-6"),
    ("7 minus 6 is 1", "1"),
    ("1 000", "1000"),
    ("12 345 678", "12345678"),
    ("1'000", "1000"),
]


def test_a_part_of_a_result_is_not_right() -> None:
    read = [
        part for part in PARTS if math_answer(transcript(part[0], answer=part[1])) != 0
    ]
    assert read == []


def test_a_number_beside_such_a_text_is_right() -> None:
    not_read = [
        one for one in SINGLE if math_answer(transcript(one[0], answer=one[1])) != 1
    ]
    assert not_read == []


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (r"\boxed{9e999999}", r"50\%"),
        (r"\boxed{50\%}", "9e999999"),
        (r"\boxed{1e-999999}", "1%"),
    ],
)
def test_a_number_that_is_too_large_to_multiply_is_not_right(
    answer: str, right: str
) -> None:
    """An error of decimal numbers would end the run."""
    assert math_answer(transcript(answer, answer=right)) == 0


def test_an_answer_that_takes_too_long_is_not_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(answer: str) -> str:
        while True:
            pass

    monkeypatch.setattr(math_answers, "_SECONDS", 0.05)
    monkeypatch.setattr(math_answers, "_read", read)
    long = "so it is 42 " * 1_000
    assert math_answer(transcript(long, answer="42")) == 0

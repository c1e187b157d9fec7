"""Conditions of a script that is read without being run: one branch of each, and which one."""

from __future__ import annotations

import pytest

from rlplace.imports.shell import entry_words, taken_branches

CASE = """DEVICE=${DEVICE:-gpu}
case "$DEVICE" in
  npu) SIZE=1
    MORE=1 ;;
  gpu|cuda)
    SIZE=2
    ;;
  *) SIZE=3 ;;
esac
python -m t size=$SIZE more=${MORE:-none}
"""


@pytest.mark.parametrize(
    ("variables", "words", "taken"),
    [
        ({}, ["size=2", "more=none"], "gpu|cuda)"),
        ({"DEVICE": "npu"}, ["size=1", "more=1"], "npu)"),
        ({"DEVICE": "other"}, ["size=3", "more=none"], "*)"),
    ],
)
def test_one_branch_of_case_is_taken(
    variables: dict[str, str], words: list[str], taken: str
) -> None:
    assert [w.text for w in entry_words(CASE, variables=variables)] == words
    (branch,) = taken_branches(CASE, variables)[1]
    assert (branch.line, branch.condition, branch.taken) == (2, 'case "$DEVICE"', taken)


@pytest.mark.parametrize(
    ("test", "taken"),
    [
        ('[ "$N" -gt 4 ]', "then"),
        ('[ "$N" -gt 8 ]', "else"),
        ('[ -z "$NEVER" ]', "then"),
        ('[ -n "$NEVER" ]', "else"),
        ('[[ "$NAME" == "a" ]]', "then"),
        ("[[ $NAME == a* && $N != 8 ]]", "else"),
        ('[ "$NAME" = b ] || [ "$N" = 8 ]', "then"),
        ('! [ "$NAME" = b ]', "then"),
        ('[ "${NAME}" = "a" ] && [ -n "$N" ]', "then"),
        ("[ -f some_file ]", "else"),
        ("command -v nvidia-smi > /dev/null", "else"),
        ('[ "$(hostname)" = a ]', "else"),
    ],
)
@pytest.mark.parametrize("layout", ["lines", "next", "one"])
def test_conditions(test: str, taken: str, layout: str) -> None:
    parts = {
        "lines": f"if {test}; then\n  X=1\nelse\n  X=2\nfi\n",
        "next": f"if {test}\nthen\n  X=1\nelse\n  X=2\nfi\n",
        "one": f"if {test}; then X=1; else X=2; fi\n",
    }
    text = f"N=8\nNAME=a\n{parts[layout]}python -m t x=$X"
    (word,) = entry_words(text)
    assert word.text == ("x=1" if taken == "then" else "x=2")
    (branch,) = taken_branches(text, {})[1]
    assert (branch.line, branch.taken) == (3, taken)
    assert word.line == text.count("\n") + 1


def test_inner_conditions_and_those_without_a_known_value() -> None:
    text = """N=2
if [ "$N" = 2 ]; then
  if [ -d /models ]; then
    M=1
  elif [ "$N" = 2 ]; then
    M=2
  fi
  A=(a=1  # the first
     b=$M)
else
  if [ "$N" = 3 ]; then
    A=(c=1)
  fi
fi
python -m t "${A[@]}"
"""
    assert [word.text for word in entry_words(text)] == ["a=1", "b=2"]
    branches = taken_branches(text, {})[1]
    assert [(b.line, b.taken) for b in branches] == [
        (2, "then"),
        (3, 'elif [ "$N" = 2 ]'),
    ]


def test_words_behind_a_keyword_count_and_other_languages_do_not() -> None:
    text = """N=1
cat > x.py <<END
if True:
    print(1)
END
if [ "$N" = 1 ]; then A=1
else A=2
fi
if [ "$N" = 2 ]
then B=1  # no
else B=2; C=3
fi
python -m t a=$A b=$B c=$C
"""
    assert [word.text for word in entry_words(text)] == ["a=1", "b=2", "c=3"]


def test_conditions_that_cannot_be_followed_take_no_line_away() -> None:
    text = "if [ 1 = 2 ]; then\n  A=1\npython -m t a=$A\n"
    kept, branches = taken_branches(text, {})
    assert kept == text
    assert [branch.taken[:12] for branch in branches] == ["all branches"]

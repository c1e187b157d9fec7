"""Launch scripts as the words that their trainer gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.imports.shell import UnclosedQuote, entry_words


def words(text: str, *, script: bool = True) -> list[str]:
    return [word.text for word in entry_words(text, script=script)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--a 1 --b", ["--a", "1", "--b"]),
        ("python3 -m pkg.train --a 1", ["--a", "1"]),
        ("python examples/train.py --a=1", ["--a=1"]),
        ("deepspeed --module pkg.train --a 1", ["--a", "1"]),
        (
            "ray job submit --address=x --no-wait -- python3 -m pkg.train --a 1",
            ["--a", "1"],
        ),
        (
            "python -m t \\\n  --a 1 \\\n  --b 'x y'  # why\n",
            ["--a", "1", "--b", "x y"],
        ),
        ('python -m t --a "1 2" --b 3"4"5', ["--a", "1 2", "--b", "345"]),
        ("python -m t --a '$N' --b \"$N\"", ["--a", "$N", "--b", "$N"]),
        (
            "N=8\npython -m t --a $N --b ${N} --c ${M:-4} --d ${M}",
            ["--a", "8", "--b", "8", "--c", "4", "--d", "${M}"],
        ),
        ("N=8\npython -m t --a '$N'", ["--a", "$N"]),
        ("export N=8; python -m t --a $N", ["--a", "8"]),
        (
            'X="--a 1 --b 2"\npython -m t $X "$X"',
            ["--a", "1", "--b", "2", "--a 1 --b 2"],
        ),
        (
            'A=(\n --a 1  # one\n --b\n)\nB=(--c)\npython -m t ${A[@]} "${B[@]}"',
            ["--a", "1", "--b", "--c"],
        ),
        ("A=(--a 1)\nA+=(--b 2)\npython -m t ${A[@]}", ["--a", "1", "--b", "2"]),
        ("python -m t --a 1 > log 2>&1", ["--a", "1"]),
        ("python -m t --a 1 2>&1 | tee log", ["--a", "1"]),
        ("set -x\ncd /x && python -m t --a 1 &", ["--a", "1"]),
        (
            'srun bash -c "pip install x && python -m t --a 1 --b 2"',
            ["--a", "1", "--b", "2"],
        ),
        (
            "read -r -d '' X <<EOF\npkg.train \\\n --a 1 \\\n --b 2\nEOF\n",
            ["--a", "1", "--b", "2"],
        ),
        (
            "python -m t --a $(date +%s) --b $((1 + 2))",
            ["--a", "$(date +%s)", "--b", "3"],
        ),
        (
            'N=$((2 * 4))\npython -m t --a $N --b "x$((N - ${N} / 3))" --c $((M + 1))',
            ["--a", "8", "--b", "x6", "--c", "$((M + 1))"],
        ),
        (
            "python -m t --a $((1 / 0)) --b $((2 ** 9))",
            ["--a", "$((1 / 0))", "--b", "$((2 ** 9))"],
        ),
        (
            'D=$(cd "$S/.." && pwd)\npython -m t --a ${D}/x --b',
            ["--a", '$(cd "$S/.." && pwd)/x', "--b"],
        ),
        ("python -m t a.b=1 +c.d=[1,2] 'e=\"x\"'", ["a.b=1", "+c.d=[1,2]", 'e="x"']),
        ("python -m t --agent x.py --b", ["--agent", "x.py", "--b"]),
        (
            'D="$(cd -- "$(dirname -- "$0")" && pwd)"\npython "${D}/train.py" --a 1',
            ["--a", "1"],
        ),
        ('N=${N:-"8"}\npython -m t --a ${N} --b ${M:-${N}}', ["--a", "8", "--b", "8"]),
        ('export A=1 B="x y"\npython -m t --a $A "$B"', ["--a", "1", "x y"]),
        (
            ': "${N:=8}"\n: ${M:="x y"}\npython -m t --a $N --b "$M"',
            ["--a", "8", "--b", "x y"],
        ),
        ("python -m t --a ${1:-4} --b ${1}", ["--a", "4", "--b", "${1}"]),
        ("", []),
        ("# nothing but a remark", []),
        ("echo )", []),
    ],
)
def test_words_of_the_trainer(text: str, expected: list[str]) -> None:
    assert words(text) == expected


def test_typed_words_set_no_variables() -> None:
    assert words("seed=1 a.b=2", script=False) == ["seed=1", "a.b=2"]
    assert words("seed=1 a.b=2") == ["a.b=2"]


def test_lines_are_those_of_the_text() -> None:
    text = "set -x\npython -m t \\\n --a \\\n 1\n"
    assert [(w.text, w.line) for w in entry_words(text)] == [("--a", 3), ("1", 4)]
    value = 'J="{\n}"\npython -m t --a "$J" \\\n --b'
    assert [(w.text, w.line) for w in entry_words(value)] == [
        ("--a", 3),
        ("{\n}", 3),
        ("--b", 4),
    ]
    assert entry_words('x=1\nbash -c "python -m t \\\n --a 1"')[0].line >= 2


@pytest.mark.parametrize(("text", "line"), [("--a 'b", 1), ('x\ny --a "b\nc', 2)])
def test_a_quote_that_is_never_closed(text: str, line: int) -> None:
    with pytest.raises(UnclosedQuote) as caught:
        entry_words(text)
    assert caught.value.line == line


@given(st.text(alphabet="ab1 -=$(){}[]@'\"\\\n#;|&<>+", max_size=60))
def test_any_text_is_read_or_has_an_open_quote(text: str) -> None:
    last = text.count("\n") + 1
    try:
        found = [word.line for word in entry_words(text)]
    except UnclosedQuote as error:
        found = [error.line]
    assert all(1 <= line <= last for line in found)

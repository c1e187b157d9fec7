"""Lines of fixes: pasted together, they set no key twice."""

from __future__ import annotations

from rlplace.config.fix_lines import in_kwargs, without_repeats
from rlplace.errors import COMMAND_LINE, Problem, Source

WRITTEN = {"actor": {"optimizer": {"lr": "lin_3e-4", "schedule": "constant"}}}


def wrong(key: str, fix: str, file: str = "config.yaml") -> Problem:
    return Problem(code="x", key=key, what="", fix=fix, source=Source(file=file))


def fixes(*problems: Problem) -> list[str | None]:
    return [problem.fix for problem in without_repeats(problems, WRITTEN)]


def test_a_line_that_another_fix_has_is_left_out() -> None:
    first = wrong("a.x", "a.z: 1        (a line without indent, in place of x)")
    second = wrong("a.y", "a.z: 1\na.w: 2        (lines without indent)")
    third = wrong("a.v", "a.z: 1")
    told = fixes(first, second, third)
    assert told[0] == first.fix
    assert told[1] == "a.w: 2        (a line without indent, in place of y)"
    assert told[2] == "remove v        (another line says the same)"


def test_a_key_that_stands_is_set_by_its_whole_path() -> None:
    told = fixes(wrong("actor.optimizer.lr", "lr: 0.0003\nschedule: linear"))
    lines = (told[0] or "").split("\n")
    assert lines[0] == "lr: 0.0003"
    assert lines[1].startswith("actor.optimizer.schedule: linear        (a line")
    same = fixes(wrong("actor.optimizer.lr", "lr: 0.0003\nschedule: constant"))
    assert same == ["lr: 0.0003"]


def test_choices_words_and_items_stay_as_they_are() -> None:
    for told in (
        wrong("a.x", "one of\nb: 1\nb: 2"),
        wrong("a.x", "a.b=1 a.c=2", file=f"{COMMAND_LINE}a.x=1"),
        wrong("a[0].x", "b: 1"),
        wrong("a.x", "leave out x"),
        wrong("a.x", "b: 1\nor: c: 2"),
    ):
        assert fixes(told, told) == [told.fix, told.fix]


def test_an_argument_that_is_set_gets_its_whole_path() -> None:
    kwargs = {"digits": 1, "num_digits": 3}
    line = in_kwargs("env.kwargs", "digits", "num_digits", kwargs)
    assert line.partition(" " * 8)[0] == "env.kwargs.digits: 3"
    del kwargs["digits"]
    assert in_kwargs("env.kwargs", "digits", "num_digits", kwargs) == "digits: 3"


def test_a_line_with_a_whole_path_keeps_it() -> None:
    source = Source(file="config.yaml", line=3, is_dotted=True)
    told = Problem(code="x", key="a.b.c", what="", fix="c: 1\nd: 2", source=source)
    assert told.pasted == "a.b.c: 1\na.b.d: 2"

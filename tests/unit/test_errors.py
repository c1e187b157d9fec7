"""The text of errors, and that they survive pickling between processes."""

from __future__ import annotations

import errno
import pickle
from pathlib import Path

import pytest

from rlplace.errors import (
    AcceleratorOutOfMemory,
    ChannelTimeout,
    ConfigError,
    EndOfStream,
    OutputError,
    PlacementError,
    Problem,
    ProblemsError,
    RlplaceError,
    Source,
    WorkerError,
    did_you_mean,
)

OUT_OF_RANGE = Problem(
    code="accelerator-out-of-range",
    key="cluster.component_placement.actor",
    what="accelerator 8 does not exist",
    got="0-8",
    span=(2, 3),
    source=Source(file="hybrid_ppo.yaml", line=7),
    why="ranges include both ends, and this cluster has 8 accelerators, 0-7 (1 node x 8)",
    fix="actor: 0-7        (or: actor: all)",
)


def test_a_problem_in_the_standard_error_format() -> None:
    assert OUT_OF_RANGE.render() == (
        "cluster.component_placement.actor: accelerator 8 does not exist            [accelerator-out-of-range]\n"
        "    got: 0-8     (hybrid_ppo.yaml:7)\n"
        "           ^\n"
        "    why: ranges include both ends, and this cluster has 8 accelerators, 0-7 (1 node x 8)\n"
        "    fix: actor: 0-7        (or: actor: all)"
    )


def test_a_problem_says_only_what_it_knows() -> None:
    assert Problem(code="c", key="k", what="w").render().split() == ["k:", "w", "[c]"]
    assert (
        Problem(code="c", key="k", what="w", source=Source(file="command line")).render().endswith("at: command line")
    )


def test_lines_after_the_first_stand_under_it() -> None:
    text = Problem(code="c", key="k", what="w", got="a\nb", why="one\ntwo", fix="x\ny").render()
    assert text.splitlines()[1:] == [
        "    got: a",
        "         b",
        "    why: one",
        "         two",
        "    fix: x",
        "         y",
    ]


@pytest.mark.parametrize(("span", "carets"), [((0, 3), "^^^"), ((1, 2), " ^"), ((2, 2), "  ^")])
def test_the_caret_marks_the_piece(span: tuple[int, int], carets: str) -> None:
    text = Problem(code="c", key="k", what="w", got="0-8", span=span).render()
    assert text.splitlines()[2] == " " * len("    got: ") + carets


def test_all_problems_are_in_one_error() -> None:
    error = PlacementError([OUT_OF_RANGE, Problem(code="other", key="k", what="w")])
    assert isinstance(error, ValueError)
    assert isinstance(error, RlplaceError)
    assert error.codes == ("accelerator-out-of-range", "other")
    assert str(error).count("[") == 2


def test_an_error_without_a_problem_is_our_bug() -> None:
    with pytest.raises(AssertionError):
        ProblemsError([])


@pytest.mark.parametrize("kind", [ConfigError, PlacementError])
def test_collected_problems_can_be_pickled(kind: type[ProblemsError]) -> None:
    again = pickle.loads(pickle.dumps(kind([OUT_OF_RANGE])))
    assert type(again) is kind
    assert again.problems == (OUT_OF_RANGE,)


@pytest.mark.parametrize("kind", [ChannelTimeout, EndOfStream, AcceleratorOutOfMemory, OutputError])
def test_errors_of_one_problem_can_be_pickled(kind: type[ChannelTimeout]) -> None:
    again = pickle.loads(pickle.dumps(kind(OUT_OF_RANGE)))
    assert type(again) is kind
    assert again.code == "accelerator-out-of-range"
    assert str(again) == OUT_OF_RANGE.render()


def test_a_channel_deadline_is_a_timeout() -> None:
    assert issubclass(ChannelTimeout, TimeoutError)


def a_worker_error() -> WorkerError:
    return WorkerError(
        component="actor",
        rank=3,
        node=1,
        accelerators=(6, 7),
        method="learn",
        what="loss is nan",
        remote_traceback="Traceback\n  line 1\n",
        cause=ValueError("loss is nan"),
    )


def test_a_worker_error_names_the_place_and_shows_the_remote_traceback() -> None:
    assert str(a_worker_error()) == (
        "actor rank 3 (node 1, accelerators 6,7): learn failed: loss is nan\n"
        "  on the worker:\n"
        "    Traceback\n"
        "      line 1"
    )


def test_a_worker_error_gains_stage_and_version_and_keeps_the_rest() -> None:
    error = a_worker_error()
    error.add_note("seen twice")
    later = error.at(stage="learn", version=7)
    assert str(later).startswith("actor rank 3 (node 1, accelerators 6,7, stage learn, policy version 7): learn failed")
    assert later.cause is error.cause
    assert later.remote_traceback == error.remote_traceback


def test_a_worker_error_can_be_pickled() -> None:
    again = pickle.loads(pickle.dumps(a_worker_error().at(stage="learn", version=0)))
    assert str(again) == str(a_worker_error().at(stage="learn", version=0))
    assert (again.rank, again.version, again.accelerators) == (3, 0, (6, 7))


@pytest.mark.parametrize(
    ("number", "code", "what"),
    [
        (errno.ENOSPC, "disk-full", "the disk is full"),
        (errno.EDQUOT, "disk-full", "the disk is full"),
        (errno.EACCES, "cannot-write", "cannot write: no"),
    ],
)
def test_an_output_error_names_the_file_and_the_space_left(tmp_path: Path, number: int, code: str, what: str) -> None:
    file = tmp_path / "not" / "there" / "metrics.jsonl"
    error = OutputError.of(file, OSError(number, "no"))
    assert error.code == code
    assert error.problem.what == what
    assert error.problem.got == str(file)
    assert error.problem.why is not None
    assert error.problem.why.endswith(f" bytes are free in {tmp_path}")


@pytest.mark.parametrize(
    ("word", "near"), [("acter", "actor"), ("rolout", "rollout"), ("gama", "gamma"), ("zzz", None), ("", None)]
)
def test_the_nearest_word_is_offered_only_when_near(word: str, near: str | None) -> None:
    assert did_you_mean(word, ["actor", "rollout", "gamma"]) == near

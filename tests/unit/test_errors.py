"""The text of errors, and that they survive pickling between processes."""

from __future__ import annotations

import dataclasses
import errno
import pickle
from pathlib import Path

import pytest

import rlplace
from rlplace.errors import (
    COMMAND_LINE,
    AcceleratorOutOfMemory,
    ChannelTimeout,
    ConfigError,
    OutputError,
    Problem,
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


def test_a_problem_has_only_the_lines_that_are_known() -> None:
    source = Source(file="command line")
    assert Problem(code="c", key="k", what="w").render().split() == ["k:", "w", "[c]"]
    assert Problem(code="c", key="k", what="w", source=source).render().splitlines()[
        1:
    ] == ["     at: command line"]
    text = Problem(code="c", key="k", what="w", got="a\nb", fix="x\ny").render()
    assert text.splitlines()[1:] == [
        "    got: a",
        "         b",
        "    fix: x",
        "         y",
    ]


@pytest.mark.parametrize(
    ("span", "carets"), [((0, 3), "^^^"), ((1, 2), " ^"), ((2, 2), "  ^")]
)
def test_the_caret_marks_the_piece(span: tuple[int, int], carets: str) -> None:
    text = Problem(code="c", key="k", what="w", got="0-8", span=span).render()
    assert text.splitlines()[2] == " " * len("    got: ") + carets


def test_another_key_of_a_component_is_a_word_of_the_command_line() -> None:
    key, source = (
        "cluster.component_placement.rollout.placement",
        Source(file="command line: x"),
    )
    problem = Problem(
        code="c", key=key, what="w", fix="accelerators_per_rank: 2", source=source
    )
    assert (
        problem.pasted == "cluster.component_placement.rollout.accelerators_per_rank=2"
    )


@pytest.mark.parametrize(
    ("fix", "pasted"),
    [
        ("actor: 0-7        (or: actor: all)", "a.b.actor=0-7        (or: actor: all)"),
        ("actor: part 1/2 of 8", "'a.b.actor=part 1/2 of 8'"),
        ("actor: 0-3,5-7", "'a.b.actor=\"0-3,5-7\"'"),
        ('actor: say "a"', """'a.b.actor="say \\"a\\""'"""),
        ("actor: {same_as: env}", "'a.b.actor={same_as: env}'"),
        ("one of\nactor: 1\nactor: 2", "one of\na.b.actor=1\na.b.actor=2"),
        ("c.actor: true        (a line without indent, in place of x)", "c.actor=true"),
        ("or: c.actor: true", "or: c.actor=true"),
        ("actor: <a number, such as 1>", "a.b.actor=<a number, such as 1>"),
        ("env: 3", "env: 3"),
        ("sibling: 3", "sibling: 3"),  # of which block is not known
        ("actor: 3, and env: 4", "actor: 3, and env: 4"),
        ("remove actor", "remove actor"),
    ],
)
def test_a_fix_of_what_the_command_line_gave_is_a_word_for_it(
    fix: str, pasted: str
) -> None:
    problem = Problem(
        code="c",
        key="a.b.actor",
        what="w",
        fix=fix,
        source=Source(file="command line: a.b.actor=9"),
    )
    assert problem.pasted == pasted
    assert problem.render().endswith("    fix: " + pasted.replace("\n", "\n" + " " * 9))
    assert (
        dataclasses.replace(problem, source=Source(file="a.yaml", line=1)).pasted == fix
    )
    assert dataclasses.replace(problem, key="a.b.actor[1]").pasted == pasted


@pytest.mark.parametrize(
    "error",
    [
        ConfigError([OUT_OF_RANGE]),
        ChannelTimeout(OUT_OF_RANGE),
        AcceleratorOutOfMemory(OUT_OF_RANGE, 3, 5),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_can_be_pickled(error: RlplaceError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert vars(again) == vars(error)
    assert str(again) == OUT_OF_RANGE.render()


FAILED = WorkerError(
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
    assert str(FAILED) == (
        "actor rank 3 (node 1, accelerators 6,7): learn failed: loss is nan\n"
        "  on the worker:\n"
        "    Traceback\n"
        "      line 1"
    )


def test_a_good_sentence_of_a_worker_stands_once() -> None:
    """Frames of our own files say no more than it; those of the user's files do."""
    ours = Path(rlplace.__file__).parent / "workers" / "roles" / "env.py"
    text = OUT_OF_RANGE.render()
    failed = dataclasses.replace(
        FAILED,
        what=text,
        cause=ChannelTimeout(OUT_OF_RANGE),
        remote_traceback=(
            "Traceback (most recent call last):\n"
            f'  File "{ours}", line 332, in setup\n    group.begin(seed)\n'
            f"rlplace.errors.ChannelTimeout: {text}\n"
        ),
    )
    assert str(failed) == (
        f"actor rank 3 (node 1, accelerators 6,7): learn failed: {text}"
    )
    theirs = str(failed.remote_traceback).replace(str(ours), "/home/own/reward.py")
    shown = str(dataclasses.replace(failed, remote_traceback=theirs))
    assert shown.count(text.splitlines()[0]) == 1
    assert "/home/own/reward.py" in shown
    assert shown.endswith("group.begin(seed)")


def test_a_worker_error_gains_stage_and_version_or_a_cause_and_keeps_the_rest() -> None:
    later = FAILED.at(stage="learn", version=0)
    assert str(later).startswith(
        "actor rank 3 (node 1, accelerators 6,7, stage learn, policy version 0): learn failed"
    )
    assert later.cause is FAILED.cause
    again = pickle.loads(pickle.dumps(later))
    assert str(again) == str(later)
    assert (again.rank, again.version, again.accelerators) == (3, 0, (6, 7))
    cause = ChannelTimeout(OUT_OF_RANGE)
    explained = FAILED.explained_by(cause)
    assert (explained.cause, explained.__cause__, explained.what) == (
        cause,
        cause,
        str(cause),
    )


@pytest.mark.parametrize(
    ("number", "code", "what"),
    [
        (errno.ENOSPC, "disk-full", "the disk is full"),
        (errno.EDQUOT, "disk-full", "the disk is full"),
        (errno.EACCES, "cannot-write", "cannot write: no"),
    ],
)
def test_an_output_error_names_the_file_and_the_space_left(
    tmp_path: Path, number: int, code: str, what: str
) -> None:
    file = tmp_path / "not" / "there" / "metrics.jsonl"
    error = OutputError.of(file, OSError(number, "no"))
    assert (error.code, error.problem.what, error.problem.got) == (
        code,
        what,
        str(file),
    )
    assert (error.problem.why or "").endswith(f" bytes are free in {tmp_path}")


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("acter", "actor"),
        ("rolout", "rollout"),
        ("gama", "gamma"),
        ("zzz", None),
        ("", None),
    ],
)
def test_the_nearest_word_is_offered_only_when_near(
    word: str, near: str | None
) -> None:
    assert did_you_mean(word, ["actor", "rollout", "gamma"]) == near


def test_a_remark_behind_a_fix_is_no_part_of_the_word_to_paste() -> None:
    fix = "actor.lora_rank: 16        saves 2 GiB; costs: less\nor: a.b: {placement: 0-7, size: 2}        costs: more"
    problem = Problem(
        code="does-not-fit",
        key="c.d",
        what="w",
        fix=fix,
        source=Source(file=f"{COMMAND_LINE}c.d=all"),
    )
    assert problem.pasted == (
        "actor.lora_rank=16        saves 2 GiB; costs: less\nor: 'a.b={placement: 0-7, size: 2}'        costs: more"
    )


@pytest.mark.parametrize(
    ("file", "pasted"),
    [
        ("mine.yaml", "every: 1        (or remove the line)"),
        (f"{COMMAND_LINE}a.every=2", "a.every=1        (or remove the line)"),
        # A shipped file is not edited
        (
            str(Path(rlplace.__file__).parent.parent / "configs/sac.yaml"),
            "a.every=1        (or remove the line)",
        ),
    ],
)
def test_overrides_of_a_fix_are_config_lines_in_a_file(file: str, pasted: str) -> None:
    problem = Problem(
        code="c",
        key="a.every",
        what="w",
        fix="a.every=1        (or remove the line)",
        source=Source(file=file),
    )
    assert problem.pasted == pasted


def test_several_overrides_of_a_fix_are_several_lines_in_a_file() -> None:
    problem = Problem(
        code="c",
        key="a.every",
        what="w",
        fix="a.every=1 b.wrappers=[{name: x, kwargs: {}}]",
        source=Source(file="mine.yaml", line=3),
    )
    assert problem.pasted == "every: 1\nb.wrappers: [{name: x, kwargs: {}}]"
    # Words behind a value
    words = dataclasses.replace(problem, fix="a.every=1 does it")
    assert words.pasted == words.fix


def test_a_name_inside_a_typed_list_is_corrected_where_it_stands() -> None:
    problem = Problem(
        code="c",
        key="env.wrappers[0].name",
        what="w",
        got="a:Clp",
        fix="name: a:Clip",
        source=Source(
            file=f"{COMMAND_LINE}env.wrappers=[{{name: a:Clp, kwargs: {{}}}}]"
        ),
    )
    assert problem.pasted == "'env.wrappers=[{name: a:Clip, kwargs: {}}]'"
    # Twice in it: not clear which one
    twice = f"{COMMAND_LINE}env.wrappers=[{{name: a:Clp}}, {{name: a:Clp}}]"
    unclear = dataclasses.replace(problem, source=Source(file=twice))
    assert unclear.pasted == problem.fix


@pytest.mark.parametrize("typed", ["'no'", '"no"', "no"])
def test_a_text_inside_a_typed_block_is_corrected_with_its_quotes(typed: str) -> None:
    problem = Problem(
        code="c",
        key="env.kwargs.slippery",
        what="w",
        got='slippery: "no"',
        fix="slippery: false",
        source=Source(file=f"{COMMAND_LINE}env.kwargs={{slippery: {typed}, size: 4}}"),
    )
    assert problem.pasted == "'env.kwargs={slippery: false, size: 4}'"


def test_keys_of_items_and_arguments_are_typed_with_their_path() -> None:
    item = Problem(
        code="c",
        key="cluster.nodes[0].host_memory",
        what="w",
        fix="host_memory: 2MiB",
        source=Source(file=f"{COMMAND_LINE}cluster.nodes.0.host_memory=2"),
    )
    assert item.pasted == "cluster.nodes.0.host_memory=2MiB"
    argument = dataclasses.replace(
        item,
        key="env.kwargs.wdth",
        fix="width: 3",
        source=Source(file=f"{COMMAND_LINE}env.kwargs.wdth=3"),
    )
    assert argument.pasted == "env.kwargs.width=3"

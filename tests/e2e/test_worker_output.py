"""What workers print: a file per rank in the run's folder, named by the errors of that rank."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.training import (
    INLINE,
    INLINE_LAUNCHER,
    SMALL,
    Finished,
    finish,
    placed,
    start,
    train,
)

TALKS = (
    "env.id=tests.gyms:Talks-v0",
    "algorithm.rollout_steps=8",
    "runner.total_iterations=1",
)
SAID = ("a simulator prints", "a simulator logs", "a simulator writes")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((*INLINE, *placed("0", "0-1", "1")), id="inline"),
        pytest.param(
            (*SMALL, *placed("0", "0-1", "1")),
            id="forks",
            marks=[pytest.mark.ray, pytest.mark.slow],
        ),
        pytest.param(
            (*SMALL, *placed("0", "0-1", "1"), "cluster.ray.start=plain"),
            id="plain",
            marks=[pytest.mark.ray, pytest.mark.slow],
        ),
    ],
)
def failed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[tuple[str, ...], Finished]:
    """How a run was launched, and the run: simulators speak when they are made and fail in their fourth step."""
    output = tmp_path_factory.mktemp("runs")
    words = (*request.param, *TALKS, "+env.kwargs.fails_at=3", "faults.restarts=0")
    return request.param, finish(start("hybrid_ppo", output, *words), output)


def test_what_a_rank_prints_is_in_its_own_file(
    failed: tuple[tuple[str, ...], Finished],
) -> None:
    launch, run = failed
    assert run.folder is not None, run.err
    logs = run.folder / "logs"
    assert {file.name for file in logs.iterdir()} == {
        "actor-0.txt",
        "env-0.txt",
        "env-1.txt",
        "rollout-0.txt",
    }
    texts = [(logs / f"env-{rank}.txt").read_text(encoding="utf-8") for rank in (0, 1)]
    for rank, text in enumerate(texts):
        assert text.startswith(f"# env rank {rank}, process ")
        # What is not Python's is on the console of a process that has threads of its own.
        assert [text.count(line) for line in SAID] == [
            8,
            8,
            0 if INLINE_LAUNCHER in launch else 8,
        ]
    assert "UserWarning: a simulator warns" in "".join(texts), (
        "once in each process, in one thread of it"
    )
    others = (logs / "rollout-0.txt").read_text(encoding="utf-8")
    assert not [line for line in (*SAID, "a simulator warns") if line in others]
    assert run.out.count(SAID[0]) == 1, "the driver makes one to see its spaces"
    assert "what workers print: logs/" in run.out


def test_an_error_names_the_file_which_has_its_traceback(
    failed: tuple[tuple[str, ...], Finished],
) -> None:
    _, run = failed
    assert run.code == 1
    assert run.folder is not None
    named = re.search(r"^  its output: (.*)$", run.err, re.MULTILINE)
    assert named is not None
    assert Path(named[1]).parent == run.folder / "logs"
    text = Path(named[1]).read_text(encoding="utf-8")
    assert "Traceback" in text
    assert "ValueError: a simulator fails" in text


@pytest.mark.slow
def test_a_breakpoint_has_the_console(tmp_path: Path) -> None:
    stops = ("+env.kwargs.breaks=true", "cluster.component_placement.env=0")
    own = {
        name: value for name, value in os.environ.items() if name != "PYTHONBREAKPOINT"
    }  # Ray sets it in a driver
    options: dict[str, Any] = {"stdin": subprocess.PIPE, "env": own}
    process = start(
        "hybrid_ppo",
        tmp_path,
        *INLINE,
        *placed("0", "0", "1"),
        *TALKS,
        *stops,
        **options,
    )
    out, err = process.communicate("self._step\ncontinue\n", timeout=120)
    assert process.returncode == 0, err
    assert "(Pdb) " in out
    assert "\n0\n" in out.replace("(Pdb) ", "\n"), (
        "another thread may print after the prompt"
    )


def test_a_run_that_succeeds_has_the_files_of_its_ranks_and_gives_the_streams_back(
    tmp_path: Path,
) -> None:
    before = sys.stdout, sys.stderr
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:  # it is not an error of the run
        run = train("hybrid_ppo", tmp_path, *INLINE, *placed("0", "0-1", "1"), *TALKS)
    assert (sys.stdout, sys.stderr) == before
    assert run.code == 0, run.err
    assert run.folder is not None
    assert run.summary()["state"] == "finished"
    logs = run.folder / "logs"
    assert {file.name for file in logs.iterdir()} == {
        "actor-0.txt",
        "env-0.txt",
        "env-1.txt",
        "rollout-0.txt",
    }
    for rank in (0, 1):
        assert SAID[0] in (logs / f"env-{rank}.txt").read_text(encoding="utf-8")

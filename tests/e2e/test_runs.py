"""How runs end: their last line names the policy and plays it; `python -m rlplace.runs` lists them."""

from __future__ import annotations

import json
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from rlplace.checkpoints.store import LOCK, lock
from rlplace.cli import evaluate
from rlplace.cli.runs import folders, main, read, render
from rlplace.report.record import CONFIG
from rlplace.report.typed import SCREEN, commands
from rlplace.workers.roles.rollout import VectorRolloutWorker
from tests.e2e.training import INLINE, Finished, placed, train
from tests.gyms import Script

JOB = (
    *INLINE,
    *placed("0", "0", "0"),
    "env.id=tests.gyms:Script-v0",
    "env.max_episode_steps=5",
)
STEPS = 16 * 16  # of an iteration


def run_of(output: Path, *overrides: str) -> Finished:
    return train("hybrid_ppo", output, *JOB, "runner.total_iterations=3", *overrides)


def played(
    text: str, run: Finished, saved: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last lines name what was saved, and their command can be pasted."""
    assert f"policy {run.folder}/{saved} evaluate " in " ".join(text.split())
    command = text.partition("evaluate   python -m rlplace.evaluate ")[2]
    words = shlex.split(command.replace("\\\n", " "))
    assert words == [str(run.folder)]
    assert evaluate.main([*words, "episodes=2"]) == 0
    assert "Script-v0" in capsys.readouterr().out


def listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main([str(folder), "--format", "json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_a_run_that_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "a b")
    played(run.out, run, "policy.safetensors", capsys)
    (found,) = listed(tmp_path / "a b", capsys)
    assert (found["config"], found["state"], found["iterations"]) == (
        "hybrid_ppo",
        "finished",
        3,
    )
    assert (found["best"], found["last"]) == (15.0, 15.0)
    assert found["seconds"] == run.summary()["wall_s"]
    assert listed(run.folder or tmp_path, capsys) == [found]
    assert main([str(tmp_path / "a b")]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == [
        "folder",
        "config",
        "state",
        "iterations",
        "best",
        "last",
        "seconds",
        "overrides",
    ]
    assert row.removeprefix(str(run.folder)).split()[:5] == [
        "hybrid_ppo",
        "finished",
        "3",
        "15.0",
        "15.0",
    ]
    assert run.folder is not None
    (command,) = commands(run.folder)
    assert command["typed"].startswith(
        "python -m rlplace.train --config-name hybrid_ppo"
    )
    assert "env.max_episode_steps=5" in command["overrides"]
    assert command["machine"]["accelerators"] == ["4 emulated"]
    assert {"rlplace", "python", "torch"} <= set(command["versions"])
    assert (run.folder / SCREEN).read_text(encoding="utf-8") == run.out
    with lock(run.folder):
        assert [each["state"] for each in listed(run.folder.parent, capsys)] == [
            "running"
        ]
    assert [each["state"] for each in listed(run.folder, capsys)] == ["failed"], (
        "resumed, and killed before its end"
    )


def test_a_run_that_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decide, calls = VectorRolloutWorker._decide, list[None]()

    def stopping(self: VectorRolloutWorker, *arguments: Any) -> Any:
        calls.append(None)
        if len(calls) == 40:  # in the second iteration
            os.kill(os.getpid(), signal.SIGTERM)
        return decide(self, *arguments)

    monkeypatch.setattr(VectorRolloutWorker, "_decide", stopping)
    run = run_of(tmp_path, "runner.total_iterations=1000")
    assert run.code == 128 + signal.SIGTERM
    lines = run.err.splitlines()
    assert "stopped by SIGTERM" in lines
    played(run.err, run, "policy.safetensors", capsys)
    (found,) = listed(tmp_path, capsys)
    assert (found["state"], found["iterations"]) == (
        "stopped",
        run.summary()["iterations"],
    )


def test_a_run_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step, calls = Script.step, list[None]()

    def failing(self: Script, action: Any) -> Any:
        calls.append(None)
        assert len(calls) < 2.5 * STEPS, "a bug"
        return step(self, action)

    with monkeypatch.context() as patched:
        patched.setattr(Script, "step", failing)
        run = run_of(tmp_path)
    assert run.code == 1
    assert "a bug" in run.err
    played(run.err, run, "checkpoints/000002", capsys)
    (found,) = listed(tmp_path, capsys)
    assert (found["state"], found["iterations"]) == ("failed", 2)


def test_a_run_that_has_saved_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path, "env.id=tests.gyms:Poisoned-v0")
    assert run.code == 1
    assert (
        run.err.splitlines()[-1]
        == "policy     none: the run ended before it had saved one"
    )
    (found,) = listed(tmp_path, capsys)
    assert (found["state"], found["iterations"], found["best"]) == ("failed", 0, None)
    assert run.folder is not None
    (run.folder / "summary.json").unlink()
    (run.folder / "metrics.jsonl").write_text('{"iterat', encoding="utf-8")
    assert [each["state"] for each in listed(tmp_path, capsys)] == ["not started"]


def test_rows_show_what_runs_of_one_config_differ_by(tmp_path: Path) -> None:
    for number, words in enumerate(
        (["seed=0", "lr=1"], ["seed=1", "lr=1"], ["seed=0", "lr=1"])
    ):
        run = (
            tmp_path
            / ("other" if number == 2 else "pole")
            / f"2026-01-0{number + 1}_00-00-00"
        )
        run.mkdir(parents=True)
        for name, text in (
            (CONFIG, ""),
            (LOCK, ""),
            ("command.json", json.dumps([{"overrides": words}])),
        ):
            (run / name).write_text(text, encoding="utf-8")
    rows = render(
        [read(run) for run in sorted(folders(tmp_path), key=lambda run: run.name)]
    ).splitlines()
    assert [row.split()[-1] for row in rows] == ["overrides", "seed=0", "seed=1", "0"]


def test_runs_of_a_sweep_in_a_folder_of_its_own(tmp_path: Path) -> None:
    run = tmp_path / "sweep" / "pole" / "2026-01-01_00-00-00"
    for folder in (run, run / "checkpoints"):  # a run is not looked into
        folder.mkdir(parents=True)
        (folder / CONFIG).touch()
        (folder / LOCK).touch()
    assert list(folders(tmp_path)) == [run]


def test_where_there_are_no_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, code in (
        ([str(tmp_path)], "not-a-run"),
        ([str(tmp_path / "x")], "not-a-run"),
    ):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert f"[{code}]" in error
        assert "fix: " in error
    assert main([str(tmp_path), "--format", "jsno"]) == 2
    assert "fix: --format json" in capsys.readouterr().err

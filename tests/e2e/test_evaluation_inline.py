"""Evaluations of runs that train a language model: which rows they ask, and which version they are of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.language import INLINE, tiny
from tests.e2e.training import Finished, train

ROWS = 30


def write_rows(file: Path, name: str, rows: int) -> Path:
    lines = [
        json.dumps({"prompt": f"{name} {row}", "answer": "a"}) for row in range(rows)
    ]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def run_on_rows(model: Path, folder: Path, *overrides: str) -> Finished:
    """A run on 40 rows, with a held-out set of 30 others."""
    rows = write_rows(folder / "train.jsonl", "train", 40)
    held_out = write_rows(folder / "test.jsonl", "test", ROWS)
    run = train(
        "hybrid_grpo_llm",
        folder / "runs",
        *INLINE,
        *tiny(model),
        "env.task=prompts",
        f"+env.kwargs={{path: {rows}}}",
        f"env.eval_kwargs={{path: {held_out}}}",
        "env.rewards=[{name: tests.e2e.text_tasks:share_of_small_letters}]",
        "env.chat=false",
        "rollout.seed=0",
        *overrides,
    )
    assert run.code == 0, run.err
    return run


def answers(run: Finished) -> list[Any]:
    """The answers of training that the run has kept, in order."""
    assert run.folder is not None
    lines = (run.folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def evaluated(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return run_on_rows(
        model,
        tmp_path_factory.mktemp("evaluated"),
        "runner.total_iterations=5",
        "runner.eval_every=2",
        "checkpoint.every=1",
        "checkpoint.keep_last=9",
    )


def test_each_row_counts_once(evaluated: Finished) -> None:
    found = [line for line in evaluated.metrics() if "eval/reward" in line]
    assert [line["eval/episodes"] for line in found] == [ROWS] * 4


def test_more_prompts_than_there_are_is_said_in_the_plan(
    model: Path, tmp_path: Path
) -> None:
    asked = ("dry_run=true", "runner.eval_every=1", "runner.eval_prompts=64")
    planned = run_on_rows(model, tmp_path, *asked)
    said = f"there are {ROWS} held-out prompts: each is asked once"
    assert planned.out.count(said) == 1


def test_an_evaluation_is_in_the_line_of_its_version(evaluated: Finished) -> None:
    lines = evaluated.metrics()
    by_version = {
        str(line["iteration"]): line["eval/reward"]
        for line in lines
        if "eval/reward" in line
    }
    assert by_version == evaluated.summary()["evaluations"]
    assert list(by_version) == ["0", "2", "4", "5"]
    assert all(line["policy/version"] == line["iteration"] for line in lines)


def test_a_checkpoint_has_the_score_of_its_own_version(evaluated: Finished) -> None:
    assert evaluated.folder is not None
    scores = {}
    for manifest in sorted(evaluated.folder.glob("checkpoints/*/manifest.json")):
        kept = json.loads(manifest.read_text(encoding="utf-8"))
        scores[str(kept["iteration"])] = kept["score"]
    evaluations = evaluated.summary()["evaluations"]
    expected = {str(n): evaluations.get(str(n)) for n in range(1, 6)}
    assert scores == expected


def test_an_evaluation_changes_nothing_of_the_training(
    evaluated: Finished, model: Path, tmp_path: Path
) -> None:
    plain = run_on_rows(
        model, tmp_path, "runner.total_iterations=5", "runner.eval_every=0"
    )
    assert answers(evaluated) == answers(plain)
    # The engine batches by the clock, which changes the order of floating-point sums.
    for name in ("actor/reward", "actor/grad_norm", "actor/entropy"):
        with_evaluation = [line[name] for line in evaluated.metrics()[1:]]
        alone = [line[name] for line in plain.metrics()]
        assert with_evaluation == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
def test_a_resumed_run_does_not_evaluate_a_version_twice(
    model: Path, tmp_path: Path
) -> None:
    first = run_on_rows(
        model, tmp_path, "runner.total_iterations=2", "runner.eval_every=1"
    )
    again = run_on_rows(
        model,
        tmp_path,
        "runner.total_iterations=3",
        "runner.eval_every=1",
        f"resume={first.folder}",
    )
    lines = [line["iteration"] for line in again.metrics()]
    assert lines == [0, 1, 2, 3]
    assert list(again.summary()["evaluations"]) == ["0", "1", "2", "3"]


def test_a_run_stops_where_the_evaluation_has_reached_its_goal(
    model: Path, tmp_path: Path
) -> None:
    run = run_on_rows(
        model,
        tmp_path,
        "runner.total_iterations=9",
        "runner.eval_every=2",
        "+runner.stop_at_eval=0.0",
    )
    assert [line["iteration"] for line in run.metrics()] == [0]
    assert "stopped: the evaluation has reached 0" in run.out


def test_a_run_stops_after_evaluations_without_gain(
    model: Path, tmp_path: Path
) -> None:
    """All answers have one reward, so all evaluations are equal."""
    run = run_on_rows(
        model,
        tmp_path,
        "runner.total_iterations=9",
        "runner.eval_every=1",
        "+runner.eval_patience=2",
        "env.rewards=[{name: tests.e2e.text_tasks:half}]",
    )
    assert [line["iteration"] for line in run.metrics()] == [0, 1, 2]
    assert "the best is of version 0" in run.out


def test_training_rows_in_another_form_are_counted(model: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": f"train {n}"}], "answer": "a"}
        for n in range(20, 50)
    ]
    # No row for training has a system message
    rows[0]["prompt"].insert(0, {"role": "system", "content": "Be short."})
    other = tmp_path / "messages.jsonl"
    other.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    plan = run_on_rows(
        model,
        tmp_path,
        f"env.eval_kwargs={{path: {other}}}",
        "env.system=null",
        "env.chat=true",
        "runner.eval_every=1",
        "dry_run=true",
    )
    assert "[held-out-in-training]" in plan.out + plan.err
    assert "19 of 30 held-out prompts are trained on" in plan.out + plan.err

"""Evaluations of runs on simulators: of whole episodes, by the likeliest actions, and of no influence on training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlplace.cli.evaluate import main
from tests.e2e.test_resume import numbers
from tests.e2e.training import INLINE, ONE_RANK_EACH, Finished, placed, train

EVALUATED = (
    *INLINE,
    "env.id=CartPole-v1",
    "runner.stop_at_return=null",
    "runner.total_iterations=4",
    "+runner.eval_every=2",
    "+runner.eval_episodes=5",
    "checkpoint.every=1",
    "checkpoint.keep_best=1",
)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    run = train(
        "hybrid_ppo",
        tmp_path_factory.mktemp("evaluated"),
        *EVALUATED,
        *placed("0", "0", "1"),
        "checkpoint.keep_last=9",
    )
    assert run.code == 0, run.err
    return run


def test_evaluations_are_in_the_metrics_and_on_the_screen(evaluated: Finished) -> None:
    lines = evaluated.metrics()
    found = {
        str(line["iteration"]): line["eval/return"]
        for line in lines
        if "eval/return" in line
    }
    assert found == evaluated.summary()["evaluations"]
    assert list(found) == ["0", "2", "4"]
    assert all(line["eval/episodes"] == 5 for line in lines if "eval/return" in line)
    assert "evaluated" in evaluated.out


def test_the_command_finds_the_same_returns(
    evaluated: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (str(evaluated.folder), "episodes=5", "seed=0", "--format", "json")
    assert main(list(words)) == 0
    found = json.loads(capsys.readouterr().out)
    last = evaluated.summary()["evaluations"]["4"]
    assert found["return"]["mean"] == pytest.approx(last)


def test_episodes_of_an_evaluation_depend_on_its_own_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(
        "hybrid_ppo",
        tmp_path,
        *EVALUATED,
        *placed("0", "0", "1"),
        "runner.total_iterations=1",
        "runner.eval_every=1",
        "runner.seed=5",
        "+env.eval_seed=3",
    )
    assert run.code == 0, run.err
    means: dict[int, float] = {}
    for seed in (0, 3, 5):
        words = [str(run.folder), "episodes=5", f"seed={seed}", "--format", "json"]
        assert main(words) == 0
        means[seed] = json.loads(capsys.readouterr().out)["return"]["mean"]
    last = run.summary()["evaluations"]["1"]
    assert means[3] == pytest.approx(last)
    assert last not in (means[0], means[5])


def test_every_evaluation_plays_the_same_episodes(tmp_path: Path) -> None:
    """The policy does not change with this rate, so only other episodes could have other returns."""
    run = train(
        "hybrid_ppo",
        tmp_path,
        *EVALUATED,
        *placed("0", "0", "1"),
        "actor.optimizer.lr=1.0e-30",
        "algorithm.normalize_observations=false",
    )
    assert run.code == 0, run.err
    found = list(run.summary()["evaluations"].values())
    assert len(found) == 3
    assert len(set(found)) == 1


def test_evaluations_change_nothing_of_the_training(
    evaluated: Finished, tmp_path: Path
) -> None:
    without = (each for each in EVALUATED if "eval_" not in each)
    plain = train("hybrid_ppo", tmp_path, *without, *placed("0", "0", "1"))
    trained = [
        {name: value for name, value in line.items() if not name.startswith("eval/")}
        for line in numbers(evaluated)[1:]
    ]
    assert trained == numbers(plain)


def test_evaluations_do_not_depend_on_the_placement(
    evaluated: Finished, tmp_path: Path
) -> None:
    where = placed(*ONE_RANK_EACH["collocated_ppo"])
    run = train("collocated_ppo", tmp_path, *EVALUATED, *where)
    assert run.code == 0, run.err
    evaluations = evaluated.summary()["evaluations"]
    assert run.summary()["evaluations"]["0"] == evaluations["0"]


def test_the_best_version_is_kept_by_its_evaluation(evaluated: Finished) -> None:
    assert evaluated.folder is not None
    scores = {}
    for manifest in sorted(evaluated.folder.glob("checkpoints/*/manifest.json")):
        kept = json.loads(manifest.read_text(encoding="utf-8"))
        scores[str(kept["iteration"])] = kept["score"]
    evaluations = evaluated.summary()["evaluations"]
    assert scores == {str(n): evaluations.get(str(n)) for n in range(1, 5)}


def test_statistics_that_are_in_env_alone_are_refused(tmp_path: Path) -> None:
    wrapper = "+env.wrappers=[{name: gymnasium.wrappers:NormalizeObservation}]"
    run = train("hybrid_ppo", tmp_path, *EVALUATED, *placed("0", "0", "1"), wrapper)
    assert run.code == 2
    code = "not-evaluated-in-training"
    assert f"[{code}]" in run.err
    assert "normalize_observations" in run.err


def test_simulators_of_an_evaluation_need_room_on_the_accelerator(
    tmp_path: Path,
) -> None:
    room = ("env.accelerator_memory=700MiB", "cluster.accelerator.memory=1GiB")
    words = (*EVALUATED, *room, *placed("0", "0", "0"), "dry_run=true")
    run = train("hybrid_ppo", tmp_path, *words)
    assert run.code == 3
    assert "simulator 700 MiB" in run.out + run.err
    # Those of the training alone fit
    run = train("hybrid_ppo", tmp_path, *words, "++runner.eval_every=0")
    assert run.code == 0, run.err

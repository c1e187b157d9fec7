"""Whole runs of a vision-language-action policy: through all stages, from a folder, resumed, evaluated, in chunks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlplace.cli.evaluate import main as evaluate
from rlplace.cli.export import main as export
from tests.e2e.training import INLINE_LAUNCHER, Finished, train
from tests.tiny_openvla import tiny_openvla
from tests.tiny_smolvla import tiny_smolvla
from tests.tiny_vlm import tiny_smolvlm

SMALL = (
    INLINE_LAUNCHER,
    "env.total_num_envs=4",
    "env.kwargs={pixels: 16}",
    "algorithm.rollout_steps=8",
    "algorithm.epochs=1",
    "algorithm.num_minibatches=2",
    "checkpoint.every=1",
)
NET = (
    "actor.model.width=16",
    "actor.model.heads=2",
    "actor.model.layers=1",
    "actor.model.patch=4",
)


def learn(output: Path, *overrides: str) -> Finished:
    run = train("vla_reach", output, *SMALL, *NET, *overrides)
    assert run.code == 0, run.err + run.out
    return run


@pytest.mark.slow
def test_a_resumed_run_goes_on_to_the_same_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = learn(tmp_path / "whole", "runner.total_iterations=2")
    learn(tmp_path / "cut", "runner.total_iterations=1")
    resumed = learn(tmp_path / "cut", "runner.total_iterations=2", "resume=auto")
    names = (
        "actor/policy_loss",
        "actor/value_loss",
        "actor/entropy",
        "actor/grad_norm",
    )
    last = whole.metrics()[-1]
    assert [last[name] for name in names] == [
        resumed.metrics()[-1][name] for name in names
    ]
    # Rollout and learner agree on the probability of what was done
    assert all(row["actor/mismatch"] < 1e-5 for row in whole.metrics())
    capsys.readouterr()
    assert evaluate([str(whole.folder), "episodes=4", "--format", "json"]) == 0
    assert 0 <= json.loads(capsys.readouterr().out)["return"]["mean"] <= 1
    # A recorded pass would have the words of one instruction in it
    assert export([str(whole.folder), str(tmp_path / "policy.pt")]) == 2
    assert "words become numbers outside of the network" in capsys.readouterr().err


@pytest.mark.slow  # tests/unit/models/test_vla.py reads a folder
def test_chunks_of_a_model_from_a_folder(tmp_path: Path) -> None:
    """The folder's image size differs from that of the camera."""
    folder = tiny_smolvlm(tmp_path / "model", side=8)
    run = learn(
        tmp_path / "runs",
        f"actor.model.path={folder}",
        "actor.model.instruction_tokens=8",
        "rollout.action_chunk=2",
        "runner.total_iterations=1",
    )
    (row,) = run.metrics()
    assert (row["env/steps"], row["actor/samples"]) == (4 * 8 * 2, 4 * 8)
    assert row["actor/mismatch"] < 1e-5


def test_words_that_are_not_listed_are_refused_before_the_start(tmp_path: Path) -> None:
    """Instructions of other episodes count, too: the first one has no `go` and no `to`."""
    words = "actor.model.words=[reach, the, red]"
    run = train("vla_reach", tmp_path, *SMALL, *NET, words)
    assert run.code == 2
    assert run.folder is None
    fix = "actor.model.words=[reach, the, red, square, go, to]"
    assert f"fix: '{fix}'" in run.err
    assert train("vla_reach", tmp_path, *SMALL, *NET, fix, "dry_run=true").code == 0


def test_a_longer_instruction_is_refused_before_the_start(tmp_path: Path) -> None:
    words = "actor.model.instruction_tokens=3"
    run = train("vla_reach", tmp_path, *SMALL, *NET, words)
    assert run.code == 2
    assert "fix: actor.model.instruction_tokens=4" in run.err


@pytest.mark.slow  # tests/contract/test_policies.py compares both passes
def test_actions_from_noise_are_resumed_and_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The learner finds the probabilities of chains as they were sampled, through channels and checkpoints."""
    flow = (*SMALL, *NET, "rollout.action_chunk=2")

    def learned(name: str, *overrides: str) -> Finished:
        run = train("vla_flow_reach", tmp_path / name, *flow, *overrides)
        assert run.code == 0, run.err + run.out
        return run

    whole = learned("whole", "runner.total_iterations=2", "runner.eval_every=1")
    learned("cut", "runner.total_iterations=1")
    resumed = learned("cut", "runner.total_iterations=2", "resume=auto")
    names = ("actor/policy_loss", "actor/value_loss", "actor/grad_norm")
    last = whole.metrics()[-1]
    assert [last[name] for name in names] == [
        resumed.metrics()[-1][name] for name in names
    ]
    learned_rows = [row for row in whole.metrics() if "actor/mismatch" in row]
    assert len(learned_rows) == 2
    for row in learned_rows:
        assert row["actor/mismatch"] < 1e-5
        assert row["actor/grad_norm"] > 0
        assert 0 <= row["eval/return"] <= 1
    capsys.readouterr()
    returns = []
    for sampled in ((), ("deterministic=false",)):
        line = [str(whole.folder), "episodes=4", "--format", "json", *sampled]
        assert evaluate(line) == 0
        returns.append(json.loads(capsys.readouterr().out)["return"]["mean"])
    assert all(0 <= each <= 1 for each in returns)


@pytest.mark.slow  # tests/unit/models/test_smolvla.py reads a folder
def test_a_checkpoint_of_smolvla_is_trained_and_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, vlm = tiny_smolvla(tmp_path)
    units = (
        f"{{name: 'rlplace.envs.smolvla:SmolVlaUnits', kwargs: {{folder: {folder}}}}}"
    )
    run = train(
        "vla_flow_reach",
        tmp_path / "runs",
        *SMALL,
        f"actor.model.path={folder}",
        f"actor.model.vlm={vlm}",
        "actor.model.instruction_tokens=8",
        f"env.wrappers=[{units}]",
        "rollout.action_chunk=2",
        "runner.total_iterations=1",
    )
    assert run.code == 0, run.err + run.out
    (row,) = run.metrics()
    assert row["actor/mismatch"] < 1e-4
    assert row["actor/grad_norm"] > 0
    capsys.readouterr()
    assert evaluate([str(run.folder), "episodes=4", "--format", "json"]) == 0
    assert 0 <= json.loads(capsys.readouterr().out)["return"]["mean"] <= 1


@pytest.mark.slow
def test_a_vision_language_model_from_a_folder_gets_an_expert(tmp_path: Path) -> None:
    folder = tiny_smolvlm(tmp_path / "model", side=8)
    run = train(
        "vla_flow_reach",
        tmp_path / "runs",
        *SMALL,
        f"actor.model.path={folder}",
        "actor.model.instruction_tokens=8",
        "runner.total_iterations=1",
    )
    assert run.code == 0, run.err + run.out
    (row,) = run.metrics()
    assert row["actor/mismatch"] < 1e-5


@pytest.mark.slow  # tests/unit/models/test_openvla.py reads a folder
def test_chunks_of_a_checkpoint_of_openvla_in_its_published_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_openvla(tmp_path / "model")
    meaning = (
        f"{{name: 'rlplace.envs.openvla:OpenVlaActions', kwargs: {{folder: {folder}}}}}"
    )
    run = train(
        "vla_reach",
        tmp_path / "runs",
        *SMALL,
        f"actor.model.path={folder}",
        "actor.model.decoding=parallel",
        "actor.model.instruction_tokens=20",
        f"env.wrappers=[{meaning}]",
        "rollout.action_chunk=2",
        "runner.total_iterations=2",
    )
    assert run.code == 0, run.err + run.out
    for row in run.metrics():
        assert row["actor/mismatch"] < 1e-5
        assert row["actor/grad_norm"] > 0
    capsys.readouterr()
    assert evaluate([str(run.folder), "episodes=4", "--format", "json"]) == 0
    assert 0 <= json.loads(capsys.readouterr().out)["return"]["mean"] <= 1

"""`init_from`: a run begins with another policy's weights, says what it takes over, and refuses another network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rlplace
from rlplace.errors import ConfigError
from tests.e2e.training import SMALL, placed

# One update that changes nothing to be seen
STILL = {
    "env.total_num_envs": 8,
    "algorithm.rollout_steps": 16,
    "runner.total_iterations": 1,
    "actor.optimizer.lr": 1e-12,
}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> rlplace.Run:
    output = str(tmp_path_factory.mktemp("first"))
    given = STILL | {"actor.optimizer.lr": 1e-2, "runner.output_dir": output}
    return rlplace.train("cartpole", given)


def weights(run: rlplace.Run) -> dict[str, torch.Tensor]:
    return load_file(run.folder / "policy.safetensors")


def given(first: rlplace.Run, tmp_path: Path, **more: Any) -> dict[str, Any]:
    return STILL | {
        "init_from": str(first.folder),
        "runner.output_dir": str(tmp_path),
        # Other random weights than those of the first run
        "runner.seed": 7,
        **more,
    }


def test_all_weights_are_taken_over_for_the_same_spaces(
    first: rlplace.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = rlplace.train("cartpole", given(first, tmp_path))
    before, after = weights(first), weights(run)
    for name in before:
        if not name.startswith("normalizer."):
            assert torch.allclose(before[name], after[name], atol=1e-6), name
    # The statistics go on: 128 observations of each run
    assert after["normalizer.count"] == pytest.approx(2 * before["normalizer.count"])
    said = capsys.readouterr().out
    assert "taken over: normalizer, policy.0, policy.2, policy.4, value.0," in said


@pytest.mark.parametrize("kept", ["run", "checkpoint", "export"])
def test_a_run_a_checkpoint_and_an_export_are_policies(
    first: rlplace.Run, tmp_path: Path, kept: str
) -> None:
    from rlplace.cli import export

    named = first.folder
    if kept == "checkpoint":
        named = first.folder / "checkpoints" / "000001"
    if kept == "export":
        named = tmp_path / "exported"
        assert export.main([str(first.folder), str(named)]) == 0
    overrides = given(first, tmp_path, init_from=str(named))
    after = weights(rlplace.train("cartpole", overrides))
    assert torch.allclose(
        weights(first)["policy.4.weight"], after["policy.4.weight"], atol=1e-6
    )


def test_other_observations_and_actions_begin_their_layers_anew(
    first: rlplace.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = rlplace.train("cartpole", given(first, tmp_path, **{"env.id": "Acrobot-v1"}))
    before, after = weights(first), weights(run)
    for name in ("policy.2.weight", "policy.2.bias", "value.2.weight", "value.4.bias"):
        assert torch.allclose(before[name], after[name], atol=1e-6), name
    # The bias of a layer begins anew together with its weight
    assert not torch.allclose(before["policy.0.bias"], after["policy.0.bias"])
    # Statistics of this run alone
    assert after["normalizer.count"] == pytest.approx(before["normalizer.count"])
    said = capsys.readouterr().out
    assert "taken over: policy.2, value.2, value.4\n" in said
    assert "initialised: normalizer, policy.0, policy.4, value.0, optimizer" in said


@pytest.mark.parametrize(
    ("other", "fix"),
    [
        ({"actor.model.hidden": [32, 32]}, "'actor.model.hidden=[64, 64]'"),
        ({"actor.model.memory": "gru"}, "actor.model.memory=none"),
        ({"init_from": "nowhere"}, "does not contain 'nowhere'"),
    ],
)
def test_another_network_is_refused_with_the_line_to_paste(
    first: rlplace.Run, tmp_path: Path, other: dict[str, Any], fix: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        rlplace.train("cartpole", given(first, tmp_path, **other))
    assert fix in str(refused.value)


def test_a_resume_goes_on_with_its_own_weights(
    first: rlplace.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = given(first, tmp_path)
    run = rlplace.train("cartpole", overrides)
    capsys.readouterr()
    more = {"resume": str(run.folder), "runner.total_iterations": 2}
    again = rlplace.train("cartpole", overrides | more)
    assert again.folder == run.folder
    assert "taken over" not in capsys.readouterr().out
    assert len(again.rows()) == 2


@pytest.mark.slow
@pytest.mark.ray
def test_every_actor_rank_of_ray_begins_with_them(
    first: rlplace.Run, tmp_path: Path
) -> None:
    words = [
        *SMALL,
        *placed("0-1", "0", "1"),
        "runner.total_iterations=1",
        "actor.optimizer.lr=1e-12",
        "runner.seed=7",
        f"init_from={first.folder}",
        f"runner.output_dir={tmp_path}",
    ]
    after = weights(rlplace.train("hybrid_ppo_cartpole", words))
    assert torch.allclose(
        weights(first)["policy.4.weight"], after["policy.4.weight"], atol=1e-6
    )

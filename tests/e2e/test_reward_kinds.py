"""One job whose reward is a model, the same model behind HTTP, or a function: what is switched is two lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_rlhf_inline import Ended
from tests.tiny_lm import tiny_model
from tests.tiny_reward import digit_scorer
from tests.unit.workers.roles.test_reward_server import serving

PLACED = tuple(f"cluster.component_placement.{component}='0'" for component in ("actor", "critic", "reference", "env"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return tiny_model(folder / "tiny"), digit_scorer(folder / "tiny_reward")


def by(tmp_path: Path, policy: Path, *reward: str) -> Ended:
    """One iteration with the reward on CPUs."""
    where = "cluster.component_placement.reward=cpu"
    return Ended(tmp_path, f"actor.model.path={policy}", *PLACED, *reward, where, "runner.total_iterations=1")


def test_a_function_is_the_reward(models: tuple[Path, Path], tmp_path: Path) -> None:
    run = by(tmp_path, models[0], "reward.function=tests.odd_rewards:shortness")
    (line,) = run.lines()
    assert (run.code, line["reward/samples"]) == (0, line["rollout/answers"])
    assert line["actor/reward"] < 0


def test_a_model_behind_http_is_the_reward(models: tuple[Path, Path], tmp_path: Path) -> None:
    with serving(models[1]) as url:
        run = by(tmp_path, models[0], f"reward.url={url}")
    (line,) = run.lines()
    assert (run.code, line["reward/samples"]) == (0, line["rollout/answers"])
    assert 0 < line["actor/reward"] < 4  # some digits, and letters too


def test_an_endpoint_that_is_down_is_said_before_anything_is_sampled(
    models: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(models[1]) as url:
        pass
    assert by(tmp_path, models[0], f"reward.url={url}", "+reward.retries=0").code != 0
    assert "reward-endpoint-down" in capsys.readouterr().err


def test_what_is_no_reward_model_is_said_before_launch(
    models: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert by(tmp_path, models[0], f"reward.model.path={models[0]}").code == 2
    assert "[reward-head]" in capsys.readouterr().err

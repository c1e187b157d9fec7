"""What users bring by name works in whole runs: variants of algorithms and callbacks, those of the page among them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import pytest

from rlplace.cli.train import main
from tests.e2e.training import INLINE, ROOT, placed, train
from tests.pages import blocks

SMALL = (*INLINE, *placed("0", "0", "1"), "runner.total_iterations=2")
NAMES = (
    "policy_loss",
    "value_loss",
    "entropy",
    "approx_kl",
    "clip_fraction",
    "grad_norm",
    "explained_variance",
)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of the page, in which its commands are typed."""
    for block in blocks(ROOT / "docs" / "own_code.md"):
        if block.title:
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_variant_with_the_shipped_formulas_learns_the_same(tmp_path: Path) -> None:
    own = "algorithm.variant.name=tests.own_variant:SameEstimates"
    shipped, varied = (
        train("hybrid_ppo", tmp_path / name, *SMALL, *more)
        for name, more in (("a", ()), ("b", (own,)))
    )
    assert (shipped.code, varied.code) == (0, 0), varied.err
    for before, after in zip(shipped.metrics(), varied.metrics(), strict=True):
        for name in (f"actor/{name}" for name in NAMES):
            assert after[name] == pytest.approx(before[name], rel=1e-3, abs=1e-5), name
        assert after["actor/own/ratio"] == pytest.approx(1.0, abs=0.1)


def test_the_variant_of_the_page_trains(page: Path) -> None:
    assert main(["dual.yaml", "runner.total_iterations=1"]) == 0
    (written,) = (page / "runs").glob("dual/*/metrics.jsonl")
    assert 0.0 <= json.loads(written.read_text())["actor/own/dual_clipped"] < 0.5


def test_the_callback_of_the_page_ends_a_run_that_does_not_improve(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    never = "runner.callbacks=[{name: 'watch:Plateau', kwargs: {patience: 0}}]"
    assert main(["watched.yaml", never]) == 0
    (folder,) = (page / "runs").glob("watched/*")
    assert (folder / "best.txt").read_text().startswith("finished: ")
    assert json.loads((folder / "summary.json").read_text())["iterations"] == 1
    assert (folder / "policy.safetensors").exists()
    assert "watch:Plateau ends the run after iteration 1" in capsys.readouterr().out


class Broken:
    """A callback with a mistake."""

    seen: ClassVar[list[Any]] = []

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.seen[:] = [config["runner"]["seed"]]

    def on_iteration(
        self, iteration: int, env_steps: int, metrics: dict[str, float]
    ) -> None:
        self.seen.append(iteration)
        if iteration == 2:
            raise KeyError("no such metric")

    def on_end(self, state: str) -> None:
        self.seen.append(state)


class NeverResets(gymnasium.Env[Any, Any]):
    """A simulator whose start fails."""

    observation_space = action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))

    def reset(self, **options: Any) -> Any:
        raise AttributeError("no such motor")


def test_a_callback_is_told_of_a_start_that_fails(tmp_path: Path) -> None:
    called = f"runner.callbacks=[{{name: '{__name__}:Broken'}}]"
    run = train(
        "hybrid_ppo", tmp_path, *SMALL, called, f"env.id={__name__}:NeverResets"
    )
    assert run.code == 1
    assert "AttributeError: no such motor" in run.err
    assert Broken.seen == [0, "failed"]
    (folder,) = (tmp_path / "hybrid_ppo").iterdir()
    assert "AttributeError: no such motor" in (folder / "error.txt").read_text(
        encoding="utf-8"
    )


def test_a_callback_that_fails_ends_the_run_with_its_line_and_what_was_learned_is_saved(
    tmp_path: Path,
) -> None:
    called = f"runner.callbacks=[{{name: '{__name__}:Broken'}}]"
    run = train("hybrid_ppo", tmp_path, *SMALL, called, "runner.total_iterations=4")
    assert run.code == 1
    assert "[callback-failed]" in run.err
    assert "KeyError: 'no such metric'" in run.err
    assert f"mend {__file__}:" in run.err
    assert Broken.seen == [0, 1, 2, "failed"]
    assert run.folder is not None
    assert (run.folder / "checkpoints" / "000002").is_dir()
    assert "KeyError: 'no such metric'" in (run.folder / "error.txt").read_text(
        encoding="utf-8"
    )
    resumed = train(
        "hybrid_ppo", tmp_path, *SMALL, "runner.total_iterations=3", "resume=auto"
    )
    assert resumed.code == 0, resumed.err
    assert not (run.folder / "error.txt").exists()

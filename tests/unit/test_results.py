"""The results of the shipped tasks: what is kept of each run, and the page and the picture made of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import results
from benchmarks.results import PAGE, PICTURE, SEEDS, Run, kept, page, picture
from rlplace.config.compose import TASK, group_names

KEPT = kept()


def run(seed: int = 0, **changed: object) -> Run:
    made = dataclasses.replace(
        KEPT[0],
        task="hopper",
        seed=seed,
        curve=[(100, 1.0), (200, 3.0), (400, 5.0)],
        sampled=2000.0 + seed,
        evaluated=2500.0,
    )
    return dataclasses.replace(made, **changed)  # type: ignore[arg-type]


def test_the_page_and_the_picture_are_those_of_the_kept_runs() -> None:
    """python benchmarks/results.py --write"""
    assert PAGE.read_text(encoding="utf-8") == page(KEPT)
    assert PICTURE.read_text(encoding="utf-8") == picture(KEPT)
    assert ElementTree.fromstring(picture(KEPT)).tag.endswith("svg")


def test_the_table_of_settings_is_that_of_the_shipped_tasks() -> None:
    text = results.SETTINGS_PAGE.read_text(encoding="utf-8")
    assert text == results.settings_page(text)


@pytest.mark.parametrize("task", sorted({run.task for run in KEPT}))
def test_kept_runs_have_the_shipped_settings(task: str) -> None:
    """Other settings need other runs: python benchmarks/results.py train <task>"""
    shipped = results.settings_of(task)
    assert [
        each.seed for each in KEPT if each.task == task and each.settings != shipped
    ] == []


def test_seeds_are_those_that_were_announced_and_none_is_left_out() -> None:
    for task in {each.task for each in KEPT}:
        seeds = [each.seed for each in KEPT if each.task == task]
        assert seeds == list(SEEDS[: len(seeds)])


def test_published_returns_are_of_shipped_tasks() -> None:
    assert set(results.published()) <= set(group_names(TASK))
    assert all(url.startswith("https://") for url in results.sources().values())


def test_what_is_kept_is_read_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "KEPT", tmp_path)
    results.keep(run(seed=2))
    assert kept(tmp_path) == [run(seed=2)]


def test_a_kept_run_is_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "KEPT", tmp_path)
    results.keep(run(seed=0))
    trained: list[tuple[str, int]] = []

    def train(task: str, seed: int) -> Run:
        trained.append((task, seed))
        return run(seed=seed)

    monkeypatch.setattr(results, "train", train)
    assert results.train_missing(["hopper"], [0, 1]) == 0
    assert trained == [("hopper", 1)]


def test_a_long_curve_is_thinned_and_keeps_its_end() -> None:
    points = results.thinned([(steps, steps / 3) for steps in range(1, 251)])
    assert len(points) <= results.POINTS
    assert points[-1] == (250, 83.333)


def test_the_mean_curve_is_within_the_ends_of_all() -> None:
    other = run(1, curve=[(200, 5.0), (300, 7.0)])
    assert results.mean_curve([run(), other]) == [(200, 4.0)]
    assert results.value_at(other.curve, 250) == 6.0


def test_a_mean_below_a_reference_is_said() -> None:
    lower = page([run(0), run(1), run(2)])
    assert "Below a reference: `hopper` (of CleanRL). " in lower
    assert "| `hopper` " in lower
    assert "**2,001 ± 1.00** | 2,500 ± 0.00 | 2,383 ± 272 (Hopper-v4, 1M) |" in lower
    assert "No mean is below" in page([run(sampled=2400.0)])


def test_tasks_with_another_number_of_evaluated_episodes_are_named() -> None:
    few = [run(task="hopper", eval_episodes=20), run(task="ant", eval_episodes=20)]
    many = run(task="pendulum", eval_episodes=100)
    said = results.evaluated_episodes([*few, many])
    assert said == "Each policy played 20 episodes. Those of `pendulum` played 100."
    assert results.evaluated_episodes([many]) == "Each policy played 100 episodes."


def test_a_task_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the shipped settings, but for one iteration and one episode of the evaluation."""
    monkeypatch.setattr(results, "EPISODES", 1)
    found = results.train("acrobot", 0, ["runner.total_iterations=1"])
    assert found.env_steps == 16 * 128
    assert found.settings["runner"] == {"total_iterations": 1}
    assert found.evaluated <= 0
    assert found.eval_episodes == 1
    assert found.cpu_s > 0

"""rlplace without the command line: the examples of docs/python.md, runs as objects, and a sync equal to the bit."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import rlplace
from rlplace.api.notebook import Curve
from rlplace.config import compose
from rlplace.errors import CallbackError, ConfigError, DoesNotFit
from rlplace.placement import Plan
from rlplace.placement.schedule import Residency
from rlplace.runtime.launched import job_spec, launch
from rlplace.runtime.prepare import prepare_composed
from rlplace.signals import Stopped
from rlplace.workers.launch.cluster import Cluster
from rlplace.workers.launch.group import wait_all
from tests.e2e.training import SMALL, placed
from tests.pages import says

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


WORKERS = "## Workers of your own"  # the part of the page that needs Ray
FEW = {
    "env.total_num_envs": 4,
    "algorithm.rollout_steps": 16,
    "algorithm.epochs": 1,
    "runner.total_iterations": 3,
}


def examples(text: str) -> list[tuple[str, str]]:
    """Return (language, text) of each block of a page that is code or output."""
    return re.findall(r"```(python|text)\n(.*?)```", text, re.S)


def printed_by(code: str, names: dict[str, Any]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "python.md", "exec"), names)
    return out.getvalue()


def test_the_examples_of_the_page_print_what_it_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    page = examples(PAGE.read_text(encoding="utf-8").partition(WORKERS)[0])
    assert len(page) > 10
    names: dict[str, Any] = {"__name__": "__main__"}
    answer = ""
    for language, text in page:
        if language == "python":
            answer = printed_by(text, names)
        else:
            shown = text.rstrip("\n").split("\n")
            assert says(answer.rstrip("\n").split("\n"), shown), answer


@pytest.mark.slow
@pytest.mark.ray
def test_the_example_of_a_worker_prints_what_the_page_says() -> None:
    page = examples(PAGE.read_text(encoding="utf-8").partition(WORKERS)[2])
    (_, example), (_, printed) = page[:2]
    assert printed_by(example, {"__name__": "__main__"}) == printed


@pytest.fixture
def few(tmp_path: Path) -> dict[str, Any]:
    return FEW | {"runner.output_dir": str(tmp_path / "runs")}


def test_a_run_is_an_object_with_what_it_has_written(few: dict[str, Any]) -> None:
    run = rlplace.train("cartpole", few)
    assert (run.state, run.name) == ("finished", "cartpole")
    assert run.summary["iterations"] == 3
    assert [row["iteration"] for row in run.rows()] == [1, 2, 3]
    assert list(run.metrics["env_steps"]) == [64, 128, 192]
    assert run.config["env"]["total_num_envs"] == 4
    assert run.report.is_file()
    assert run.evaluate(2, seed=3)["episodes"] == 2
    assert run.policy.act([0.0] * 4) in (0, 1)
    assert "3 iterations" in repr(run)
    assert "report.html" in run._repr_html_()
    (command,) = json.loads((run.folder / "command.json").read_text(encoding="utf-8"))
    assert command["typed"].startswith("rlplace.train('cartpole', ['env.total_num_envs")


def test_a_mapping_and_a_file_are_configs_too(
    few: dict[str, Any], tmp_path: Path
) -> None:
    mapping = {"defaults": ["cartpole", "_self_"], "runner": {"total_iterations": 1}}
    words = [f"{key}={value}" for key, value in few.items() if "total_it" not in key]
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps(mapping), encoding="utf-8")
    runs = [rlplace.train(mapping, words), rlplace.train(file, words)]
    assert [run.name for run in runs] == ["config", "mine"]
    assert [len(run.rows()) for run in runs] == [1, 1]


def test_a_callback_sees_each_iteration_and_can_end_the_run(
    few: dict[str, Any],
) -> None:
    seen: list[tuple[int, int, bool]] = []

    def look(iteration: int, env_steps: int, metrics: Mapping[str, float]) -> bool:
        seen.append((iteration, env_steps, "time/learn_s" in metrics))
        return iteration == 2

    run = rlplace.train("cartpole", few, on_iteration=look)
    assert seen == [(1, 64, True), (2, 128, True)]
    assert (run.state, run.summary["iterations"]) == ("finished", 2)


def test_an_error_of_the_callback_names_it_and_the_policy_is_saved(
    few: dict[str, Any],
) -> None:
    def divide(*given: object) -> None:
        raise ZeroDivisionError("by nothing")

    with pytest.raises(CallbackError, match="by nothing") as failed:
        rlplace.train("cartpole", few, on_iteration=divide)
    assert "divide" in str(failed.value)
    (note,) = failed.value.__notes__
    assert "checkpoints/000001" in note


def test_ctrl_c_saves_and_is_a_keyboard_interrupt(
    few: dict[str, Any], tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGINT)

    def interrupt(iteration: int, *given: object) -> None:
        if iteration == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as ended:
        rlplace.train("cartpole", few, on_iteration=interrupt)
    assert "policy.safetensors" in str(ended.value)
    (folder,) = (tmp_path / "runs" / "cartpole").iterdir()
    assert rlplace.load_run(folder).state == "stopped"
    assert signal.getsignal(signal.SIGINT) is before


def test_sigterm_saves_and_goes_on_to_the_program_s_own_handler(
    few: dict[str, Any], tmp_path: Path
) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        with pytest.raises(Stopped):
            rlplace.train(
                "cartpole",
                few,
                on_iteration=lambda *given: os.kill(os.getpid(), signal.SIGTERM),
            )
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == [signal.SIGTERM]
    (folder,) = (tmp_path / "runs" / "cartpole").iterdir()
    assert rlplace.load_run(folder).summary["iterations"] == 1


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        ("runner.seed=1", 'overrides=["runner.seed=1"]'),
        (["--multirun"], "leave out --multirun"),
        ({"dry_run": True}, "rlplace.plan('cartpole')"),
        (["algorithm.gamma=0.9,0.99"], "-m algorithm.gamma=0.9,0.99"),
    ],
)
def test_what_a_call_does_not_take_is_told_with_the_fix(
    overrides: Any, fix: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        rlplace.train("cartpole", overrides)
    assert fix in str(refused.value)


def test_a_job_that_does_not_fit_is_an_error_of_the_placement() -> None:
    with pytest.raises(DoesNotFit) as refused:
        rlplace.train("cartpole", {"cluster.accelerator.memory": "100 MiB"})
    assert isinstance(refused.value, rlplace.RlplaceError)


def test_the_folder_above_a_run_is_no_run_and_the_error_names_the_newest(
    few: dict[str, Any], tmp_path: Path
) -> None:
    run = rlplace.train("cartpole", few)
    with pytest.raises(ConfigError, match=re.escape(f"fix: {run.folder}")):
        rlplace.load_run(tmp_path / "runs")


def test_without_pandas_the_rows_are_offered(
    few: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = rlplace.train("cartpole", few)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="pip install pandas"):
        _ = run.metrics
    assert len(run.rows()) == 3


def test_a_plan_has_its_text_and_its_picture() -> None:
    job = rlplace.plan("grpo_qwen3_8b", ["algorithm.epochs=1"])
    assert job.text.startswith("plan: ")
    assert job.picture.startswith("<svg")
    assert job.config.algorithm.epochs == 1
    assert "<svg" in job._repr_html_()
    with pytest.raises(ConfigError, match="did you mean 'grpo_qwen3_8b'"):
        rlplace.plan("grop_qwen3_8b")


def test_the_command_and_the_call_are_one_name() -> None:
    from rlplace import plan, search, train

    assert train.main is not None
    assert {callable(train), callable(plan), callable(search)} == {True}
    for called in (train, plan, search):
        assert [*inspect.signature(called).parameters][:2] == ["config", "overrides"]


def test_a_curve_grows_in_a_notebook() -> None:
    shown: list[str] = []
    curve = Curve("env/return", shown.append)
    curve(1, 64, {})
    assert shown == []
    curve(2, 128, {"env/return": 3.0})
    curve(3, 192, {"env/return": 5.0})
    curve.draw()
    assert len(shown) >= 2
    assert "<svg" in shown[-1]
    assert "env/return" in shown[-1]


@pytest.mark.ray
def test_after_a_sync_every_rollout_rank_has_the_actor_s_bits() -> None:
    (composed,) = compose.with_hydra(
        ["--config-name", "hybrid_ppo", *SMALL, *placed("0-1", "0", "1-2")]
    )
    job = prepare_composed(composed)
    config, plan = job.config, job.plan
    assert isinstance(plan, Plan)
    spec = job_spec(config, plan)
    with Cluster.from_config(
        config.cluster, plan.topology, workers=spec.workers.values()
    ) as cluster:
        groups = launch(cluster, spec)
        actor, rollout = groups["actor"], groups["rollout"]
        seen = []
        for version in range(2):
            wait_all(
                [actor.move(Residency.WEIGHTS), rollout.move(Residency.WEIGHTS)], 60.0
            )
            wait_all([actor.push_weights(version), rollout.pull_weights(version)], 60.0)
            (digest,) = set(actor.digest().wait(60.0)) | set(
                rollout.digest().wait(60.0)
            )
            seen.append(digest)
            actor.move(Residency.OFF).wait(60.0)
            wait_all(
                [groups["env"].move(Residency.FULL), rollout.move(Residency.FULL)], 60.0
            )
            wait_all([groups["env"].run(version), rollout.generate(version)], 60.0)
            wait_all(
                [groups["env"].move(Residency.OFF), rollout.move(Residency.OFF)], 60.0
            )
            actor.move(Residency.FULL).wait(60.0)
            actor.learn(version, version).wait(60.0)
        assert seen[0] != seen[1]  # it learned

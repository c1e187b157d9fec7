"""Runs that go on: to the bit where nothing differs, under other placements, after a signal and after SIGKILL."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
from safetensors.numpy import load_file
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from rlplace.cli import export
from rlplace.cli.train import main
from rlplace.runtime.resume import _rules, _safe, _shapes
from tests.e2e.training import (
    INLINE,
    SMALL,
    Finished,
    finish,
    placed,
    read_until,
    start,
    train,
)
from tests.unit.envs.test_kept_numbers import Plain

CONSTANT = (
    "actor.optimizer.schedule=constant",
    "env.id=CartPole-v1",
    "runner.stop_at_return=null",
)
ONE_EACH = (*INLINE, *placed("0", "0", "1"), *CONSTANT)
TIMES = ("time/", "util/", "_s", "_per_s", "_share")  # what differs from run to run


def numbers(run: Finished) -> list[dict[str, Any]]:
    """Return the metrics that follow from the seed."""
    return [
        {
            k: v
            for k, v in line.items()
            if not k.startswith(TIMES) and not k.endswith(TIMES)
        }
        for line in run.metrics()
    ]


def steps_of(run: Finished, tag: str) -> list[int]:
    """Return the steps of a curve in TensorBoard, as its files have them."""
    assert run.folder is not None
    files = sorted((run.folder / "tensorboard").iterdir())
    events = (
        event for file in files for event in LegacyEventFileLoader(str(file)).Load()
    )
    return [
        event.step
        for event in events
        for value in event.summary.value
        if value.tag == tag
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run of four iterations that nothing interrupted."""
    return train(
        "hybrid_ppo",
        tmp_path_factory.mktemp("whole"),
        *ONE_EACH,
        "runner.total_iterations=4",
    )


def test_an_export_proposes_a_free_name_of_the_same_kind(
    whole: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    assert whole.folder is not None
    assert (
        export.main([str(whole.folder), str(whole.folder / "policy.safetensors")]) == 2
    )
    assert f"fix: {whole.folder / 'policy_4.safetensors'}\n" in capsys.readouterr().err


def resume(output: Path, *overrides: str, job: Sequence[str] = ONE_EACH) -> Finished:
    return train(
        "hybrid_ppo",
        output,
        *job,
        "resume=auto",
        "runner.total_iterations=4",
        *overrides,
    )


def test_a_run_goes_on_to_the_bit(whole: Finished, tmp_path: Path) -> None:
    train("hybrid_ppo", tmp_path, *ONE_EACH, "runner.total_iterations=2")
    run = resume(tmp_path)
    assert run.code == 0, run.err
    assert "2 of 4 iterations are done" in run.out
    assert numbers(run) == numbers(whole)
    assert (
        steps_of(run, "actor/policy_loss")
        == steps_of(whole, "actor/policy_loss")
        == [256, 512, 768, 1024]
    )
    assert run.folder is not None
    assert whole.folder is not None
    ours, theirs = (
        load_file(r.folder / "policy.safetensors") for r in (run, whole) if r.folder
    )
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    assert run.summary()["iterations"] == 4
    assert run.summary()["return_first"] == whole.summary()["return_first"]


def test_statistics_of_wrappers_go_on_to_the_bit(tmp_path: Path) -> None:
    normalized = (
        *ONE_EACH,
        "+env.wrappers=[{name: gymnasium.wrappers:NormalizeObservation},"
        " {name: gymnasium.wrappers:NormalizeReward}]",
    )
    at_once = train(
        "hybrid_ppo", tmp_path / "whole", *normalized, "runner.total_iterations=4"
    )
    assert at_once.code == 0, at_once.err
    part = tmp_path / "part"
    train("hybrid_ppo", part, *normalized, "runner.total_iterations=2")
    run = resume(part, job=normalized)
    assert run.code == 0, run.err
    assert numbers(run) == numbers(at_once)
    # CartPole rewards each step by one, whatever NormalizeReward makes of it.
    for line in run.metrics():
        if "env/return" in line:
            assert line["env/return"] == pytest.approx(line["env/episode_length"])


class Counting(Plain):
    """Normalizes by numbers of its own, and tells of how many observations they are."""

    counts: ClassVar[list[int]] = []

    def observation(self, observation: Any) -> Any:
        shown = super().observation(observation)
        self.counts.append(self.n)
        return shown


def test_statistics_of_a_wrapper_of_ones_own_go_on(tmp_path: Path) -> None:
    job = (*ONE_EACH, f"+env.wrappers=[{{name: {__name__}:Counting}}]")
    train("hybrid_ppo", tmp_path, *job, "runner.total_iterations=2")
    before = max(Counting.counts)
    Counting.counts.clear()
    run = resume(tmp_path, job=job)
    assert run.code == 0, run.err
    # Episodes begin anew, since the wrapper cannot tell where they were
    assert "begin anew" in run.out
    # Statistics that began anew would be of as many observations as before
    assert max(Counting.counts) > 1.9 * before


def test_what_came_after_the_checkpoint_is_done_again_once(
    whole: Finished, tmp_path: Path
) -> None:
    """SIGKILL leaves metrics of iterations that no checkpoint has."""
    job = (*ONE_EACH, "checkpoint.every=2", "runner.total_iterations=390625")
    process = start("hybrid_ppo", tmp_path, *job)
    seen = read_until(process, "    4 ")
    while not [*tmp_path.glob("*/*/checkpoints/latest")]:
        seen += process.stdout.readline() if process.stdout else ""
    process.kill()
    killed = finish(process, tmp_path, seen)
    assert len(killed.metrics()) >= 3
    assert killed.folder is not None
    saved = int((killed.folder / "checkpoints" / "latest").read_text())
    run = train(
        "hybrid_ppo",
        tmp_path,
        *job[:-1],
        "resume=auto",
        f"runner.total_iterations={saved + 2}",
    )
    assert run.code == 0, run.err
    assert [line["iteration"] for line in run.metrics()] == list(range(1, saved + 3))
    assert numbers(run)[:4] == numbers(whole)
    assert steps_of(run, "env/return") == sorted(set(steps_of(run, "env/return")))


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_signal_saves_first(tmp_path: Path, number: signal.Signals) -> None:
    process = start(
        "hybrid_ppo",
        tmp_path,
        *ONE_EACH,
        "runner.total_iterations=390625",
        "checkpoint.every=0",
    )
    seen = read_until(process, "    3 ")
    process.send_signal(number)
    run = finish(process, tmp_path, seen)
    assert run.code == 128 + number
    assert f"{number.name}: ends after this iteration and saves" in run.err
    assert run.folder is not None
    done = run.summary()["iterations"]
    assert run.summary()["checkpoint"] == str(run.folder / "checkpoints" / f"{done:06}")
    assert run.summary()["policy"] == str(run.folder / "policy.safetensors")
    assert len(run.metrics()) == done
    again = train(
        "hybrid_ppo",
        tmp_path,
        *ONE_EACH,
        "resume=auto",
        f"runner.total_iterations={done + 1}",
    )
    assert [line["iteration"] for line in again.metrics()] == list(range(1, done + 2))


def test_without_a_config_a_run_goes_on_by_its_own(tmp_path: Path) -> None:
    first = train("hybrid_ppo", tmp_path, *ONE_EACH, "runner.total_iterations=1")
    assert main([f"resume={first.folder}", "runner.total_iterations=2"]) == 0
    assert len(first.metrics()) == 2


def test_another_experiment_is_refused_unless_it_is_named(tmp_path: Path) -> None:
    train("hybrid_ppo", tmp_path, *ONE_EACH, "runner.total_iterations=1")
    changed = (
        "algorithm.gamma=0.9",
        "runner.seed=7",
        "+env.kwargs.sutton_barto_reward=true",
    )
    refused = resume(tmp_path, *changed, "actor.model.hidden=[32]")
    assert refused.code == 2
    assert refused.err.count("[other-experiment]") == 4
    joint = "resume_allow=[algorithm.gamma,runner.seed,env.kwargs.sutton_barto_reward]"
    assert f"fix: algorithm.gamma=0.99        (or on purpose: {joint})" in refused.err
    assert (
        f"fix: leave out env.kwargs.sutton_barto_reward        (or on purpose: {joint})"
        in refused.err
    )
    assert "fix: 'actor.model.hidden=[64,64]'\n" in refused.err
    shaped = resume(
        tmp_path, *changed, "actor.model.hidden=[32]", "resume_allow=[actor.model]"
    )
    assert "the saved state does not fit another value" in shaped.err
    allowed = resume(tmp_path, *changed, joint)
    assert allowed.code == 0, allowed.err
    assert (
        "algorithm.gamma: 0.99 -> 0.9        changes the numbers of what follows"
        in allowed.out
    )


def test_after_a_run_of_another_task_a_run_of_this_one_is_proposed(
    tmp_path: Path,
) -> None:
    other = ("env.id=Acrobot-v1", "algorithm.gamma=0.9")
    anew = train("hybrid_ppo", tmp_path, *ONE_EACH, "runner.total_iterations=1")
    refused = resume(tmp_path, *other)
    assert refused.code == 2
    assert refused.err.count("[other-experiment]") == 1, (
        "what else differs does not matter"
    )
    assert "    fix: start a new run: resume=null\n" in refused.err
    assert (
        train(
            "hybrid_ppo",
            tmp_path,
            *ONE_EACH,
            *other,
            "runner.total_iterations=1",
            "resume=null",
        ).code
        == 0
    )
    refused = resume(tmp_path)
    assert "    got: CartPole-v1 " in refused.err
    assert f"    fix: resume={anew.folder}\n" in refused.err
    assert resume(tmp_path, f"resume={anew.folder}").code == 0
    assert len(anew.metrics()) == 4


@pytest.mark.parametrize(
    ("key", "old", "new", "safe", "shapes"),
    [
        ("reward.timeout_s", 60.0, 90.0, True, False),
        ("reward.judge.url", "http://a", "http://b", True, False),
        ("reward.judge.url", None, "http://b", False, False),
        ("reward.kwargs.batch", 1, 2, False, False),
        ("faults.on_poison", "stop", "skip", False, False),
        ("actor.ema_decay", None, 0.9, False, True),
        ("actor.ema_decay", 0.8, 0.9, False, False),
        ("actor.model.path", "a", "b", False, False),
        ("critic.lora_rank", 8, 16, False, True),
    ],
)
def test_keys_that_change_no_numbers_and_keys_that_shape_the_state(
    key: str, old: object, new: object, safe: bool, shapes: bool
) -> None:
    rules = _rules(None)
    found = (_safe(rules, key, old, new), _shapes(rules, key, old, new))
    assert found == (safe, shapes)


@pytest.mark.parametrize("named", [(), ("--config-name", "hybrid_ppo")])
def test_the_offer_to_start_anew_can_be_pasted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], named: tuple[str, ...]
) -> None:
    output = f"runner.output_dir={tmp_path}"
    assert main([*named, output, f"resume={tmp_path / 'none'}"]) == 2
    line = (
        capsys.readouterr().err.partition("fix: start a new run: ")[2].splitlines()[0]
    )
    assert line == ("resume=null" if named else "resume=null --config-name <name>")
    words = line.replace("<name>", "hybrid_ppo").split()
    assert (
        main(
            [
                *named,
                output,
                f"resume={tmp_path / 'none'}",
                *words,
                *ONE_EACH,
                "dry_run=true",
            ]
        )
        == 0
    )
    assert main([output, "resume=null"]) == 2
    assert "[no-config]" in capsys.readouterr().err


def test_a_job_that_is_done_has_nothing_left(tmp_path: Path) -> None:
    job = (*ONE_EACH, "runner.total_iterations=1")
    first = train("hybrid_ppo", tmp_path, *job)
    done = train("hybrid_ppo", tmp_path, *job, f"resume={first.folder}")
    assert done.code == 2
    assert "[nothing-left]" in done.err
    assert "runner.total_iterations=2" in done.err
    # One command line for every start of the job, also for one too many
    again = train("hybrid_ppo", tmp_path, *job, "resume=auto")
    assert again.code == 0, again.err
    assert "nothing is left to do" in again.out
    assert f"{first.folder}/policy.safetensors" in again.out
    assert len(first.metrics()) == 1
    other = train("hybrid_ppo", tmp_path, *job, "resume=auto", "algorithm.gamma=0.5")
    assert other.code == 2
    assert "[other-experiment]" in other.err


def test_the_first_start_with_auto_starts_anew(tmp_path: Path) -> None:
    run = train(
        "hybrid_ppo", tmp_path, *ONE_EACH, "resume=auto", "runner.total_iterations=1"
    )
    assert run.code == 0, run.err
    assert "no checkpoint of this job yet: it starts anew" in run.out


def test_a_checkpoint_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path,
) -> None:
    process = start(
        "hybrid_ppo",
        tmp_path,
        *ONE_EACH,
        "runner.total_iterations=4",
        "checkpoint.every=1",
    )
    read_until(process, "files: ")
    (folder,) = tmp_path.glob("*/*")
    (folder / "checkpoints").write_text("in the way", encoding="utf-8")
    run = finish(process, tmp_path)
    assert len(run.metrics()) == 4
    assert "no checkpoint after iteration" in run.err


@pytest.mark.ray
@pytest.mark.slow
def test_the_policy_of_a_run_whose_worker_dies_is_kept(tmp_path: Path) -> None:
    """The actor is whole when an env worker dies: what it has learned is saved."""
    job = (
        *SMALL,
        *placed("0", "1", "2"),
        *CONSTANT,
        "runner.total_iterations=390625",
        "checkpoint.every=0",
        "faults.restarts=0",
    )
    process = start("hybrid_ppo", tmp_path, *job)
    seen = read_until(process, "    2 ")
    workers = [
        p
        for p in psutil.Process(process.pid).children(recursive=True)
        if "RayHost" in " ".join(p.cmdline())
    ]
    simulating = next(
        p for p in workers if not any("libtorch" in m.path for m in p.memory_maps())
    )
    simulating.kill()
    run = finish(process, tmp_path, seen)
    assert run.code == 1
    saved = json.loads((Path(run.summary()["checkpoint"]) / "run.json").read_text())
    done = saved["progress"]["iterations"]
    assert done == run.summary()["iterations"] >= 2
    again = train(
        "hybrid_ppo",
        tmp_path,
        *ONE_EACH,
        "resume=auto",
        f"runner.total_iterations={done + 1}",
    )
    assert again.code == 0, again.err
    assert f"continues after iteration {done}; all episodes begin anew" in again.out

"""`python -m rlplace.profile`: short runs under several placements, and the profile that a plan predicts from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlplace.cli.plan import main as plan
from rlplace.cli.profile import distinct, main, runs
from rlplace.config import compose
from rlplace.foresight.measure import Variant, run, variants
from rlplace.foresight.profile import read_profile

JOB = (
    "--config-name",
    "halfcheetah_2core",
    "cluster.launcher=inline",
    "env.id=Pendulum-v1",
    "algorithm.rollout_steps=16",
)


def found(*words: str) -> list[Variant]:
    (composed,) = compose.with_hydra(words)
    return [
        variant for variant in distinct(variants(composed.mapping, 8)) if runs(variant)
    ]


def test_the_placements_have_fewest_and_most_ranks_and_only_valid_ones_are_run() -> (
    None
):
    names = [variant.name for variant in found("--config-name", "hybrid_ppo")]
    ranks, shared = (
        ("one rank", "8 ranks", "4 ranks"),
        ", env and rollout in one process",
    )
    one, eight, four = (f"{number} of each" for number in ranks)
    assert names == [
        "as written",
        one,
        one + shared,
        eight,
        four,
        four + shared,
        "1 stage groups",
    ]
    odd = [
        v.name
        for v in found(
            "--config-name",
            "hybrid_ppo",
            "env.total_num_envs=8",
            "rollout.pipeline_stage_num=2",
        )
    ]
    assert (
        "8 ranks of each" not in odd
    )  # 8 environments cannot be two groups of each of 8 ranks


def test_threads_of_one_process_are_not_asked_to_learn_together() -> None:
    assert all(
        "actor" in v.mapping["cluster"]["component_placement"] for v in found(*JOB)
    )
    assert [v.name for v in found(*JOB) if v.name.startswith("8 ranks")] == []


@pytest.mark.slow
def test_a_profile_is_measured_shown_and_predicted_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "made" / "profile.json"
    assert main([*JOB, "--out", str(file), "--iterations", "3"]) == 0
    out = capsys.readouterr().out
    assert "as written: " in out
    assert "env.run/sim" in out
    profile = read_profile(file.read_text(), file=str(file))
    assert len(profile.costs["env.run/sim"].points) > 1, (
        "more sizes than the config has"
    )
    assert plan([*JOB, f"profile={file}"]) == 0
    assert "an iteration takes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--iterations", "2"), "too few to measure"),
        (("-m", "runner.seed=1,2"), "one job is measured at a time"),
        (("env.id=NoSuch-v0",), "NoSuch-v0"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    words: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*JOB, *words]) == 2
    assert text in capsys.readouterr().err


def test_a_measured_run_raises_with_the_end_of_its_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rlplace.errors import ConfigError

    (composed,) = compose.with_hydra([*JOB, "algorithm.gamma=2"])
    with pytest.raises(ConfigError, match="gamma") as caught:
        run(Variant(name="wrong", mapping=composed.mapping), 3)
    assert caught.value.problems[0].code == "profile-run-failed"


OWN_JOB = """
from rlplace import Job, Stage, Worker, full


class Learner(Worker):
    def learn(self, iteration):
        if self.world_size > 1:
            raise ValueError("one rank alone knows what to do")


job = Job(
    components={"actor": Learner}, stages=[Stage("learn", full("actor").calls("learn"))]
)
"""
OWN_CONFIG = """
job: alone_of_a_test:job
cluster:
  launcher: inline
  accelerators_per_node: 2
  accelerator: {kind: emulated}
  component_placement: {actor: 0}
"""


def test_the_file_of_a_custom_job_is_named_as_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    below = tmp_path / "jobs"
    below.mkdir()
    (below / "alone_of_a_test.py").write_text(OWN_JOB, encoding="utf-8")
    (below / "alone.yaml").write_text(OWN_CONFIG, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    words = ["jobs/alone.yaml", "runner.channel_timeout_s=30"]
    assert main([*words, "--iterations", "3", "--out", "profile.json"]) == 0
    shown = capsys.readouterr()
    # The run with two ranks fails, at once; the others are measured without it.
    assert "2 ranks of each: failed, left out" in shown.out
    assert "one rank alone knows what to do" in shown.err
    line = " ".join(["python -m rlplace.plan", *words, "profile=profile.json"])
    assert f"use it     {line}\n" in shown.out
    assert plan([*words, "profile=profile.json"]) == 0
    sys.modules.pop("alone_of_a_test", None)

"""`python -m rlplace.search`: what it prints and writes, and what wrong input gets."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rlplace.cli.plan import main as plan
from rlplace.cli.profile import main as measure
from rlplace.cli.search import main as search
from rlplace.config import compose
from rlplace.foresight.profile import Profile
from tests.foresight_profiles import random_text_profile, usual_profile

JOB = ("--config-name", "hybrid_ppo")


def written(folder: Path, profile: Profile) -> str:
    file = folder / "profile.json"
    file.write_text(json.dumps(profile.record()))
    return f"profile={file}"


def test_the_best_plan_is_told_with_its_proof_and_what_is_behind_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = written(tmp_path, usual_profile())
    assert search([*JOB, profile]) == 0
    text = capsys.readouterr().out
    for part in (
        "proven: under the profile",
        "times as fast as the config",
        "keys that change",
        "runners-up",
        "times",
    ):
        assert part in text
    assert (
        search(
            [
                *JOB,
                profile,
                "--format",
                "json",
                "objective=accelerator_seconds",
                "fix=actor",
            ]
        )
        == 0
    )
    record = json.loads(capsys.readouterr().out)
    assert record["proven"]
    assert record["gap"] == 0.0
    assert record["best"]["placement"]["actor"] == "0-7"
    assert record["best"]["value"] == pytest.approx(
        record["best"]["seconds"] * record["best"]["accelerators"]
    )
    values = [
        record["best"]["value"],
        *(other["value"] for other in record["runners_up"]),
    ]
    assert values == sorted(values)
    assert search([*JOB, profile, "--format=svg", "fix=actor,env,rollout"]) == 0
    assert ElementTree.fromstring(capsys.readouterr().out).tag.endswith("svg")


def test_a_job_with_language_models_is_searched_as_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    components = ("actor", "env", "rollout")
    profile = written(tmp_path, random_text_profile(random.Random(1), components))
    words = (
        "--config-name",
        "hybrid_grpo_llm",
        "runner.eval_every=0",
        profile,
        "seconds=4",
        "--format=json",
    )
    assert search(words) == 0
    record = json.loads(capsys.readouterr().out)
    assert 0.0 <= record["gap"] < 1.0
    assert record["bound"] <= record["best"]["value"] <= record["current"]["value"]
    assert {*record["best"]["placement"]} == {*components}


@pytest.mark.slow
def test_the_written_config_has_the_plan_and_the_comments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, profile = tmp_path / "best.yaml", written(tmp_path, usual_profile())
    assert (
        search(
            [
                *JOB,
                profile,
                "runner.seed=3",
                "env.enable_offload=true",
                "--apply",
                str(file),
            ]
        )
        == 0
    )
    told = capsys.readouterr().err
    assert f"--config-dir {tmp_path} --config-name best runner.seed=3\n" in told
    assert "# simulates" in file.read_text()
    assert plan(["--config-dir", str(tmp_path), "--config-name", "best"]) == 0
    capsys.readouterr()
    assert (
        search(["--config-dir", str(tmp_path), "--config-name", "best", profile]) == 0
    )
    assert "the config's own plan is as good" in capsys.readouterr().out


@pytest.mark.slow
def test_micro_batches_and_staleness_vary_where_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = written(
        tmp_path, random_text_profile(random.Random(1), ("actor", "env", "rollout"))
    )
    few = (
        "algorithm.max_new_tokens=8",
        "algorithm.prompts=2",
        "algorithm.samples_per_prompt=2",
    )
    small = (
        "cluster.accelerators_per_node=2",
        "cluster.component_placement.env=cpu",
        "rollout.engine=transformers",
    )
    words, file = (
        ("--config-name", "hybrid_grpo_llm", *few, *small, profile, "fix=actor"),
        tmp_path / "best.yaml",
    )
    assert search([*words, "--format=json"]) == 0
    alike = json.loads(capsys.readouterr().out)["best"]
    assert not {*alike["changes"]} & {"actor.token_budget", "algorithm.max_staleness"}
    vary = "vary=actor.token_budget,algorithm.max_staleness"
    assert search([*words, vary, "--format=json", "--apply", str(file)]) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert record["proven"]
    assert record["best"]["seconds"] < alike["seconds"]
    ahead = record["best"]["changes"]["algorithm.max_staleness"]
    assert any(
        note.startswith(f"algorithm.max_staleness {ahead} changes what is learned")
        for note in record["notes"]
    )
    assert plan(shlex.split(err.splitlines()[-1].partition("rlplace.train ")[2])) == 0
    assert f"max_staleness: {ahead}" in file.read_text()


def test_what_is_written_has_the_values_of_the_plan_or_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = written(
        tmp_path, random_text_profile(random.Random(1), ("actor", "env", "rollout"))
    )
    (tmp_path / "small.yaml").write_text(
        "# @package _global_\nactor: {token_budget: 128}\n"
    )
    few = (
        "algorithm.max_new_tokens=8",
        "algorithm.prompts=16",
        "algorithm.samples_per_prompt=4",
    )
    small = (
        "cluster.accelerators_per_node=2",
        "cluster.component_placement.env=cpu",
        "rollout.engine=transformers",
    )
    words, file = (
        (*few, *small, profile, "fix=actor,rollout", "vary=actor.token_budget"),
        tmp_path / "best.yaml",
    )
    asked = [
        *words,
        "--apply",
        str(file),
        "--config-dir",
        str(tmp_path),
        "--config-name",
    ]
    (tmp_path / "mine.yaml").write_text("defaults: [hybrid_grpo_llm, _self_]\n")
    assert search([*asked, "mine", "++actor.token_budget=128"]) == 0
    assert "token_budget" not in capsys.readouterr().err.partition("rlplace.train")[2]
    assert "token_budget: 512" in file.read_text()
    (tmp_path / "mine.yaml").write_text("defaults: [hybrid_grpo_llm, _self_, small]\n")
    assert search([*asked, "mine"]) == 2
    told = capsys.readouterr().err
    assert "actor.token_budget: is undone by small" in told
    assert "fix: defaults: [hybrid_grpo_llm, small, _self_]" in told


def test_the_nearest_plan_that_does_not_fit_has_the_values_that_were_varied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = written(
        tmp_path, random_text_profile(random.Random(1), ("actor", "env", "rollout"))
    )
    few = (
        "algorithm.max_new_tokens=8",
        "rollout.engine=transformers",
        "cluster.accelerator.memory=100MiB",
    )
    words = (
        "--config-name",
        "hybrid_grpo_llm",
        *few,
        profile,
        "fix=actor,env,rollout",
        "vary=actor.token_budget",
    )
    assert search(words) == 3
    assert (
        " actor.token_budget="
        in capsys.readouterr().err.partition("fix: python -m rlplace.plan ")[2]
    )


@pytest.mark.slow
def test_plans_are_probed_and_what_they_measure_is_searched_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "cluster.launcher=inline",
        "env.total_num_envs=8",
        "algorithm.rollout_steps=8",
    )
    profile = written(tmp_path, usual_profile())
    assert search([*JOB, *words, profile, "--probe", "2", "--format=json"]) == 0
    out, err = capsys.readouterr()
    probed = json.loads(out)["probed"]
    assert [row["iterations"] for row in probed] == [6, 6, 12]
    assert all(row["measured"] > 0.0 for row in probed)
    assert err.count("probing ") == 3


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (("profile={folder}/no.json",), 2, "fix: profile=last\n"),
        (("{profile}", "objective=second"), 2, "objective=seconds"),
        (("{profile}", "fix=rolout"), 2, "fix=rollout"),
        (("{profile}", "accelerators=many"), 2, "is no whole number"),
        (("{profile}", "--probe", "all"), 2, "is no whole number"),
        (("{profile}", "seconds=-1"), 2, "is no finite time above 0"),
        (("{profile}", "--format", "pdf"), 2, "one of text, json, svg"),
        (("{profile}", "--format", "jsn"), 2, "fix: --format json\n"),
        (("{profile}", "vary=actor.token_budget"), 2, "none of a simulator job"),
        (("{profile}", "fix=env", "accelerators=3"), 3, "fix: accelerators=4\n"),
        (
            ("{profile}", "fix=env,actor,rollout", "cluster.accelerator.memory=100MiB"),
            3,
            "the nearest lacks ",
        ),
        (("{lacking}",), 2, "the profile lacks env.run/sim"),
        (
            ("{still}", "fix=actor,env,rollout"),
            3,
            "the profile lacks env.move_full/rest",
        ),
        (
            ("{still}", "fix=actor,env,rollout"),
            3,
            "fix: python -m rlplace.profile --config-name hybrid_ppo\n",
        ),
    ],
)
def test_wrong_input_is_named_with_what_to_do(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    status: int,
    told: str,
) -> None:
    usual = usual_profile()
    lacks = {"{lacking}": "env.run/sim", "{still}": "env.move", "{profile}": "no cost"}
    given = []
    for word in words:
        if word in lacks:
            costs = {
                name: curve
                for name, curve in usual.costs.items()
                if not name.startswith(lacks[word])
            }
            word = written(tmp_path, dataclasses.replace(usual, costs=costs))
        given.append(word.format(folder=tmp_path))
    assert search([*JOB, *given]) == status
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_without_a_profile_the_last_of_the_job_is_taken_and_where_there_is_none_the_fix_measures_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*JOB, f"runner.output_dir='{tmp_path}/the, runs'", "env.total_num_envs=8"]
    assert search([*words, "fix=actor"]) == 2
    told = capsys.readouterr().err
    assert "[no-profile]" in told
    fix = shlex.split(told.partition("fix: ")[2])
    assert fix[:3] == ["python", "-m", "rlplace.profile"]
    assert (
        compose.with_hydra(fix[3:])[0].mapping == compose.with_hydra(words)[0].mapping
    )
    for name, cores in (("older", 1), ("newer", 2)):
        folder = tmp_path / "the, runs" / "hybrid_ppo" / name
        folder.mkdir(parents=True)
        written(folder, usual_profile(cores))
        os.utime(folder / "profile.json", (cores, cores))
    assert search([*words, "--format=json"]) == 0
    out, told = capsys.readouterr()
    assert f"profile={folder}/profile.json, the last of this job" in told
    assert search([*words, "profile=last", "--format=json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"] == json.loads(out)["best"]


def test_where_no_plan_fits_the_fix_shows_what_the_nearest_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The config's own plan, on eight accelerators, fits; on one, nothing does.
    words = [*JOB, "cluster.accelerator.memory=300MiB"]
    assert plan(words) == 0
    capsys.readouterr()
    assert search([*words, written(tmp_path, usual_profile()), "accelerators=1"]) == 3
    fix = shlex.split(capsys.readouterr().err.partition("fix: ")[2])
    assert fix[:3] == ["python", "-m", "rlplace.plan"]
    assert plan(fix[3:]) == 3
    assert "[does-not-fit]" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_that_the_fix_has_measures_the_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = (
        "env.total_num_envs=8",
        "algorithm.rollout_steps=8",
        "cluster.accelerators_per_node=2",
    )
    placed = (
        f"cluster.component_placement.{component}=all"
        for component in ("actor", "env", "rollout")
    )
    words = [
        *JOB,
        *few,
        *placed,
        "cluster.launcher=inline",
        f"runner.output_dir={tmp_path}",
    ]
    assert search(words) == 2
    assert measure(shlex.split(capsys.readouterr().err.partition("fix: ")[2])[3:]) == 0
    assert search(words) == 0

"""A run writes its profile, compares what it predicts with what it measured; a plan predicts from it."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rlplace.cli.plan import main as plan
from rlplace.cli.train import main as train
from rlplace.foresight.profile import read_profile
from tests.e2e.language import INLINE, tiny

JOB = (
    "--config-name",
    "halfcheetah_2core",
    "cluster.launcher=inline",
    "env.id=Pendulum-v1",
    "env.total_num_envs=4",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs")
    words = (
        *JOB,
        "runner.total_iterations=5",
        "algorithm.rollout_steps=32",
        f"runner.output_dir={output}",
    )
    assert train([*words, "runner.sinks=[jsonl]"]) == 0
    return next(output.glob("*/*/"))


def asked(
    folder: Path, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str, str]:
    output = f"runner.output_dir={folder.parent.parent}"
    code = plan([*JOB, "algorithm.rollout_steps=32", output, *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_run_leaves_a_profile_and_its_prediction_beside_what_it_measured(
    folder: Path,
) -> None:
    profile = read_profile((folder / "profile.json").read_text(), file="profile.json")
    assert {
        "env.run/sim",
        "rollout.generate/policy",
        "actor.learn/minibatch",
        "driver/inline_call",
    } <= set(profile.costs)
    costs = [
        profile.costs[cost]
        for cost in ("env.run/sim", "env.run/cold_sim")
        if cost in profile.costs
    ]
    stepped = [point for cost in costs for point in cost.points]
    assert (
        sum(point.laps for point in stepped) == 3 * 32
    )  # vector steps of three iterations, two are warm
    predicted = json.loads((folder / "summary.json").read_text())["predicted"]
    assert predicted["from"] == "this run's own profile"
    assert [*predicted["seconds"]] == ["iteration", "rollout", "learn", "sync", "moves"]
    iterations = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    for stage, row in predicted["seconds"].items():
        assert row["measured"] == statistics.median(
            numbers[f"time/{stage}_s"] for numbers in iterations[2:]
        )
    whole, *parts = (row["predicted"] for row in predicted["seconds"].values())
    assert all(parts[:-1])
    assert parts[-1] == 0.0, "no component shares an accelerator"
    assert whole == pytest.approx(sum(parts))


def test_a_plan_says_its_seconds_from_the_last_profile(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = asked(folder, capsys, "profile=last")
    assert code == 0
    chapter = out.partition("seconds: predicted from the profile\n")[2]
    assert "an iteration takes" in chapter
    assert "rollout" in chapter
    code, out, _ = asked(folder, capsys, f"profile={folder}", "--format=json")
    assert code == 0
    prediction = json.loads(out)["prediction"]
    assert (
        prediction["low_s"]
        <= prediction["seconds"]["iteration"]
        <= prediction["high_s"]
    )
    assert [stage for stage, _, _ in prediction["stages"]] == [
        "sync",
        "rollout",
        "learn",
    ]
    ends = [at for _, *both in prediction["stages"] for at in both]
    assert (
        0.0
        <= ends[0]
        <= ends[-1]
        == pytest.approx(prediction["seconds"]["iteration"], rel=0.05)
    )
    assert ends == sorted(ends)


def test_a_plan_draws_the_iteration_that_it_predicts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, picture, err = asked(
        folder, capsys, "--format=timeline"
    )  # from the last profile, where none is named
    assert code == 0
    assert err == f"profile={folder}/profile.json, the last of this job\n"
    drawn = ElementTree.fromstring(picture)
    titles = {
        title.text.partition(",")[0]
        for title in drawn.iter("{http://www.w3.org/2000/svg}title")
        if title.text
    }
    assert {
        "actor rank 0: learn",
        "env rank 0: run",
        "rollout rank 0: generate",
    } <= titles
    code, page, _ = asked(folder, capsys, "profile=last", "--format=html")
    assert code == 0
    assert picture.strip() in page
    assert "an iteration takes" in page


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("profile=nowhere.json",), "not-a-profile", "cannot be read"),
        (("profile=last", "runner.output_dir=/nowhere"), "no-profile", "there is none"),
        (
            ("profile=last", "env.id=Acrobot-v1"),
            "profile-of-another",
            "gymnasium Pendulum-v1",
        ),
        (("profile=last", "actor.model.hidden=[8]"), "profile-of-another", "mlp 8"),
    ],
)
def test_what_is_no_profile_of_this_job_is_refused(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    code: str,
    text: str,
) -> None:
    status, _, err = asked(folder, capsys, *words)
    assert status == 2
    assert f"[{code}]" in err
    assert text in err
    assert code != "profile-of-another" or f"got: {folder}/profile.json; " in err


def test_a_run_with_a_language_model_is_predicted_from_lengths_and_sizes_that_it_has_measured(
    model: Path, tmp_path: Path
) -> None:
    output = (
        f"runner.output_dir={tmp_path}",
        "runner.total_iterations=4",
        "runner.sinks=[jsonl]",
    )
    assert (
        train(["--config-name", "hybrid_grpo_llm", *tiny(model), *INLINE, *output]) == 0
    )
    folder = next(tmp_path.glob("*/*/"))
    profile = read_profile((folder / "profile.json").read_text(), file="profile.json")
    sizes = {
        part: [point.size for point in profile.costs[part].points]
        for part in profile.costs
    }
    assert max(sizes["rollout.generate/decode"]) <= 32
    assert min(sizes["actor.learn/micro_batch"]) > 32  # tokens
    assert {
        "rollout.generate/prefill",
        "actor.learn/exchange",
        "actor.learn/step",
        "env.run/reward",
    } <= set(sizes)
    assert (
        len(profile.samples["rollout.answer_tokens"])
        == len(profile.samples["env.turns"])
        == 2 * 32
    )
    assert {1.0} == set(profile.samples["env.turns"])
    predicted = json.loads((folder / "summary.json").read_text())["predicted"][
        "seconds"
    ]
    assert {"iteration", "rollout", "learn", "sync"} <= set(predicted)
    assert predicted["rollout"]["predicted"] > 0.0 < predicted["learn"]["predicted"]


def test_what_sleeps_is_predicted_whatever_else_the_machine_does(
    tmp_path: Path,
) -> None:
    words = (
        *JOB[:3],
        "env.id=tests.gyms:Sleeper-v0",
        "env.total_num_envs=2",
        "algorithm.rollout_steps=16",
    )
    few = (
        "algorithm.num_minibatches=2",
        "algorithm.epochs=1",
        "runner.total_iterations=5",
        "runner.sinks=[jsonl]",
    )
    assert train([*words, *few, f"runner.output_dir={tmp_path}"]) == 0
    summary = json.loads(next(tmp_path.glob("*/*/summary.json")).read_text())
    rollout = summary["predicted"]["seconds"]["rollout"]
    slept_s = 16 * 2 * 0.01  # a rank steps its simulators one after another
    assert slept_s <= rollout["predicted"] <= 1.5 * slept_s
    assert slept_s <= rollout["measured"]


def test_a_bad_profile_is_refused_before_anything_starts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = list(folder.parent.parent.glob("*/*"))
    for dry in ("true", "false"):
        words = (
            *JOB,
            "profile=nowhere.json",
            f"dry_run={dry}",
            f"runner.output_dir={folder.parent.parent}",
        )
        assert train([*words, "algorithm.rollout_steps=32"]) == 2
        assert "[not-a-profile]" in capsys.readouterr().err
    assert list(folder.parent.parent.glob("*/*")) == before


def test_train_says_the_seconds_of_its_plan(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        *JOB,
        "profile=last",
        "dry_run=true",
        f"runner.output_dir={folder.parent.parent}",
    )
    assert train([*words, "algorithm.rollout_steps=32"]) == 0
    assert "an iteration takes" in capsys.readouterr().out

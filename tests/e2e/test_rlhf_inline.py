"""Whole runs with a critic, a reference and a reward model, in threads of this process: every placement, one update."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.e2e.training import ROOT, Finished, train
from tests.unit.workers.roles.test_reward_server import serving

SMALL = (
    "cluster.launcher=inline",
    "cluster.accelerators_per_node=4",
    "cluster.accelerator.kind=emulated",
    "algorithm.prompts=4",
    "critic.warmup_iterations=0",
    "runner.total_iterations=4",
)
NUMBERS = (
    "actor/reward",
    "actor/loss",
    "actor/kl_reference",
    "actor/grad_norm",
    "critic/value_loss",
    "critic/value",
)


def placed(**where: str) -> tuple[str, ...]:
    """Of texts, and of blocks in braces."""
    written = {
        component: text if text.startswith("{") else f"'{text}'"
        for component, text in where.items()
    }
    return tuple(
        f"cluster.component_placement.{component}={text}"
        for component, text in written.items()
    )


# By name: where everybody is, and the stages that come of it. A critic on part of the actor needs two ranks of each,
# hence processes: test_rlhf_ray has it.
PLACEMENTS = {
    "all on one": (
        placed(actor="0", critic="0", reference="0", reward="0", rollout="0", env="0"),
        (
            "sync",
            "rollout",
            "infer 1",
            "infer 2",
            "infer 3",
            "infer 4",
            "learn 1",
            "learn 2",
        ),
    ),
    "actor and rollout share": (
        placed(actor="0", critic="1", reference="2", reward="3", rollout="0", env="0"),
        ("sync", "rollout", "infer", "learn"),
    ),
    "in pairs": (
        placed(
            actor="0", critic="1", reference="0", reward="1", rollout="0-1", env="0"
        ),
        ("sync", "rollout", "infer 1", "infer 2", "learn"),
    ),
    "one to one to one": (
        placed(actor="1", critic="2", reference="1", reward="2", rollout="0", env="0"),
        ("sync", "rollout", "infer", "learn"),
    ),
    "uneven": (
        placed(
            actor="0", critic="3", reference="1", reward="0", rollout="0-2", env="3"
        ),
        ("sync", "rollout", "infer 1", "infer 2", "learn"),
    ),
    "reward on a CPU": (
        placed(
            actor="0", critic="0", reference="1", reward="cpu", rollout="0-1", env="cpu"
        ),
        ("sync", "rollout", "infer 1", "infer 2", "learn 1", "learn 2"),
    ),
}


# Placements of the default tests: one in turns on shared accelerators, and one with ranks of different numbers
DEFAULT = ("actor and rollout share", "uneven")


def ended(output: Path, *overrides: str) -> Finished:
    return train("rlhf_tiny", output, *SMALL, *overrides)


@pytest.fixture(scope="module")
def first(
    models: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Finished:
    return ended(
        tmp_path_factory.mktemp("first"), *models, *PLACEMENTS["all on one"][0]
    )


def weights(folder: Path, kind: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = kind.from_pretrained(folder).state_dict()
    return found


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_reference_without_a_dtype_is_the_actor_before_the_first_update(
    dtype: str, first: Finished, models: tuple[str, ...], tmp_path: Path
) -> None:
    run = first
    if dtype != "fp32":
        job = (*models, *PLACEMENTS["all on one"][0], f"actor.compute={dtype}")
        run = ended(tmp_path, *job, "runner.total_iterations=1")
    assert run.metrics()[0]["actor/kl_reference"] == 0.0


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow)
        for name in PLACEMENTS
        if name != "all on one"
    ],
)
def test_every_placement_makes_the_same_update(
    name: str, first: Finished, models: tuple[str, ...], tmp_path: Path
) -> None:
    where, stages = PLACEMENTS[name]
    run = ended(tmp_path, *models, *where)
    assert run.code == 0, run.err
    assert run.folder is not None
    assert first.folder is not None
    for ours, theirs in zip(run.metrics(), first.metrics(), strict=True):
        for number in NUMBERS:
            assert ours[number] == pytest.approx(theirs[number], rel=1e-4, abs=1e-6), (
                number
            )
    seconds = {
        metric.removeprefix("time/").removesuffix("_s").replace("_", " ")
        for metric in run.metrics()[0]
    }
    assert set(stages) <= seconds
    for model, kind in (
        ("policy", AutoModelForCausalLM),
        ("critic", AutoModelForSequenceClassification),
    ):
        ours_weights, theirs_weights = (
            weights(run.folder / model, kind),
            weights(first.folder / model, kind),
        )
        for key, tensor in theirs_weights.items():
            # A judge scores what has come so far, so rounding depends on timing, and Adam makes a step of each gradient
            # near 0: single numbers may differ by some of it, the tensor may not.
            assert torch.dist(
                ours_weights[key], tensor
            ) <= 1e-4 * torch.linalg.vector_norm(tensor), key


def test_reward_rises_at_bounded_divergence(
    models: tuple[str, ...], tmp_path: Path
) -> None:
    """The policy learns to write digits, as the reward model likes it, and stays near the reference."""
    asked = ("algorithm.prompts=8", "runner.total_iterations=14", "actor.ema_decay=0.5")
    run = ended(tmp_path, *models, *PLACEMENTS["in pairs"][0], *asked)
    assert run.code == 0, run.err
    lines = run.metrics()
    assert lines[-1]["actor/reward"] > 1.5 * lines[0]["actor/reward"]
    assert abs(lines[0]["actor/kl_reference"]) < 1e-3, (
        "the actor begins as the reference"
    )
    assert 1.0 < lines[-1]["actor/kl_reference"] < 20.0
    assert (
        lines[-1]["critic/explained_variance"] > lines[0]["critic/explained_variance"]
    )
    assert all(
        line["actor/reward/reward"] == pytest.approx(line["actor/reward"])
        for line in lines
    )
    assert run.folder is not None
    samples = [
        json.loads(line)
        for line in (run.folder / "samples.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    ]
    assert [sample["iteration"] for sample in samples] == [
        i for i in range(1, 15) for _ in range(4)
    ]
    ends = [(samples[4 * i]["reward"], samples[4 * i + 3]["reward"]) for i in range(14)]
    assert ends == [
        (line["actor/reward_min"], line["actor/reward_max"]) for line in lines
    ], "the reward model's"
    assert all("?" in sample["prompt"] and sample["answer"] for sample in samples)
    assert samples[-1]["prompt"] in (run.folder / "report.html").read_text(
        encoding="utf-8"
    )
    assert {"policy", "policy_ema", "critic"} <= {
        path.name for path in run.folder.iterdir()
    }


@pytest.mark.slow
def test_other_algorithms_have_a_reference_too(
    models: tuple[str, ...], tmp_path: Path
) -> None:
    penalty = (
        "algorithm.kl_in=loss",
        "algorithm.kl_estimator=k3",
        "algorithm.kl_coef=0.05",
    )
    where = (
        *placed(actor="0", reference="0", rollout="0", env="0"),
        "~cluster.component_placement.critic",
        "~cluster.component_placement.reward",
        "~env.rewards",
        "env.task=tests.e2e.text_tasks:SmallLetters",
    )
    run = ended(
        tmp_path,
        # A block of a component that is not placed would be refused
        *(word for word in models if not word.startswith("reward.")),
        *where,
        *penalty,
        "algorithm.name=reinforce_pp",
        "runner.total_iterations=2",
    )
    assert run.code == 0, run.err
    first, last = run.metrics()[0], run.metrics()[-1]
    assert abs(first["actor/kl_reference"]) < 1e-3 < last["actor/kl_reference"]


def test_rewards_of_several_kinds_are_added(
    models: tuple[str, ...], tmp_path: Path
) -> None:
    """A model and a function, which has no accelerator, each with its weight; the critic is a head on the actor."""
    config = yaml.safe_load(
        (ROOT / "configs/rlhf_tiny.yaml").read_text(encoding="utf-8")
    )
    config["defaults"] = [{"/model@actor.model": "tiny"}, "_self_"]
    config["reward"] = {
        "digits": {
            **config["reward"],
            "model": {"path": models[1].partition("=")[2]},
            "weight": 2.0,
        },
        "letters": {
            "function": "tests.e2e.text_tasks:share_of_small_letters",
            "weight": -0.5,
        },
    }
    everybody = dict.fromkeys(("actor", "reference", "rollout", "env"), 0)
    config["cluster"]["component_placement"] = {
        **everybody,
        "reward.digits": 1,
        "reward.letters": "cpu",
    }
    config["critic"]["on_actor"] = True
    (tmp_path / "rlhf_tiny.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    run = ended(
        tmp_path / "runs",
        "--config-path",
        str(tmp_path),
        models[0],
        "runner.total_iterations=2",
    )
    assert run.code == 0, run.err
    for line in run.metrics():
        parts = (
            2.0 * line["actor/reward/reward.digits"]
            - 0.5 * line["actor/reward/reward.letters"]
        )
        assert line["actor/reward"] == pytest.approx(parts, rel=1e-5)
        assert line["actor/value_loss"] > 0.0


ON_CPU = placed(
    actor="0", critic="1", reference="0", reward="cpu", rollout="0-1", env="0"
)


@pytest.mark.parametrize(
    ("function", "code"),
    [
        ("tests.odd_rewards:not_a_number", "reward-not-finite"),
        ("tests.odd_rewards:exits", "reward-died"),
    ],
)
def test_a_scorer_that_fails_ends_the_run_and_is_named(
    function: str, code: str, models: tuple[str, ...], tmp_path: Path
) -> None:
    run = ended(tmp_path, models[0], *ON_CPU, f"reward.function={function}")
    assert run.code == 1
    assert f"[{code}]" in run.err
    assert "reward rank 0" in run.err
    assert "stage rollout, policy version 0" in run.err, (
        "it keeps up with rollout, where no component is in its way"
    )


@pytest.mark.slow
def test_what_scores_is_switched_by_a_line(
    models: tuple[str, ...], scorer: Path, tmp_path: Path
) -> None:
    """A function, and the model behind HTTP, which is looked for before anything is sampled."""
    once = (models[0], *ON_CPU, "runner.total_iterations=1")
    with serving(scorer) as url:
        by_url = ended(tmp_path / "url", *once, f"reward.url={url}")
    by_function = ended(
        tmp_path / "function", *once, "reward.function=tests.odd_rewards:shortness"
    )
    for run, low, high in (
        (by_url, 0, 4),
        (by_function, -100, 0),
    ):  # some digits, and letters too
        assert run.code == 0, run.err
        (line,) = run.metrics()
        assert line["reward/samples"] == line["rollout/answers"]
        assert low < line["actor/reward"] < high
    down = ended(tmp_path / "down", *once, f"reward.url={url}", "+reward.retries=0")
    assert down.code != 0
    assert "reward-endpoint-down" in down.err

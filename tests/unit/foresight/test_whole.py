"""Predictions of many samples compute generation and passes as a whole: the same seconds as message by message."""

from __future__ import annotations

import dataclasses
import random

import pytest

from rlplace.config import compose
from rlplace.foresight.predict import Prediction, predict
from rlplace.foresight.profile import PROCESSOR, Profile
from rlplace.foresight.show import predicted_seconds
from rlplace.jobs.language_model.performance import ranks, whole
from rlplace.jobs.language_model.performance.published import published_profile
from rlplace.runtime.prepare import Prepared, prepare_composed

_PLACE = "cluster.component_placement."
_CPU = ("cluster=8xH100", f"{_PLACE}env=cpu", "runner.eval_every=0")
_8B = ("model@actor.model=llama_3_8b", "rollout.engine=vllm")
JOBS = {
    "collocated": ("grpo_qwen3_8b", "algorithm.prompts=32"),
    "without vLLM": (
        "grpo_qwen3_8b",
        "algorithm.prompts=32",
        "rollout.engine=transformers",
    ),
    "few sequences": (
        "grpo_qwen3_8b",
        "algorithm.prompts=64",
        "rollout.step_sequences=20",
    ),
    "disaggregated": ("disaggregated_grpo_llm", *_8B, *_CPU),
    "hybrid": ("hybrid_grpo_llm", *_8B, *_CPU),
    "five components": ("rlhf_tiny", *_CPU),
    "one version ahead": (
        "disaggregated_grpo_llm",
        *_8B,
        *_CPU,
        "algorithm.max_staleness=1",
    ),
}
_BOUND = 0.01


def prepared(*words: str) -> Prepared:
    (composed,) = compose.with_hydra(["--config-name", *words])
    return prepare_composed(composed)


def measured(found: Prepared, seed: int) -> Profile:
    """Return a profile with published rates, and lengths of texts as a run measures them."""
    profile = published_profile(found.config, found.plan, found.case)
    draw = random.Random(seed)
    longest = found.config.algorithm.max_new_tokens
    prompts = tuple(float(draw.randint(8, 40)) for _ in range(64))
    answers = tuple(min(longest, draw.lognormvariate(4, 1)) for _ in range(512))
    samples = {"env.prompt_tokens": prompts, "rollout.answer_tokens": answers}
    return dataclasses.replace(profile, samples=samples)


def both(
    found: Prepared, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> tuple[Prediction, Prediction]:
    """Return two predictions: message by message, and computed as a whole."""
    predictions = []
    for many in (10**9, 1):
        monkeypatch.setattr(whole, "MANY", many)
        monkeypatch.setattr(ranks, "MANY", many)
        predictions.append(predict(found.config, found.plan, found.case, profile))
    return predictions[0], predictions[1]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("job", JOBS)
def test_whole_predictions_are_within_one_percent(
    job: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = prepared(*JOBS[job])
    full, quick = both(found, measured(found, seed), monkeypatch)
    expected = predicted_seconds(full)
    assert predicted_seconds(quick)["iteration"] == pytest.approx(
        expected["iteration"], rel=_BOUND
    )
    for stage, seconds in predicted_seconds(quick).items():
        near = pytest.approx(expected[stage], abs=_BOUND * expected["iteration"])
        assert seconds == near, stage
    assert set(quick.costs.spent) <= set(full.costs.spent)
    assert full.numbers["rollout/tokens"] == quick.numbers["rollout/tokens"]


def test_where_processors_do_the_work_each_message_is_simulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = prepared(*JOBS["collocated"])
    profile = measured(found, 0)
    costs = {
        name: dataclasses.replace(curve, on=PROCESSOR)
        for name, curve in profile.costs.items()
    }
    full, quick = both(found, dataclasses.replace(profile, costs=costs), monkeypatch)
    assert dict(full.numbers) == dict(quick.numbers)


def test_few_processors_are_shared_message_by_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = prepared(*JOBS["collocated"])
    profile = measured(found, 0)
    busy = dataclasses.replace(profile, machine=profile.machine | {"cores": 2})
    full, quick = both(found, busy, monkeypatch)
    assert quick.numbers["time/rollout_s"] == pytest.approx(
        full.numbers["time/rollout_s"]
    )

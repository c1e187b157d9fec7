"""Predictions of many samples compute generation and passes as a whole: the same seconds as message by message."""

from __future__ import annotations

import dataclasses
import random

import pytest

from rlplace.config import compose
from rlplace.contract.planning import make_plan, memory_case
from rlplace.foresight.loads import Size
from rlplace.foresight.predict import Prediction, predict
from rlplace.foresight.profile import PROCESSOR, Profile
from rlplace.foresight.search import Search, completed
from rlplace.foresight.show import predicted_seconds
from rlplace.foresight.space import Layout, Space
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


SCORED = {
    "five components": ("rlhf_tiny", *_CPU),
    "a reference with the actor": (
        "grpo_qwen3_8b",
        "algorithm.prompts=32",
        "algorithm.kl_coef=0.001",
        f"{_PLACE}reference={{same_as: actor}}",
        "reference.enable_offload=true",
    ),
    "a reference during rollout": (
        "grpo_qwen3_8b",
        "algorithm.prompts=32",
        "algorithm.kl_coef=0.001",
        f"{_PLACE}actor=0-3",
        f"{_PLACE}rollout=4-7",
        f"{_PLACE}reference={{same_as: actor}}",
        "reference.enable_offload=true",
    ),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("job", SCORED)
def test_passes_in_one_sum_take_the_seconds_of_each_pass(
    job: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = prepared(*SCORED[job])
    profile = measured(found, seed)
    predictions = []
    for many in (10**9, 1):
        monkeypatch.setattr(ranks, "MANY", many)
        predictions.append(predict(found.config, found.plan, found.case, profile))
    singly, summed = predictions
    assert summed.seconds == pytest.approx(singly.seconds, rel=1e-9)
    assert summed.queues == singly.queues
    assert summed.costs.spent == pytest.approx(singly.costs.spent)


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


def layouts(space: Space) -> list[Layout]:
    """Return plans of 8 accelerators that share sizes: rollout on those of the actor, and beside them."""
    found = []
    now = space.current()
    for actor, rollout, first in (
        (8, 8, 0),
        (4, 4, 4),
        (4, 8, 0),
        (8, 4, 0),
        (4, 4, 0),
        (2, 4, 4),
        (4, 2, 4),
    ):
        own = {"actor": Size(actor, actor), "rollout": Size(rollout, rollout)}
        starts = {**now.starts, "actor": 0, "rollout": first}
        sizes = {**now.sizes, **own}
        found.append(Layout(mode=now.mode, sizes=sizes, starts=starts))
    return found


def test_a_sum_of_known_stages_is_the_whole_prediction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(whole, "MANY", 1)
    monkeypatch.setattr(ranks, "MANY", 1)
    job = prepared(*JOBS["collocated"])
    space = Space(job.config, job.plan)
    profile = measured(job, 0)
    search = Search(space, profile)
    simulated = []
    for layout in layouts(space):
        config = space.config_of(layout)
        plan = make_plan(config, space.plan.topology)
        case = memory_case(plan, config)
        before = len(search.predicted)
        brief = search.predict(config, plan, case, layout)
        assert brief.brief
        assert len(search.predicted) == before + 1
        fresh = dataclasses.replace(profile)
        full = predict(config, plan, case, fresh)
        assert brief.seconds == pytest.approx(full.seconds, rel=1e-9)
        simulated.append(set(brief.costs.spent))
    # Of the last plan, each size of actor and of rollout was known: only weights are sent
    assert "actor.learn/sharded_micro_batch" in simulated[0]
    assert {"actor.push_weights/rest"} <= simulated[-1]


@pytest.mark.parametrize("seed", [0, 1])
def test_samples_that_come_together_take_as_long_one_version_ahead(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "MANY", 1)
    monkeypatch.setattr(ranks, "MANY", 1)
    job = prepared(*JOBS["one version ahead"])
    profile = measured(job, seed)
    one_by_one = predict(job.config, job.plan, job.case, profile)
    together = predict(job.config, job.plan, job.case, profile, queues=False)
    assert one_by_one.queues["samples"] > 0
    assert not together.queues
    for name, seconds in one_by_one.numbers.items():
        assert together.numbers[name] == pytest.approx(seconds, rel=1e-9, abs=1e-9)
    assert together.costs.spent == pytest.approx(one_by_one.costs.spent)


@pytest.mark.parametrize("job", ["disaggregated", "one version ahead"])
def test_passes_on_accelerators_of_its_own_take_the_seconds_of_the_slowest(
    job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "MANY", 1)
    monkeypatch.setattr(ranks, "MANY", 1)
    found = prepared(*JOBS[job])
    profile = measured(found, 2)
    alone = predict(found.config, found.plan, found.case, profile)
    monkeypatch.setattr(ranks.TextSite, "has_own_devices", lambda *_: False)
    shared = predict(found.config, found.plan, found.case, profile)
    assert alone.numbers == pytest.approx(shared.numbers, rel=1e-9)


def test_what_predictions_share_does_not_change_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(whole, "MANY", 1)
    monkeypatch.setattr(ranks, "MANY", 1)
    job = prepared(*JOBS["disaggregated"])
    profile = measured(job, 0)
    first, again = (predict(job.config, job.plan, job.case, profile) for _ in range(2))
    assert first.numbers == again.numbers
    assert first.costs.spent == pytest.approx(again.costs.spent)
    assert first.costs.missing == again.costs.missing


def test_what_a_search_shows_is_predicted_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(whole, "MANY", 1)
    monkeypatch.setattr(ranks, "MANY", 1)
    job = prepared(*JOBS["collocated"])
    answer = Search(Space(job.config, job.plan), measured(job, 0)).run(keep=3)
    assert answer.best is not None
    shown = [*answer.found]
    shown += [answer.current] if answer.current else []
    for found in shown:
        assert not found.prediction.brief
        assert "time/learn_s" in found.prediction.numbers
        assert found.value == pytest.approx(found.seconds, rel=1e-9)
        assert completed(found) is found


def test_generation_is_simulated_once_for_all_sizes_of_an_actor_elsewhere() -> None:
    job = prepared(*JOBS["collocated"])
    space = Space(job.config, job.plan)
    search = Search(space, measured(job, 0))
    generation = []
    for layout in layouts(space):
        plan = make_plan(space.config_of(layout), space.plan.topology)
        stages = dict(
            zip(plan.schedule.stages, search.keys(layout, plan.schedule), strict=True)
        )
        generation.append(stages["rollout"])
    # Four rollout ranks beside an actor with four ranks or two, which stays where it is
    assert generation[1] == generation[5]
    # An actor that leaves before generation takes part in the stage
    assert generation[0] != generation[2]

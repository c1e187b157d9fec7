"""Profiles from published rates: sums that can be done by hand, and what they are refused for."""

from __future__ import annotations

import pytest

from rlplace.config import compose
from rlplace.errors import ConfigError
from rlplace.foresight.known import NOTHING_MEASURED, find_profile, foreign
from rlplace.foresight.model import model_of
from rlplace.foresight.profile import ACCELERATOR, ASSUMED, Profile, read_profile
from rlplace.jobs.language_model.performance.published import (
    published,
    published_profile,
)
from rlplace.placement.machines.products import products
from rlplace.runtime.prepare import Prepared, prepare_composed

GRPO_8B = (
    "disaggregated_grpo_llm",
    "model@actor.model=llama_3_8b",
    "rollout.engine=vllm",
    "profile=published",
)
WEIGHTS = 8.03e9


def job(config: str, *words: str) -> Prepared:
    (composed,) = compose.with_hydra(["--config-name", config, *words])
    return prepare_composed(composed)


def made(*words: str) -> Profile:
    found = job(*GRPO_8B, *words)
    return published_profile(found.config, found.plan, found.case)


def seconds(profile: Profile, cost: str, size: float) -> float:
    return next(
        point.cpu_s for point in profile.costs[cost].points if point.size == size
    )


def test_a_token_step_reads_the_weights_and_a_pass_computes_on_them() -> None:
    profile = made("cluster=8xH100")
    # 16 GB at 0.6 of 3,350 GB/s, and 3 ms; keys and values of one sequence are small.
    assert seconds(profile, "rollout.generate/decode", 1) == pytest.approx(
        0.003 + 2 * WEIGHTS / (3350e9 * 0.6), rel=0.02
    )
    # 6 operations for each weight and token at 0.4 of 989 TFLOP/s; two ranks gather weights over NVLink.
    gathered_s = 1.5 * 4 * WEIGHTS / (450e9 * 0.7)
    learned_s = 6 * WEIGHTS * 65536 / (989e12 * 0.4)
    assert seconds(profile, "actor.learn/micro_batch", 65536) == pytest.approx(
        learned_s + gathered_s, rel=0.02
    )
    assert profile.costs["actor.learn/micro_batch"].on == ACCELERATOR
    assert {curve.source for curve in profile.costs.values()} == {ASSUMED}
    assert (
        max(profile.samples["rollout.answer_tokens"])
        == job(*GRPO_8B).config.algorithm.max_new_tokens
    )


def test_two_accelerators_of_an_engine_halve_its_reading() -> None:
    where = (
        "cluster.component_placement.rollout={placement: 2-3, accelerators_per_rank: 2}"
    )
    both = made("cluster=8xH100", where, "cluster.component_placement.env=cpu")
    one = made("cluster=8xH100")
    halved = (seconds(one, "rollout.generate/decode", 1) - 0.003) / 2
    assert seconds(both, "rollout.generate/decode", 1) - 0.003 == pytest.approx(
        halved, rel=0.01
    )


def test_the_rates_are_those_of_the_slowest_accelerator_and_say_that_nothing_was_measured() -> (
    None
):
    found = job(*GRPO_8B, "cluster=8xH100")
    profile = find_profile(found.config, found.plan, found.case)
    assert profile is not None
    assert foreign(profile) == [NOTHING_MEASURED]
    assert set(published()) == set(products()), (
        "what has a known memory has known rates"
    )


@pytest.mark.parametrize(
    ("config", "words", "why"),
    [
        ("hybrid_ppo", ("cluster=8xH100",), "bound by calls"),
        ("disaggregated_grpo_llm", (), "nothing is published of these accelerators"),
    ],
)
def test_what_no_table_has_rates_of_is_refused(
    config: str, words: tuple[str, ...], why: str
) -> None:
    found = job(config, *words)
    with pytest.raises(ConfigError, match=why) as caught:
        model_of(found.config).published_profile(found.config, found.plan, found.case)
    assert caught.value.problems[0].code == "nothing-published"


def test_a_published_profile_can_be_kept_and_edited() -> None:
    import json

    profile = made("cluster=8xH100")
    assert (
        read_profile(json.dumps(profile.record()), file="p.json").costs == profile.costs
    )


@pytest.mark.parametrize(
    ("product", "declared", "pushed_gb_per_s"),
    [
        ("B200", {}, 900),  # as published
        ("H800", {}, 200),
        ("L40S", {}, 32),  # over PCIe
        ("B200", {"nvlink_gb_per_s": 450}, 450),  # what a config declares counts
    ],
)
def test_links_that_no_config_declares_are_those_that_are_published(
    product: str, declared: dict[str, float], pushed_gb_per_s: float
) -> None:
    node = {"count": 1, "accelerators": 8, "product": product, **declared}
    said = ", ".join(f"{key}: {value}" for key, value in node.items())
    words = (
        "cluster.accelerator.kind=cuda",
        "cluster.accelerators_per_node=auto",
        f"cluster.nodes=[{{{said}}}]",
    )
    profile = made(*words)
    ranks = job(*GRPO_8B, *words).plan.placement.world_size("actor")
    seconds_ = seconds(profile, "actor.push_weights/rest", 0)
    assert seconds_ == pytest.approx(
        2 * WEIGHTS / ranks / (pushed_gb_per_s * 0.7e9), rel=0.01
    )

"""Profiles from published rates: sums that can be done by hand, and what they are refused for."""

from __future__ import annotations

import json

import pytest

from rlplace.cli.search import main as search
from rlplace.config import compose
from rlplace.errors import ConfigError
from rlplace.foresight.known import (
    HOST_ASSUMED,
    NOTHING_MEASURED,
    find_profile,
    foreign,
)
from rlplace.foresight.model import model_of
from rlplace.foresight.predict import predict
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
MULTIPLIED = WEIGHTS - 128256 * 4096


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
    # 16 GB, without the embedding, at 0.75 of 3,350 GB/s; 3 ms, and 0.07 ms for each of 32 layers.
    assert seconds(profile, "rollout.generate/decode", 1) == pytest.approx(
        0.003 + 32 * 7e-5 + 2 * MULTIPLIED / (3350e9 * 0.75), rel=0.02
    )
    # 6 operations for each weight and token, of which matrices of 4,096 columns and other work leave about 0.4
    learned = 6 * MULTIPLIED * 65536
    reached = learned / seconds(profile, "actor.learn/micro_batch", 65536) / 989e12
    assert 0.35 < reached < 0.5
    # A short pass of two ranks takes as long as the weights and gradients need over NVLink.
    gathered_s = 3 * 2 * WEIGHTS / (450e9 * 0.7)
    assert seconds(profile, "actor.learn/sharded_micro_batch", 64) == pytest.approx(
        gathered_s, rel=0.02
    )
    assert profile.costs["actor.learn/micro_batch"].on == ACCELERATOR
    assert {curve.source for curve in profile.costs.values()} == {ASSUMED}
    assert (
        max(profile.samples["rollout.answer_tokens"])
        == job(*GRPO_8B).config.algorithm.max_new_tokens
    )


def test_recomputed_layers_pass_four_times_and_frozen_weights_three() -> None:
    def learned(*words: str) -> float:
        return seconds(made("cluster=8xH100", *words), "actor.learn/micro_batch", 8192)

    kept = learned("actor.checkpointing=false")
    assert learned("actor.checkpointing=true") == pytest.approx(kept * 4 / 3)
    factors = ("actor.lora_rank=16", "actor.optimizer.kind=adamw")
    frozen = learned("actor.checkpointing=true", *factors)
    # The factors read and write outputs of linear layers once more.
    assert kept < frozen < kept * 1.3


def test_a_step_of_the_optimizer_is_shared_by_the_ranks() -> None:
    profile = made("cluster=8xH100")
    one, two = (seconds(profile, "actor.learn/exchange", n) for n in (1, 2))
    assert one == pytest.approx(24 * WEIGHTS / (3350e9 * 0.75), rel=0.02)
    assert two == pytest.approx(one / 2)


def test_search_needs_no_measurement_and_says_what_is_assumed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--config-name", *GRPO_8B, "cluster=8xH100", "seconds=30"]
    words += ["cluster.component_placement.env=cpu"]
    assert search(words) == 0
    shown = capsys.readouterr().out
    assert "assumed, not measured: what processors do" in shown
    assert "proven" in shown
    assert search([*words, "--format", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["proven"]
    assert answer["notes"] == [NOTHING_MEASURED, HOST_ASSUMED]


@pytest.mark.parametrize(
    "words",
    [
        ("grpo_qwen3_8b",),
        ("grpo_llama_70b", "cluster=8xH100"),
        (
            "rlhf_tiny",
            "cluster=8xH100",
            "cluster.component_placement.env=cpu",
            "runner.eval_every=0",
        ),
        # Ranks that score the same samples send their scores once.
        (
            "grpo_qwen3_8b",
            "algorithm.kl_coef=0.01",
            "actor.enable_offload=true",
            "reference.enable_offload=true",
            "+cluster.component_placement.reference={placement: all, tensor_parallel_size: 4}",
        ),
    ],
    ids=("grpo 8b", "grpo 70b", "five components", "reference of four parts"),
)
def test_a_published_profile_has_every_cost_that_its_plan_asks_for(
    words: tuple[str, ...],
) -> None:
    found = job(*words, "profile=published")
    profile = published_profile(found.config, found.plan, found.case)
    prediction = predict(found.config, found.plan, found.case, profile)
    assert dict(prediction.costs.missing) == {}


def test_two_accelerators_of_an_engine_halve_its_reading() -> None:
    where = (
        "cluster.component_placement.rollout={placement: 2-3, accelerators_per_rank: 2}"
    )
    both = made("cluster=8xH100", where, "cluster.component_placement.env=cpu")
    one = made("cluster=8xH100")
    # What two accelerators do not halve: 3 ms, kernels of 32 layers, 20 us; and two sums in each layer.
    fixed_s = 0.003 + 32 * 7e-5 + 2e-5
    summed_s = 2 * 32 * 1.5e-5
    halved = (seconds(one, "rollout.generate/decode", 1) - fixed_s) / 2
    assert seconds(both, "rollout.generate/decode", 1) - fixed_s == pytest.approx(
        halved + summed_s, rel=0.02
    )


def test_the_rates_are_those_of_the_slowest_accelerator_and_say_that_nothing_was_measured() -> (
    None
):
    found = job(*GRPO_8B, "cluster=8xH100")
    profile = find_profile(found.config, found.plan, found.case)
    assert profile is not None
    assert foreign(profile) == [NOTHING_MEASURED, HOST_ASSUMED]
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
    # Each rank gets all weights, in bf16, at 0.7 of the link
    seconds_ = seconds(profile, "actor.push_weights/rest", 0)
    assert seconds_ == pytest.approx(2 * WEIGHTS / (pushed_gb_per_s * 0.7e9), rel=0.01)

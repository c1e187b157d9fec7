"""Scorers that are models: what they give is what transformers says, however they lie in memory and over ranks."""

from __future__ import annotations

import copy
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlplace.comm.weights.host_sync import WeightSender
from rlplace.comm.weights.shards import Shard, row_blocks
from rlplace.errors import (
    ChannelBroken,
    ChannelMisuse,
    ChannelTimeout,
    NotResident,
    RewardError,
)
from rlplace.models.tokenizer import Tokenizer
from rlplace.placement.flow import deliver_by_rank
from rlplace.placement.schedule import Residency
from rlplace.stopwatch import Stopwatch
from rlplace.tokens import Sample
from rlplace.workers.arguments import REFERENCE_WEIGHTS
from rlplace.workers.roles.scorer import ReferenceWorker
from rlplace.workers.training.samples import sizes_of
from tests.lm_ranks import made_up_samples
from tests.rollout_stage import Ledger
from tests.scorer_ranks import (
    TIMEOUT_S,
    Said,
    ScorerScenario,
    give,
    said,
    score_by_ranks,
    scored_by,
    sole_scorer,
    values,
    with_text,
)
from tests.tiny_lm import tiny_model, tiny_reward_model
from tests.tiny_tokenizer import tiny_tokenizer

WAYS = {  # how a model lies in memory
    "whole": {"sharded": False},
    "whole on the host": {"sharded": False, "on_host": True},
    "sharded": {"sharded": True},
    "sharded on the host": {"sharded": True, "on_host": True},
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("policy"), "qwen3")


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory, policy: Path) -> Path:
    return tiny_reward_model(tmp_path_factory.mktemp("scorer"), like=policy)


def flat(groups: list[tuple[Sample, ...]]) -> list[Sample]:
    return [sample for group in groups for sample in group]


@torch.no_grad()
def logprobs(
    folder: Path, groups: list[tuple[Sample, ...]], temperature: float = 1.0
) -> Said:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    found = {}
    for s in flat(groups):
        tokens = torch.tensor(s.tokens, dtype=torch.int64)
        each = torch.log_softmax(
            model(tokens[None]).logits[0, :-1] / temperature, -1
        ).gather(1, tokens[1:, None])
        found[s.group, s.sample] = each[:, 0][torch.tensor(s.mask[1:])].tolist()
    return found


@torch.no_grad()
def scores(folder: Path, groups: list[tuple[Sample, ...]]) -> Said:
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, attn_implementation="eager"
    )
    return {
        (s.group, s.sample): model(torch.tensor(s.tokens[None]).long())
        .logits[0]
        .tolist()
        for s in flat(groups)
    }


def assert_same(found: Said, expected: Said) -> None:
    assert found.keys() == expected.keys()
    assert [len(found[place]) for place in expected] == [
        len(each) for each in expected.values()
    ]
    np.testing.assert_allclose(values(found), values(expected), atol=2e-5, rtol=0)


@pytest.mark.parametrize("way", WAYS)
def test_a_reference_says_what_transformers_says_at_the_temperature(
    policy: Path, way: str
) -> None:
    scenario = ScorerScenario(model=policy, block=WAYS[way], temperature=0.5)
    assert_same(scored_by(scenario), logprobs(policy, made_up_samples(), 0.5))


@pytest.mark.parametrize("way", WAYS)
def test_a_reward_model_says_what_transformers_says(
    policy: Path, scorer: Path, way: str
) -> None:
    scenario = ScorerScenario(
        model=policy,
        component="reward",
        block={"model": {"path": str(scorer)}, **WAYS[way]},
    )
    assert_same(scored_by(scenario), scores(scorer, made_up_samples()))


def in_one(samples: tuple[Sample, ...]) -> Sample:
    """One sample whose conversations are those of all `samples`."""
    names = ("tokens", "mask", "logprobs", "versions")
    joined = {n: np.concatenate([getattr(s, n) for s in samples]) for n in names}
    parts = tuple(len(sample.tokens) for sample in samples)
    return dataclasses.replace(samples[0], parts=parts, **joined)


def test_each_conversation_of_an_episode_is_scored_alone(
    policy: Path, scorer: Path
) -> None:
    groups = made_up_samples()
    led = [(in_one(group[:2]), group[2], in_one(group[2:])) for group in groups]
    led = [
        tuple(dataclasses.replace(s, sample=n) for n, s in enumerate(group))
        for group in led
    ]
    alone = logprobs(policy, groups)
    expected: Said = {}
    for group in range(len(groups)):
        expected[group, 0] = alone[group, 0] + alone[group, 1]
        expected[group, 1] = alone[group, 2]
        expected[group, 2] = alone[group, 2] + alone[group, 3]
    assert_same(scored_by(ScorerScenario(model=policy), led), expected)
    # A reward model reads the last conversation
    rewarding = ScorerScenario(
        model=policy, component="reward", block={"model": {"path": str(scorer)}}
    )
    whole = scores(scorer, groups)
    last = {(group, n): whole[group, n + 1] for group, n in expected}
    assert_same(scored_by(rewarding, led), last)


def test_a_reference_is_shown_what_the_policy_was_shown() -> None:
    (sample, *_) = flat(made_up_samples())
    seen = dataclasses.replace(sample, images=(b"a file",))
    assert (
        ReferenceWorker._input(object.__new__(ReferenceWorker), seen).images
        == seen.images
    )


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_say_the_same_of_groups_that_come_one_by_one(
    policy: Path, way: str
) -> None:
    for iteration, each in enumerate(
        score_by_ranks(ScorerScenario(model=policy, block=WAYS[way], ranks=2))
    ):
        assert_same(each, logprobs(policy, made_up_samples(iteration)))


@pytest.mark.parametrize(
    ("way", "ranks", "tokens"),
    [
        ("whole", 4, 2),
        pytest.param("sharded on the host", 4, 1, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_cut_a_model_and_tokens_say_the_same(
    policy: Path, way: str, ranks: int, tokens: int
) -> None:
    scenario = ScorerScenario(
        model=policy,
        block=WAYS[way],
        ranks=ranks,
        tensor_parallel=2,
        context_parallel=tokens,
    )
    for iteration, each in enumerate(score_by_ranks(scenario)):
        assert_same(each, logprobs(policy, made_up_samples(iteration)))


# ── as groups come, and as they do not ───────────────────────────────────────────────────────────────────────────────


def test_groups_that_come_late_are_scored_as_they_come(policy: Path) -> None:
    scenario, groups = ScorerScenario(model=policy), made_up_samples()
    with sole_scorer(scenario) as (scorer, channels), ThreadPoolExecutor(1) as thread:
        inferring = thread.submit(scorer.infer, 0, 0)
        found: Said = {}
        for group in reversed(groups):
            give(scenario, channels, [group])
            found |= said(
                scenario, channels, len(group)
            )  # while the others are not even given
        metrics = inferring.result(timeout=TIMEOUT_S)
    assert_same(found, logprobs(policy, groups))
    assert metrics["reference/samples"].value == 12


def test_a_group_of_another_iteration_is_an_error(policy: Path) -> None:
    scenario, groups = ScorerScenario(model=policy), made_up_samples()
    with sole_scorer(scenario) as (scorer, channels):
        give(scenario, channels, [groups[1], groups[1]])
        with pytest.raises(ChannelMisuse, match="not of this iteration") as caught:
            scorer.infer(0, 0)
    assert caught.value.code == "out-of-step"


def test_a_score_that_is_no_number_is_named(policy: Path, tmp_path: Path) -> None:
    broken = tiny_reward_model(tmp_path, like=policy)
    weights = load_file(broken / "model.safetensors")
    save_file(
        weights | {"score.weight": weights["score.weight"] * float("nan")},
        broken / "model.safetensors",
    )
    scenario = ScorerScenario(
        model=policy, component="reward", block={"model": {"path": str(broken)}}
    )
    with pytest.raises(
        RewardError, match=r"of sample \d of group \d is not a finite number"
    ) as caught:
        scored_by(scenario)
    assert (caught.value.code, caught.value.problem.key) == (
        "score-not-finite",
        "reward",
    )


class _Store:
    """Of a rank 0 that brings nothing."""

    def check(self, keys: list[str]) -> bool:
        return False


def test_ranks_wait_for_rank_0_with_a_deadline_and_not_beyond_the_end_of_the_run(
    policy: Path,
) -> None:
    with sole_scorer(ScorerScenario(model=policy)) as (scorer, _):
        ranks = copy.copy(scorer._ranks)
        ranks.rank, ranks.world_size, ranks.store, ranks._timeout_s = (
            1,
            2,
            _Store(),
            0.01,
        )
        with pytest.raises(
            ChannelTimeout, match="for reference rank 0 to bring samples"
        ) as late:
            ranks.wait_for_rank_0("samples")
        scorer.context.cancelled.set()
        with pytest.raises(ChannelBroken) as caught:
            ranks.wait_for_rank_0("samples")
        give(ScorerScenario(model=policy), scorer.context.channels, made_up_samples())
        with pytest.raises(ChannelBroken):
            scorer.infer(0, 0)
    assert (late.value.code, caught.value.code) == ("rank-0-late", "cancelled")


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("way", WAYS)
def test_what_is_held_is_accounted_for_and_leaves(policy: Path, way: str) -> None:
    ledger, on_host, scenario = (
        Ledger(),
        "on the host" in way,
        ScorerScenario(model=policy, block=WAYS[way]),
    )
    size = sum(
        p.nbytes for p in AutoModelForCausalLM.from_pretrained(policy).parameters()
    )
    with sole_scorer(scenario, device=ledger) as (scorer, channels):
        there = scorer.move(Residency.FULL)
        assert ledger.held_bytes() == there.accelerator_bytes
        assert there.accelerator_bytes == (
            0 if on_host else pytest.approx(size, rel=0.01)
        )
        assert there.host_bytes == (pytest.approx(size, rel=0.01) if on_host else 0)
        gone = scorer.move(Residency.OFF)
        assert (ledger.held_bytes(), gone.accelerator_bytes) == (0, 0)
        assert gone.host_bytes == pytest.approx(size, rel=0.01)
        with pytest.raises(NotResident, match="infer was called"):
            scorer.infer(0, 0)
        scorer.move(Residency.FULL)
        give(scenario, channels, made_up_samples())
        scorer.infer(0, 0)
        assert_same(said(scenario, channels, 12), logprobs(policy, made_up_samples()))
        assert (
            ledger.held_bytes() == there.accelerator_bytes
        )  # what was gathered is gone


def test_a_pass_that_does_not_fit_is_refused_before_it_begins(policy: Path) -> None:
    ledger = Ledger()
    with sole_scorer(
        ScorerScenario(model=policy, block=WAYS["sharded on the host"]), device=ledger
    ) as (scorer, _):
        ledger.limit = scorer.move(Residency.FULL).accelerator_bytes + 999
        with pytest.raises(MemoryError, match="working memory of infer"):
            scorer.infer(0, 0)


@pytest.mark.parametrize("way", WAYS)
def test_a_reference_becomes_the_actor_that_sends_itself(
    policy: Path, tmp_path: Path, way: str
) -> None:
    newer = tiny_model(tmp_path / "newer", "qwen3", seed=5)
    scenario = ScorerScenario(model=policy, block={**WAYS[way], "refresh_every": 2})
    with sole_scorer(scenario) as (scorer, channels):
        sender = WeightSender(
            channels[REFERENCE_WEIGHTS], rank=0, deliveries=deliver_by_rank(1)
        )
        shards = [
            Shard(
                names=(n,),
                dtype="float32",
                shape=tuple(w.shape),
                blocks=row_blocks(w.shape, 1),
                data=w,
            )
            for n, w in load_file(newer / "model.safetensors").items()
        ]
        assert scorer.refresh(1, 1) == {}  # not in this iteration
        with ThreadPoolExecutor(1) as thread:
            pushing = thread.submit(sender.push, 2, shards)
            scorer.refresh(2, 2)
            pushing.result()
        sender.close()
        give(scenario, channels, made_up_samples())
        scorer.infer(2, 2)
        assert_same(said(scenario, channels, 12), logprobs(newer, made_up_samples()))


# ── whose words ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_value_head_is_read_by_its_name(
    policy: Path, scorer: Path, tmp_path: Path
) -> None:
    named = tiny_reward_model(tmp_path, like=policy, head="worth")
    block = {"model": {"path": str(named)}, "head": "worth"}
    found = scored_by(ScorerScenario(model=policy, component="reward", block=block))
    assert_same(found, scores(scorer, made_up_samples()))


def test_a_reward_model_with_its_own_tokenizer_is_told_the_conversation(
    policy: Path, tmp_path: Path
) -> None:
    own = tiny_tokenizer(tiny_reward_model(tmp_path, like=policy))
    block, groups = (
        {"model": {"path": str(own)}},
        with_text(made_up_samples(), lambda s: f"{s.sample} times"),
    )
    found = scored_by(
        ScorerScenario(
            model=policy, component="reward", block=block, env={"system": "be brief"}
        ),
        groups,
    )
    tokenizer = Tokenizer.load(own)
    expected = [
        dataclasses.replace(
            sample, tokens=told, mask=told > 0, logprobs=told * 0.0, versions=told
        )
        for sample in flat(groups)
        for told in [
            tokenizer.encode(
                f"<turn>system: be brief<eos><turn>user: question {sample.group}<eos>"
                f"<turn>assistant: {sample.sample} times<eos>"
            )
        ]
    ]
    assert_same(found, scores(own, [tuple(expected)]))


@pytest.mark.parametrize("shared", [True, False])
def test_its_time_is_kept_with_what_a_pass_computes(
    shared: bool, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By which a prediction asks for it: of tokens that samples share, once."""
    laps: list[tuple[str, float]] = []
    lap = Stopwatch.lap
    monkeypatch.setattr(
        Stopwatch,
        "lap",
        lambda self, part, size=0.0: (laps.append((part, size)), lap(self, part, size)),
    )
    scenario = ScorerScenario(
        model=policy, block={"token_budget": 4096}, algorithm={"share_prompts": shared}
    )
    scored_by(scenario)
    samples = flat(made_up_samples())
    sizes = sizes_of(samples, shared_prefix_cost=0.25 if shared else None)
    assert [size for part, size in laps if part == "infer"] == [
        sizes.size(range(len(samples)))
    ]
    assert (sizes.size(range(len(samples))) < sum(sizes.tokens)) == shared

"""Predicted iterations of jobs with language models whose work takes round numbers, against sums done by hand."""

from __future__ import annotations

import random

import pytest

from rlplace.algo.packing import pack_steps
from rlplace.foresight.costs import Costs
from rlplace.foresight.predict import Prediction, open_loop, predict
from rlplace.jobs.language_model.memory import read_again
from rlplace.jobs.language_model.performance.learners import seen_after
from rlplace.jobs.language_model.performance.loads import TextStages
from rlplace.jobs.language_model.performance.ranks import TextSite
from tests.foreseen import MS, PLACE, job_of, profile_of, timed

GRPO = (
    "rollout.engine=transformers",
    "runner.eval_every=0",
    PLACE + "actor=0",
    PLACE + "env=1",
)
LEND = "cluster.lend={actor: rollout}"
ENGINE = {"rollout.generate/prefill": 2.0, "rollout.generate/decode": 1.0}


def generated(
    prompts: int,
    samples: int,
    tokens: tuple[float, ...],
    *words: str,
    costs: dict[str, float] | None = None,
    **drawn: float,
) -> Prediction:
    """Predict training whose answers have so many tokens; `drawn`: the same number for all of another distribution."""
    sizes = (
        f"algorithm.prompts={prompts}",
        f"algorithm.samples_per_prompt={samples}",
        "algorithm.max_new_tokens=64",
        # GRPO compares the answers to a prompt, so it needs several
        *(["algorithm.name=reinforce_pp"] if samples == 1 else []),
    )
    others = {
        "env." + name: (value,)
        for name, value in ({"prompt_tokens": 6.0} | drawn).items()
    }
    answers = {"rollout.answer_tokens": tokens, **others}
    return timed(
        ENGINE | (costs or {}),
        *GRPO,
        *sizes,
        *words,
        config="hybrid_grpo_llm",
        samples=answers,
    )


def test_an_engine_reads_each_prompt_once_and_decodes_all_answers_in_flight_at_once() -> (
    None
):
    found = generated(1, 8, (10.0,), PLACE + "rollout=2")
    assert found.numbers["time/rollout_s"] == pytest.approx((2 + 9) * MS)
    assert found.numbers["rollout/tokens"] == 80
    more = generated(4, 2, (10.0,), PLACE + "rollout=2")
    # A token of the first group is made while the three other prompts are read.
    assert more.numbers["time/rollout_s"] == pytest.approx((2 + 1 + 3 * 2 + 9) * MS)
    assert more.numbers["rollout/policy_s"] == pytest.approx(
        more.numbers["time/rollout_s"]
    )


def test_engines_on_lent_accelerators_share_the_work() -> None:
    """One more engine, whose moves and the actor's are all that it costs."""
    words = (PLACE + "rollout=2", "algorithm.max_staleness=0")
    moves = {
        "rollout.move_off/rest": 3.0,
        "rollout.move_weights/rest": 4.0,
        "rollout.move_full/rest": 5.0,
        "actor.move_off/rest": 6.0,
        "actor.move_weights/rest": 7.0,
        "actor.move_full/rest": 8.0,
    }
    alone = generated(2, 8, (10.0,), *words, costs=moves)
    lent = generated(2, 8, (10.0,), *words, LEND, costs=moves)
    assert alone.numbers["time/moves_s"] == 0.0
    # Two prompts one after the other, and both answered at once; or one prompt for each of two engines.
    assert alone.numbers["time/rollout_s"] == pytest.approx((2 + 1 + 2 + 9) * MS)
    assert lent.numbers["time/rollout_s"] == pytest.approx((2 + 9) * MS)
    assert lent.numbers["rollout/tokens"] == alone.numbers["rollout/tokens"]
    # Into sync: the actor shrinks, then the engine gets its weights. Into rollout: the actor leaves, then the engine
    # grows. Into learn: the engine leaves, then the actor comes.
    moves_s = (7 + 4 + 6 + 5 + 3 + 8) * MS
    assert lent.numbers["time/moves_s"] == pytest.approx(moves_s)
    assert lent.seconds == pytest.approx(moves_s + lent.numbers["time/rollout_s"])


def test_engines_on_lent_accelerators_join_what_goes_on_while_the_actor_learns() -> (
    None
):
    words = (PLACE + "rollout=2", "algorithm.max_staleness=1")
    # The update takes less than generating, so engines are what an iteration waits for.
    alone = generated(4, 8, (40.0,), *words, "rollout.step_sequences=8")
    lent = generated(4, 8, (40.0,), *words, "rollout.step_sequences=8", LEND)
    assert lent.numbers["rollout/tokens"] == alone.numbers["rollout/tokens"]
    assert lent.seconds < 0.7 * alone.seconds


def test_vllm_reads_all_prompts_in_passes_of_so_many_tokens_and_decodes_meanwhile() -> (
    None
):
    words = (PLACE + "rollout=2", "rollout.engine=vllm")
    found = generated(4, 2, (10.0,), *words)
    assert found.numbers["time/rollout_s"] == pytest.approx(
        (2 + 2 + 9) * MS
    )  # the first prompt, the three others
    narrow = generated(
        4, 2, (10.0,), *words, "rollout.step_tokens=8", "rollout.step_sequences=8"
    )
    assert narrow.numbers["time/rollout_s"] == pytest.approx(
        (2 + 3 * 2 + 9) * MS
    )  # 18 tokens: 8, 8 and 2


def test_the_longest_answer_of_the_engines_ends_generation() -> None:
    found = generated(2, 1, (10.0, 30.0), PLACE + "rollout=1-2")
    assert found.numbers["time/rollout_s"] == pytest.approx((2 + 29) * MS)
    assert found.numbers["rollout/wait_s"] == pytest.approx(20 * MS)
    alone = generated(
        2, 1, (10.0, 30.0), PLACE + "rollout=2", "rollout.step_sequences=1"
    )
    assert alone.numbers["time/rollout_s"] == pytest.approx((2 + 29 + 2 + 9) * MS)


@pytest.mark.parametrize("learn", [5.0, 60.0])
def test_of_generation_and_learning_the_longer_one_is_the_iteration_one_version_apart(
    learn: float,
) -> None:
    costs = {"actor.learn/micro_batch": learn}
    words = (PLACE + "rollout=2",)
    turns = generated(1, 8, (40.0,), *words, costs=costs)
    assert turns.seconds == pytest.approx((2 + 39 + learn) * MS)
    ahead = generated(1, 8, (40.0,), *words, "algorithm.max_staleness=1", costs=costs)
    assert ahead.seconds == pytest.approx(max(2 + 39, learn) * MS)


def test_gradients_of_whole_groups_are_made_while_others_are_generated() -> None:
    costs = {"actor.learn/micro_batch": 10.0, "actor.learn/step": 1.0}
    words = (PLACE + "rollout=2", "rollout.step_sequences=4", "actor.token_budget=64")
    turns = generated(3, 4, (10.0,), *words, costs=costs)
    assert turns.numbers["time/rollout_s"] == pytest.approx(3 * 11 * MS)
    assert turns.numbers["time/learn_s"] == pytest.approx((3 * 10 + 1) * MS)
    early = generated(
        3, 4, (10.0,), *words, "algorithm.accumulate_early=true", costs=costs
    )
    # A group is learned when the next is there, the last one in learn.
    assert early.numbers["time/rollout_s"] == pytest.approx((3 * 11 + 10) * MS)
    assert early.numbers["time/learn_s"] == pytest.approx((10 + 1) * MS)


def test_a_conversation_takes_its_turns_one_after_another() -> None:
    found = generated(
        1,
        1,
        (10.0,),
        PLACE + "rollout=2",
        "env.max_turns=3",
        turns=2.0,
        reply_tokens=4.0,
    )
    assert found.numbers["time/rollout_s"] == pytest.approx(2 * (2 + 9) * MS)
    assert found.numbers["rollout/tokens"] == 20


def test_a_short_round_ends_before_its_longest_answers_and_the_next_asks_those_prompts_anew() -> (
    None
):
    """Each iteration has a prompt with 10 tokens and one with 30: a short round learns those of two with 10."""
    whole = generated(2, 1, (10.0, 30.0), PLACE + "rollout=2")
    assert whole.numbers["time/rollout_s"] == pytest.approx(
        (2 + 1 + 2 + 29) * MS, rel=0.05
    )
    found = generated(
        2, 1, (10.0, 30.0), PLACE + "rollout=2", "algorithm.short_rounds=1"
    )
    waits = 2 + 1 + 2 + 29  # both have 30
    # Of four prompts that are read one after the other, the second with 10 tokens is the second to the fourth, and is
    # seen to have ended one step later.
    first, last = (4 * 2 + 3 + at + 6 + late for at, late in ((1, 0), (3, 1)))
    assert (
        (waits + first) / 2 * MS
        <= found.numbers["time/rollout_s"]
        <= (waits + last) / 2 * MS
    )
    assert found.numbers["rollout/tokens"] == (30 + 30 + 10 + 10) / 2


@pytest.mark.parametrize("env", ["0", "0-1"])
def test_rounds_that_do_not_wait_ask_and_learn_as_many_prompts_with_several_turns_and_slow_rewards(
    env: str,
) -> None:
    costs, tokens = (
        {"actor.learn/micro_batch": 1.0},
        tuple(float(2 + n * n // 9) for n in range(24)),
    )
    words = (
        PLACE + "rollout=1-2",
        PLACE + f"env={env}",
        "env.max_turns=2",
        "actor.token_budget=1",
    )
    words, drawn = (
        (*words, "algorithm.share_prompts=false"),
        {"turns": 2.0, "reply_tokens": 4.0, "reward_s": 0.02},
    )
    every, some = (
        generated(
            6, 2, tokens, *words, f"algorithm.short_rounds={n}", costs=costs, **drawn
        )
        for n in (0, 2)
    )
    assert [found.numbers["time/learn_s"] for found in (every, some)] == pytest.approx(
        [6 * 2 * MS] * 2
    )
    assert some.numbers["time/rollout_s"] < every.numbers["time/rollout_s"]


def test_slow_rewards_are_given_while_other_answers_are_generated() -> None:
    words = (PLACE + "rollout=2", "rollout.step_sequences=1")
    quick = generated(2, 1, (10.0,), *words, reward_s=0.0001)
    assert quick.numbers["time/rollout_s"] == pytest.approx(2 * 11 * MS)
    slow = generated(2, 1, (10.0,), *words, reward_s=0.1)
    assert slow.numbers["time/rollout_s"] == pytest.approx((2 * 11 + 100) * MS)
    assert slow.numbers["env/sim_s"] == 0.0


def test_ranks_share_micro_batches_by_tokens_and_meet_in_each() -> None:
    costs, place = (
        {"actor.learn/micro_batch": 10.0, "actor.learn/exchange": 1.0},
        (PLACE + "rollout=2",),
    )
    words = ("actor.token_budget=32", *place)
    one = generated(
        4, 2, (10.0,), *words, costs=costs
    )  # samples of 16 tokens, two in a micro-batch
    assert one.numbers["time/learn_s"] == pytest.approx((4 * 10 + 1) * MS)
    two = generated(
        4, 2, (10.0,), *words, PLACE + "actor=0-1", PLACE + "env=2", costs=costs
    )
    assert two.numbers["time/learn_s"] == pytest.approx((2 * 10 + 1) * MS)


def test_scorers_take_turns_where_they_share_accelerators() -> None:
    work = {"reference.infer/infer": 3.0, "reward.infer/infer": 5.0}
    work |= {"critic.infer/score": 7.0, "actor.infer/score": 11.0}
    sizes = ("algorithm.prompts=2", "algorithm.samples_per_prompt=2")
    whole = ("actor.token_budget=8192", "critic.token_budget=8192")

    def infer_s(**placed: int) -> float:
        words = (
            *sizes,
            *whole,
            *(f"{PLACE}{component}={at}" for component, at in placed.items()),
        )
        return timed(work, *words, config="rlhf_tiny").numbers["time/infer_s"]

    assert infer_s(actor=0, reference=0, reward=0, critic=0) == pytest.approx(
        (3 + 5 + 7 + 11) * MS
    )
    assert infer_s(actor=0, reference=1, reward=2, critic=1) == pytest.approx(
        (max(3, 5, 11) + 7) * MS
    )


def test_held_out_prompts_are_answered_before_those_of_the_iteration() -> None:
    samples = {"rollout.answer_tokens": (10.0,), "env.prompt_tokens": (6.0,)}
    words = (
        *GRPO,
        PLACE + "rollout=2",
        "runner.eval_every=1",
        "runner.eval_prompts=1",
        "algorithm.max_new_tokens=64",
    )
    job = job_of(
        "hybrid_grpo_llm",
        *words,
        "algorithm.prompts=1",
        "algorithm.samples_per_prompt=2",
    )
    _, loop = open_loop(
        job.config,
        job.plan,
        job.case,
        Costs(profile_of(ENGINE, samples=samples)),
        cores=8,
        iterations=2,
    )
    evaluated = loop.evaluate(0)
    numbers = loop.iteration(0)
    assert evaluated["time/evaluate_s"] == pytest.approx(11 * MS)
    assert numbers["time/rollout_s"] == pytest.approx(11 * MS)


def test_long_answers_are_spent_from_one_end_of_an_answer_to_the_next() -> None:
    tokens = tuple(float(n) for n in range(1, 61))
    found = generated(8, 16, tokens, PLACE + "rollout=2")
    calls = [call for call in found.iterations[-1].calls if call.name == "generate"]
    laps = sum(len(spans.ends) for call in calls for spans in call.record.spans)
    assert laps < 3 * 64


def test_lengths_that_were_not_measured_are_the_longest_there_can_be_and_that_is_told() -> (
    None
):
    found = timed(
        ENGINE,
        *GRPO,
        PLACE + "rollout=2",
        "algorithm.max_new_tokens=20",
        config="hybrid_grpo_llm",
    )
    assert {"rollout.answer_tokens", "env.prompt_tokens"} <= set(found.costs.missing)
    assert found.numbers["rollout/tokens"] == 64 * 20


@pytest.mark.parametrize("batch", [8, 16])
def test_the_least_that_learning_takes_counts_a_prompt_once_for_its_answers(
    batch: int,
) -> None:
    """Of steps with some groups each, whose micro-batches take a millisecond for each token."""
    words = (
        f"algorithm.train_batch={batch}",
        "algorithm.prompts=4",
        "algorithm.samples_per_prompt=8",
        PLACE + "rollout=2",
    )
    job = job_of("hybrid_grpo_llm", *GRPO, *words, "actor.token_budget=256")
    drawn = {"env.prompt_tokens": (40.0,), "rollout.answer_tokens": (8.0, 9.0, 12.0)}
    cost, one = "actor.learn/micro_batch", {"actor.learn/micro_batch": 100.0}
    costs = Costs(profile_of(one, sizes={cost: 100.0}, samples=drawn))
    stages = TextStages(job.config, costs, {"actor": 1}, range(1, 3))
    least = stages._passes(cost, 256, 1, steps=32 // batch, whole=False)
    for sizes in stages._wholes(read_again(job.config)["actor"]):
        steps = pack_steps(
            sizes, epochs=1, train_batch=batch, seed="0", ranks=1, token_budget=256
        )
        tokens = sum(sizes.size(picks) for step in steps for picks in step.ranks[0])
        assert (
            0.9 * tokens * MS
            <= least.longest_s
            <= tokens * MS + 1e-9
            < sum(sizes.tokens) * MS
        )


def test_a_bound_of_vllm_lets_some_steps_read_prompts_and_decode() -> None:
    """Such steps are cheaper here than those that decode alone, and follow each answer that ends."""
    words = (
        PLACE + "rollout=2",
        "rollout.engine=vllm",
        "rollout.step_sequences=64",
        "algorithm.prompts=64",
        "algorithm.samples_per_prompt=8",
        "algorithm.max_new_tokens=64",
    )
    job = job_of("hybrid_grpo_llm", *GRPO, *words)
    answers = tuple(float(n) for n in range(20, 40))
    drawn = {"env.prompt_tokens": (6.0,), "rollout.answer_tokens": answers}
    engine = {"rollout.generate/prefill": 0.6, "rollout.generate/decode": 1.0}
    profile = profile_of(engine, samples=drawn)
    stages = TextStages(job.config, Costs(profile), {"actor": 1}, range(1, 3))
    found = predict(job.config, job.plan, job.case, profile)
    assert 0.0 < stages._generate(1).seconds <= found.numbers["time/rollout_s"]


@pytest.mark.parametrize(
    ("actor", "is_own"), [("0", True), ("cpu", False), ("1", False)]
)
def test_ranks_have_devices_of_their_own_only_if_they_have_accelerators(
    actor: str, is_own: bool
) -> None:
    words = (PLACE + f"actor={actor}", PLACE + "env=cpu", PLACE + "rollout=1-2")
    job = job_of("hybrid_grpo_llm", *GRPO, *words)
    site, _ = open_loop(
        job.config, job.plan, job.case, Costs(profile_of({})), cores=4, iterations=2
    )
    assert isinstance(site, TextSite)
    assert site.has_own_devices("actor") == is_own
    site.world.close()


def test_a_polling_rank_sees_a_value_at_its_next_look() -> None:
    assert seen_after(0.0) == 0.0
    rng = random.Random(0)
    for _ in range(200):
        waited_s = 10 ** rng.uniform(-5, 2)
        looked_s = 0.0
        pause_s = 0.001
        while looked_s < waited_s:
            looked_s += pause_s
            pause_s = min(2 * pause_s, 0.02)
        assert seen_after(waited_s) == pytest.approx(looked_s, rel=1e-9)

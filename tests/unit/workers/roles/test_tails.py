"""Tail batching: each prompt is learned once in a cycle, whatever is late, on any ranks, and through checkpoints."""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
from collections import Counter
from pathlib import Path

import pytest

from rlplace.envs.text import TextEpisode
from rlplace.errors import ChannelTimeout, ConfigError
from rlplace.models.tokenizer import Tokenizer
from rlplace.workers.arguments import COMPLETIONS, REQUESTS, Done, EndOfIteration
from rlplace.workers.roles.tails import Tails
from rlplace.workers.roles.text_env import Pass
from tests.text_stage import TextStage
from tests.tiny_lm import request_of
from tests.tiny_tokenizer import tiny_tokenizer
from tests.unit.workers.roles.test_text_env import (
    COUNTING,
    LONG,
    Counted,
    Counting,
    says,
    value,
)

SHORT, PROMPTS = 3, 8


def ranks_of(*edges: int) -> list[Tails]:
    return [Tails(SHORT, PROMPTS, range(a, b)) for a, b in itertools.pairwise(edges)]


def learned_of(ranks: list[Tails], iteration: int) -> list[int]:
    """Prompts that a round learns where those with the largest remainder of 5 are late."""
    learned: list[int] = []
    for tails in ranks:
        asked, more = [*tails.asked(iteration).values()], tails.more(iteration)
        late = sorted(asked, key=lambda number: -(number % 5))[:more]
        if more:
            tails.leave(iteration, late)
        learned += [number for number in asked if number not in late]
    assert len(learned) == PROMPTS
    return learned


@pytest.mark.parametrize("edges", [(0, 8), (0, 3, 8), tuple(range(9))], ids=str)
def test_a_cycle_learns_the_prompts_that_it_would_learn_without_short_rounds(
    edges: tuple[int, ...],
) -> None:
    ranks = ranks_of(*edges)
    for cycle in range(2):
        learned: list[int] = []
        for iteration in range(cycle * (SHORT + 1), (cycle + 1) * (SHORT + 1)):
            at_once = sum(len(tails.asked(iteration)) for tails in ranks)
            learned += learned_of(ranks, iteration)
            long = iteration % (SHORT + 1) == SHORT
            assert (
                at_once == PROMPTS
                if long
                else PROMPTS < at_once <= PROMPTS + -(-PROMPTS // SHORT)
            )
        first = cycle * (SHORT + 1) * PROMPTS
        assert sorted(learned) == [*range(first, first + (SHORT + 1) * PROMPTS)]


def test_a_rank_keeps_what_its_own_groups_ask_later_and_no_more(tmp_path: Path) -> None:
    ranks, last = ranks_of(0, 3, 8), 2 * (SHORT + 1)
    for iteration in range(last + 1):
        learned_of(ranks, iteration)
    (whole,) = ranks_of(0, 8)
    for tails in ranks:
        kept = {
            ahead: number
            for ahead, number in tails.left.items()
            if ahead >= last * PROMPTS
        }
        assert tails.left == kept
        tails.write(tmp_path)
    whole.read(tmp_path)
    (tmp_path / "whole").mkdir()
    whole.write(tmp_path / "whole")
    for tails in ranks_of(0, 3, 8):
        tails.read(tmp_path / "whole")
        (tmp_path / "again").mkdir(exist_ok=True)
        (name,) = tails.write(tmp_path / "again")
        assert json.loads((tmp_path / "again" / name).read_text()) == json.loads(
            (tmp_path / name).read_text()
        )


@pytest.mark.parametrize("rounds", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("then", [0, 1, 2, SHORT, 5])
def test_a_run_that_goes_on_with_other_rounds_learns_each_prompt_once(
    then: int, rounds: int, tmp_path: Path
) -> None:
    ranks, others = (
        ranks_of(0, 3, 8),
        [Tails(then, PROMPTS, range(5)), Tails(then, PROMPTS, range(5, 8))],
    )
    learned = [
        number for iteration in range(rounds) for number in learned_of(ranks, iteration)
    ]
    for tails in ranks:
        tails.write(tmp_path)
    for tails in others:
        tails.read(tmp_path)
    last = 2 * (
        SHORT + 1
    )  # from here nothing that the first ones asked ahead is to come
    last += -last % (then + 1)  # nor what the others did
    learned += [
        number
        for iteration in range(rounds, last)
        for number in learned_of(others, iteration)
    ]
    assert sorted(learned) == [*range(last * PROMPTS)]


def test_without_short_rounds_an_iteration_asks_its_own_prompts() -> None:
    tails = Tails(0, PROMPTS, range(2, 5))
    assert tails.asked(3) == {2: 26, 3: 27, 4: 28}
    assert tails.more(3) == 0


def test_what_was_left_goes_on_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    for tails in (ranks := ranks_of(0, 3, 8)):
        for iteration in range(SHORT):
            tails.leave(
                iteration, [*tails.asked(iteration).values()][: tails.more(iteration)]
            )
        tails.write(tmp_path)
    left = sorted(number for tails in ranks for number in tails.left.values())
    assert len(set(left)) == PROMPTS
    for edges in ((0, 8), (0, 1, 5, 8)):
        others = ranks_of(*edges)
        for tails in others:
            tails.read(tmp_path)
        assert (
            sorted(number for tails in others for number in tails.asked(SHORT).values())
            == left
        )


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tails,) = ranks_of(0, 8)
    (name,) = tails.write(tmp_path)
    (tmp_path / name).write_text("{")
    with pytest.raises(ConfigError, match=name):
        tails.read(tmp_path)


# ── env workers ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("env_ranks", [1, 2])
@pytest.mark.parametrize("rewards", [(), ("tests.odd_rewards:how_many", "score")])
def test_a_short_round_sends_the_groups_that_are_whole_and_a_long_one_those_that_were_left(
    env_ranks: int, rewards: tuple[str, ...], tmp_path: Path
) -> None:
    algorithm, learned = LONG | {"short_rounds": 2}, Counter[str]()
    env, folder = COUNTING | {"max_turns": 3}, tiny_tokenizer(tmp_path)
    env |= {"rewards": [{"name": name} for name in rewards]}
    decode = Tokenizer.load(folder).decode
    with TextStage(
        folder, says, env=env, prompts=4, env_ranks=env_ranks, algorithm=algorithm
    ) as stage:
        for iteration in range(6):
            metrics = stage.run(iteration)
            groups = stage.groups()
            assert sorted({sample.group for group in groups for sample in group}) == [
                0,
                1,
                2,
                3,
            ]
            assert all(len(group) == 2 for group in groups)
            if rewards:
                all_seen = [sample.rewards["how_many"] for g in groups for sample in g]
                assert set(all_seen) == {2}
            left = sum(value(m, "env/prompts_left") for m in metrics)
            assert left == (0 if iteration % 3 == 2 else 2)
            learned.update(
                decode(group[0].tokens[: group[0].prompt_tokens]) for group in groups
            )
    assert set(learned.values()) == {1}
    assert len(learned) == 24


class Slow(Counting):
    """Prompt 8, which round 0 of 2 short ones asks, is replied to when the test says so."""

    may_end = threading.Event()

    def episode(self, number: int) -> TextEpisode:
        return Waiting(str(number), 3) if number == 8 else super().episode(number)


class Waiting(Counted):
    def reply(self, answer: str) -> str | None:
        Slow.may_end.wait(20)
        return super().reply(answer)


def test_a_rank_that_has_left_a_reply_waits_for_the_others_no_longer_than_it_may(
    tmp_path: Path,
) -> None:
    env, algorithm = (
        {"task": f"{__name__}:Slow", "max_turns": 3},
        LONG | {"short_rounds": 2},
    )
    with TextStage(
        tiny_tokenizer(tmp_path),
        says,
        env=env,
        prompts=4,
        env_ranks=2,
        algorithm=algorithm,
    ) as stage:
        first = stage.env[0]
        answers = first.context.channels[COMPLETIONS]
        answers.spec = dataclasses.replace(answers.spec, timeout_s=0.5)
        with pytest.raises(ChannelTimeout):
            stage._together(0, [first.run])  # the other never comes
        Slow.may_end.set()


def test_requests_that_no_engine_has_taken_are_gone_whichever_rank_has_put_them(
    tmp_path: Path,
) -> None:
    algorithm = LONG | {"short_rounds": 4}
    with TextStage(
        tiny_tokenizer(tmp_path),
        says,
        env=COUNTING,
        prompts=4,
        env_ranks=2,
        algorithm=algorithm,
    ) as stage:
        first, other = stage.env
        assert (first._tails.more(2), other._tails.more(2)) == (0, 1)
        last = Pass(first, first.prompts["train"], 2)
        other.context.channels[REQUESTS].put(request_of(2))
        other.context.channels[COMPLETIONS].put(Done(iteration=2, env_rank=1), key="0")
        last._end()
        assert stage.channels[REQUESTS].named("a test").get_nowait() == EndOfIteration(
            iteration=2, drop=True
        )

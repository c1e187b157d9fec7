"""The env worker of language models with a rollout rank that says what the test wants, in an order of its own."""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from rlplace.envs.text import Image, Message, Split, TextEpisode
from rlplace.errors import (
    ChannelBroken,
    ChannelMisuse,
    ConfigError,
    NotResident,
    RewardError,
)
from rlplace.metrics import Metrics
from rlplace.models.tokenizer import Tokenizer
from rlplace.placement.schedule import Residency
from rlplace.tokens import ENDS, Completion, Request, Sample
from rlplace.workers.arguments import COMPLETIONS, REQUESTS, SAMPLES, Done
from rlplace.workers.roles import replies
from rlplace.workers.roles.prompts import check_prompts
from tests.text_stage import Says, TextStage
from tests.tiny_tokenizer import CHAT, END, tiny_tokenizer
from tests.tiny_vlm import coloured_squares, png, tiny_vlm


class Counting:
    """Asks for a number; each answer but the last is told how many there were. Scores the last number of each."""

    rewards: ClassVar[Sequence[str]] = ("score",)

    def __init__(self, *, seed: int, split: Split, turns: int = 3) -> None:
        self.size, self._turns, self._name = None, turns, split

    def episode(self, number: int) -> TextEpisode:
        return Counted(f"{self._name} {number}", self._turns)


class ToldOfCuts(Counting):
    """Its episodes have the method `cut` of earlier versions."""

    def episode(self, number: int) -> TextEpisode:
        return ToldOfCut(f"{self._name} {number}", self._turns)


class Counted:
    def __init__(self, prompt: str, turns: int) -> None:
        self.prompt, self._turns, self._heard = prompt, turns, [""]

    def reply(self, answer: str) -> str | None:
        if answer == "lookup":
            raise KeyError("the task's own")
        self._heard.append(answer)
        return (
            None if len(self._heard) > self._turns else f"{len(self._heard) - 1} so far"
        )

    def facts(self) -> Mapping[str, Any]:
        return {
            "score": float("".join(c for c in "".join(self._heard) if c.isdigit()) or 0)
        }


class ToldOfCut(Counted):
    told = False

    def cut(self) -> None:
        self.told = True

    def facts(self) -> Mapping[str, Any]:
        return {"score": float(self.told)}


COUNTING = {"task": f"{__name__}:Counting", "max_turns": 10}
LONG = {"sequence_length": 400}


def says(request: Request, sample: int) -> str:
    return f"{request.group}{sample}{request.turn}<eos>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("model"))


def rows(folder: Path, lengths: Sequence[int]) -> dict[str, Any]:
    file = folder / "rows.jsonl"
    file.write_text(
        "\n".join(
            json.dumps({"prompt": "x" * length, "answer": "0"}) for length in lengths
        )
    )
    return {"task": "prompts", "kwargs": {"path": str(file)}}


def by_place(groups: Iterable[tuple[Sample, ...]]) -> dict[tuple[int, int], Sample]:
    return {
        (sample.group, sample.sample): sample for group in groups for sample in group
    }


def same(one: Sample, other: Sample) -> bool:
    return all(
        np.array_equal(getattr(one, f.name), getattr(other, f.name))
        for f in dataclasses.fields(Sample)
    )


def value(metrics: Metrics, name: str) -> float:
    return metrics[name].value


# ── one turn ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("special", [True, False])
def test_rewards_see_the_tags_of_thoughts(tmp_path: Path, special: bool) -> None:
    """As tokens of their own or not; the template begins each answer with one of them."""
    template = CHAT.replace("<turn>assistant: ", "<turn>assistant: <think>\n")
    tags = ["<think>", "</think>", "<answer>", "</answer>"]
    model = tiny_tokenizer(tmp_path, chat=template, special=tags if special else ())
    good = "a</think> <answer>1</answer><eos>"
    env = {"task": "arithmetic", "rewards": [{"name": "matches"}]}
    lengths = {"max_new_tokens": 60}
    with TextStage(model, lambda *_: good, env=env, algorithm=lengths) as stage:
        stage.run(iteration=0)
        samples = by_place(stage.groups()).values()
    assert {sample.reward for sample in samples} == {1.0}


def test_a_group_is_asked_at_once_and_sent_whole_as_it_was_sampled(
    folder: Path,
) -> None:
    with TextStage(
        folder, says, env={"task": "arithmetic"}, prompts=4, samples=3
    ) as stage:
        stage.run(iteration=2)
    asked = sorted(stage.puppet.asked, key=lambda request: request.group)
    assert [
        (r.group, r.first_sample, r.samples, r.turn, r.iteration, r.greedy)
        for r in asked
    ] == [(group, 0, 3, 0, 2, False) for group in range(4)]
    groups = stage.groups()
    assert sorted([(s.group, s.sample) for s in group] for group in groups) == [
        [(group, sample) for sample in range(3)] for group in range(4)
    ]
    for (group, number), sample in by_place(groups).items():
        answer, prompt = stage.puppet.answered[group, number, 0], asked[group].tokens
        assert sample.tokens.tolist() == [*prompt, *answer.tokens]
        assert sample.mask.tolist() == [False] * len(prompt) + [True] * len(
            answer.tokens
        )
        assert sample.logprobs[len(prompt) :].tolist() == answer.logprobs.tolist()
        assert sample.versions[len(prompt) :].tolist() == answer.versions.tolist()


def test_prompts_come_through_the_chat_template(folder: Path) -> None:
    with TextStage(
        folder, says, env={"task": "arithmetic", "system": "Be brief."}
    ) as stage:
        stage.run()
    for request in stage.puppet.asked:
        text = Tokenizer.load(folder).decode(request.tokens, special=True)
        assert text.startswith("<turn>system: Be brief.<eos>\n<turn>user: What is ")
        assert text.endswith("Answer with the number only.<eos>\n<turn>assistant: ")


def test_rewards_are_weighed(folder: Path) -> None:
    rewards = [
        {"name": "math_answer", "weight": 2.0},
        {"name": "matches", "weight": 0.5, "kwargs": {"pattern": "1."}},
    ]
    with TextStage(
        folder, lambda r, s: "17<eos>", env={"task": "arithmetic", "rewards": rewards}
    ) as stage:
        (metrics,) = stage.run()
    for sample in by_place(stage.groups()).values():
        assert sample.rewards["matches"] == 1
        assert sample.reward == 2 * sample.rewards["math_answer"] + 0.5
    assert value(metrics, "env/reward/matches") == 1
    assert (
        value(metrics, "env/reward")
        == 2 * value(metrics, "env/reward/math_answer") + 0.5
    )


@pytest.mark.parametrize("seed", range(3))
def test_reward_functions_over_lists_get_whole_groups(folder: Path, seed: int) -> None:
    """The answers of a prompt come in any order, and beside those of other prompts."""
    rewards = [
        {"name": "tests.odd_rewards:relative_length"},
        {"name": "tests.odd_rewards:length"},
    ]

    def longer(request: Request, sample: int) -> str:
        return "7" * (1 + sample) + "<eos>"

    env = {"task": "arithmetic", "rewards": rewards}
    with TextStage(folder, longer, env=env, samples=3, seed=seed) as stage:
        stage.run()
    samples = by_place(stage.groups()).values()
    assert len(samples) == 9
    for sample in samples:
        assert sample.rewards["length"] == 1 + sample.sample
        assert sample.rewards["relative_length"] == 0.5 - sample.sample / 2


def test_an_evaluation_gives_functions_over_lists_its_own_groups(folder: Path) -> None:
    runner = {"eval_every": 1, "eval_prompts": 2, "eval_samples": 3}
    env = COUNTING | {"rewards": [{"name": "tests.odd_rewards:how_many"}]}
    with TextStage(folder, says, env=env, runner=runner, algorithm=LONG) as stage:
        (metrics,) = stage.evaluate()
    assert value(metrics, "eval/reward") == 3


def test_numbers_of_an_iteration(folder: Path) -> None:
    def some(request: Request, sample: int) -> str:
        return "7<eos>" if sample else "7 and 7 and 7 and 7 and 7 and 7 and 7"

    with TextStage(
        folder, some, env={"task": "arithmetic"}, algorithm={"max_new_tokens": 5}
    ) as stage:
        (metrics,) = stage.run()
    numbers = {name: (m.value, m.reduce, m.weight) for name, m in metrics.items()}
    assert numbers["env/episodes"] == (6, "sum", 1.0)
    assert numbers["env/turns"] == (1.0, "mean", 6)
    assert numbers["env/truncated"] == (0.5, "mean", 6)
    ended = {
        name.removeprefix("env/ended/"): number[0]
        for name, number in numbers.items()
        if name.startswith("env/ended/")
    }
    assert ended == {
        "cut_answer": 0.5,
        "task": 0.5,
        "max_turns": 0.0,
        "sequence_length": 0.0,
    }
    assert numbers["env/answer_tokens"] == (3.5, "mean", 6)
    assert {name for name in metrics if name.endswith("_s")} == {
        f"env/{n}_s" for n in ("sim", "reward", "wait", "put")
    }
    assert sum(sample.truncated for sample in by_place(stage.groups()).values()) == 3


class Chance:
    """Draws facts from the random numbers that Python and NumPy have for the whole process."""

    rewards = ("score",)
    size = None

    def __init__(self, *, seed: int, split: str) -> None:
        """Take the arguments of all tasks."""

    def episode(self, number: int) -> Drawn:
        return Drawn()


class Drawn:
    prompt = "How lucky?"

    def reply(self, answer: str) -> None:
        return None

    def facts(self) -> dict[str, float]:
        return {"score": random.random() + np.random.uniform()}


def test_tasks_that_draw_from_the_numbers_of_the_process_repeat_by_seed(
    folder: Path,
) -> None:
    found = []
    for _ in range(2):
        env = {"task": f"{__name__}:Chance"}
        with TextStage(folder, says, env=env) as stage:
            stage.run()
            groups = by_place(stage.groups()).values()
        found.append(sorted(sample.reward for sample in groups))
    assert found[0] == found[1]
    assert len(set(found[0])) == len(found[0])


def test_an_epoch_asks_every_row_once_and_then_in_another_order(
    folder: Path, tmp_path: Path
) -> None:
    asked: list[list[str]] = []
    with TextStage(folder, says, env=rows(tmp_path, range(6)), prompts=3) as stage:
        for iteration in range(4):
            stage.puppet.asked.clear()
            stage.run(iteration)
            in_order = sorted(stage.puppet.asked, key=lambda request: request.group)
            asked.append(
                [Tokenizer.load(folder).decode(request.tokens) for request in in_order]
            )
    first, second = asked[0] + asked[1], asked[2] + asked[3]
    assert sorted(first) == sorted(second)
    assert len(set(first)) == 6
    assert first != second


# ── several turns ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_only_what_the_policy_sampled_is_learned_and_asked_with_again(
    folder: Path,
) -> None:
    with TextStage(
        folder, says, env=COUNTING, prompts=2, samples=2, algorithm=LONG
    ) as stage:
        (metrics,) = stage.run()
    tokenizer, groups = Tokenizer.load(folder), stage.groups()
    for (group, number), sample in by_place(groups).items():
        answers = [stage.puppet.answered[group, number, turn] for turn in range(3)]
        assert sample.tokens[sample.mask].tolist() == [
            t for answer in answers for t in answer.tokens
        ]
        assert sample.logprobs[sample.mask].tolist() == [
            p for answer in answers for p in answer.logprobs
        ]
        assert sample.versions[sample.mask].tolist() == [
            v for answer in answers for v in answer.versions
        ]
        assert not sample.logprobs[~sample.mask].any()
        assert (sample.versions[~sample.mask] == -1).all()
        told = [f"{group}{number}{turn}" for turn in range(3)]
        assert tokenizer.decode(sample.tokens, special=True) == (
            f"<turn>user: train {group}<eos>\n<turn>assistant: {told[0]}<eos>\n"
            f"<turn>user: 1 so far<eos>\n<turn>assistant: {told[1]}<eos>\n"
            f"<turn>user: 2 so far<eos>\n<turn>assistant: {told[2]}<eos>"
        )
        assert (sample.turns, sample.reward) == (3, float("".join(told)))
    assert value(metrics, "env/turns") == 3
    samples, later = (
        by_place(groups),
        [request for request in stage.puppet.asked if request.turn],
    )
    assert len(later) == 2 * 2 * 2
    for request in later:  # by the very tokens that were sampled
        assert request.samples == 1
        sample = samples[request.group, request.first_sample]
        assert request.tokens.tolist() == sample.tokens[: len(request.tokens)].tolist()


# Of completions at least one more than the other env ranks: each puts a Done, which rank 0 may not take while it asks.
@pytest.mark.parametrize(
    "room", [{}, {REQUESTS: 1}, {REQUESTS: 1, COMPLETIONS: 7}], ids=str
)
@pytest.mark.parametrize("env_ranks", [1, 2, 3, 7])
def test_neither_order_nor_ranks_nor_room_change_what_is_sent(
    folder: Path, env_ranks: int, room: dict[str, int]
) -> None:
    def sent(
        ranks: int, seed: int, room: Mapping[str, int]
    ) -> dict[tuple[int, int], Sample]:
        stage = TextStage(
            folder,
            says,
            env=COUNTING,
            env_ranks=ranks,
            prompts=5,
            samples=2,
            algorithm=LONG,
            seed=seed,
            room=room,
        )
        with stage:
            metrics = stage.run(iteration=1)
        assert sum(value(m, "env/episodes") for m in metrics) == 10
        assert stage.channels[REQUESTS].stats().depth_items == 0
        assert stage.channels[COMPLETIONS].stats().depth_items == 0
        return by_place(stage.groups())

    expected, found = sent(1, 0, {}), sent(env_ranks, 5, room)
    assert (
        sorted(found)
        == sorted(expected)
        == [(g, s) for g in range(5) for s in range(2)]
    )
    assert all(same(found[place], expected[place]) for place in expected)


def cut(request: Request, sample: int) -> str:
    return (
        "5<eos>"
        if request.turn == 0
        else "6 6 6 6 6 6 6 6 6 6 6 6 6 6 6 6 6 6 6 6 6 6 6 6 6"
    )


@pytest.mark.parametrize(
    ("answer", "env", "longest", "ended"),
    [
        (says, {"max_turns": 2}, 400, "max_turns"),
        (cut, {}, 400, "cut_answer"),
        (says, {}, 60, "sequence_length"),
    ],
    ids=["turns are limited", "a cut answer is the last", "no answer would fit"],
)
def test_an_episode_ends_after_two_turns(
    folder: Path, answer: Says, env: dict[str, Any], longest: int, ended: str
) -> None:
    with TextStage(
        folder, answer, env=COUNTING | env, algorithm={"sequence_length": longest}
    ) as stage:
        (metrics,) = stage.run()
    # The metrics say which limit it was
    for end in ENDS:
        assert value(metrics, f"env/ended/{end}") == (end == ended)
    for sample in by_place(stage.groups()).values():
        assert (sample.turns, sample.truncated) == (2, ended == "cut_answer")
        assert sample.ended == ended
        assert len(sample.tokens) <= longest
        assert sample.mask[-1]
    for request in stage.puppet.asked:
        assert 1 <= request.max_new_tokens == min(20, longest - len(request.tokens))


def test_an_episode_of_an_earlier_version_is_told_that_its_answer_was_cut(
    folder: Path,
) -> None:
    env = {"task": f"{__name__}:ToldOfCuts", "max_turns": 10}
    with TextStage(folder, cut, env=env, algorithm=LONG) as stage:
        with pytest.warns(DeprecationWarning, match="is_cut"):
            stage.run()
        samples = by_place(stage.groups()).values()
    assert [sample.reward for sample in samples] == [1.0] * 6


# ── generated ahead ──────────────────────────────────────────────────────────────────────────────────────────────────


def written(stage: TextStage, folder: Path) -> None:
    """Save as the loop does, and wait for the files."""
    folder.mkdir()
    for worker in stage.env:
        worker.write_state(str(folder))
        worker._behind.wait()


@pytest.mark.parametrize("env_ranks", [1, 3])
def test_what_was_generated_ahead_is_put_again_and_not_asked_again(
    folder: Path, tmp_path: Path, env_ranks: int
) -> None:
    more = {
        "env": COUNTING,
        "prompts": 5,
        "samples": 2,
        "algorithm": LONG | {"max_staleness": 2},
    }
    with TextStage(folder, says, **more, env_ranks=2) as stage:
        for iteration in range(4):
            stage.run(iteration)
            order = stage.groups()
            if iteration == 2:
                expected = order
        for worker in stage.env:
            worker.forget(2)
        written(stage, tmp_path / "env")
    with TextStage(folder, says, **more, env_ranks=env_ranks) as stage:
        loaded = [worker.read_state(str(tmp_path / "env")) for worker in stage.env]
        assert (
            sum(value(metrics, "env/groups_kept") for metrics in loaded) == 2 * 5
        )  # of iterations 2 and 3
        metrics = stage.run(2)
        assert stage.puppet.asked == []
        found = stage.groups()
        stage.run(3)
        assert stage.puppet.asked == []
        stage.groups()
        stage.run(4)
        assert len({request.group for request in stage.puppet.asked}) == 5
    ours, theirs = by_place(found), by_place(expected)
    assert sorted(ours) == sorted(theirs)
    assert all(same(ours[place], theirs[place]) for place in theirs)
    assert sum(value(m, "env/episodes") for m in metrics) == 10


@pytest.mark.parametrize(
    "other", [{"runner": {"seed": 1}}, {"env": {"system": "Think."}}]
)
def test_what_was_generated_ahead_never_meets_another_prompt(
    folder: Path, tmp_path: Path, other: Mapping[str, Any]
) -> None:
    env = rows(folder, range(1, 8))  # each a prefix of the next
    more = {"prompts": 5, "samples": 2, "algorithm": LONG | {"max_staleness": 1}}

    def prompts(stage: TextStage) -> dict[int, list[int]]:
        stage.run(2)
        return {
            s.group: s.tokens[: s.mask.argmax()].tolist()
            for group in stage.groups()
            for s in group
        }

    with TextStage(folder, says, **more, env=env) as stage:
        before = prompts(stage)
        written(stage, tmp_path / "env")
    now = {"runner": other.get("runner"), "env": env | other.get("env", {})}
    with TextStage(folder, says, **more, **now) as stage:
        expected = prompts(stage)
    with TextStage(folder, says, **more, **now) as stage:
        loaded = stage.env[0].read_state(str(tmp_path / "env"))
        alike = sum(before[group] == expected[group] for group in before)
        assert value(loaded, "env/groups_kept") == alike < 5
        assert prompts(stage) == expected
        assert len({request.group for request in stage.puppet.asked}) == 5 - alike


def test_what_was_generated_ahead_never_meets_another_image(tmp_path: Path) -> None:
    model, squares = (
        tiny_vlm(tmp_path / "model"),
        coloured_squares(tmp_path / "squares"),
    )
    env = {
        "task": "prompts",
        "chat": True,
        "kwargs": {"path": str(squares), "image": "image"},
    }
    more = {"env": env, "prompts": 3, "algorithm": LONG | {"max_staleness": 1}}
    with TextStage(model, says, **more) as stage:
        stage.run(0)
        expected = {group[0].group: group[0].images for group in stage.groups()}
        written(stage, tmp_path / "env")
    with TextStage(model, says, **more) as stage:
        assert (
            value(stage.env[0].read_state(str(tmp_path / "env")), "env/groups_kept")
            == 3
        )
        stage.run(0)
        assert {group[0].group: group[0].images for group in stage.groups()} == expected
    for image in squares.parent.rglob("*.png"):
        image.write_bytes(
            png(8 + 8 * (int(image.stem) % 2), 8, (1, 2, 3))
        )  # of as many tokens
    with TextStage(model, says, **more) as stage:
        assert (
            value(stage.env[0].read_state(str(tmp_path / "env")), "env/groups_kept")
            == 0
        )


def test_groups_that_are_learned_are_let_go_and_without_staleness_none_is_kept(
    folder: Path,
) -> None:
    for ahead, left in ((0, []), (1, [2, 3]), (2, [1, 2, 3])):
        with TextStage(
            folder, says, env=COUNTING, algorithm=LONG | {"max_staleness": ahead}
        ) as stage:
            for iteration in range(4):
                stage.run(iteration)
            (worker,) = stage.env
            assert sorted(worker._kept) == left
            worker.forget(3)
            assert sorted(worker._kept) == left[-1:]
            worker.begin_again(4)
            assert worker._kept == {}


def test_texts_for_scorers_come_back_with_what_the_task_says(
    folder: Path, tmp_path: Path
) -> None:
    more = {"env": COUNTING, "prompts": 1, "algorithm": LONG | {"max_staleness": 1}}
    with TextStage(folder, says, **more) as stage:
        stage.env[0]._readers[SAMPLES] = True
        stage.run(3)
        (expected,) = stage.groups()
        written(stage, tmp_path / "env")
    with TextStage(folder, says, **more) as stage:
        stage.env[0]._readers[SAMPLES] = True
        stage.env[0].read_state(str(tmp_path / "env"))
        stage.run(3)
        (found,) = stage.groups()
    assert [sample.transcript for sample in found] == [
        sample.transcript for sample in expected
    ]
    assert found[0].transcript.prompt == "train 3"
    assert found[0].transcript.facts == {
        "score": 1.0 * int("".join(found[0].transcript.answers))
    }


# ── replies ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Tools:
    """Each reply of group 0 waits until two of them are at work; `odd` ones fail, the first time only or always."""

    rewards = ("score",)
    meeting = threading.Barrier(2, timeout=20)
    failed: ClassVar[set[str]] = set()

    def __init__(
        self, *, seed: int, split: Split, odd: str = "", again: bool = False
    ) -> None:
        self.size, self._odd, self._again = None, odd, again

    def episode(self, number: int) -> Tool:
        return Tool(f"{number}", self._odd, self._again)


class Tool:
    def __init__(self, prompt: str, odd: str, again: bool) -> None:
        self.prompt, self._odd, self._again, self._turns = prompt, odd, again, 0
        self._facts_fail = False

    def reply(self, answer: str) -> str | None:
        self._turns += 1
        if answer.startswith("0"):
            Tools.meeting.wait()
        if (
            answer.startswith("11")
            and self._odd
            and (self._again or answer[:2] not in Tools.failed)
        ):
            Tools.failed.add(answer[:2])
            if self._odd == "hangs":
                time.sleep(1.0)
            if self._odd in ("bytes", "half"):
                return (
                    b"?"
                    if self._odd == "bytes"
                    else b"\xff".decode(errors="surrogateescape")
                )
            if self._odd == "exits":
                sys.exit(3)
            if self._odd != "facts":
                raise OSError("no such tool")
            self._facts_fail = True
        return None if self._turns > 1 else "go on"

    def facts(self) -> Mapping[str, Any]:
        if self._facts_fail:
            raise OSError("no such fact")
        return {"score": 1.0}


def tools(**kwargs: Any) -> dict[str, Any]:
    Tools.failed.clear()
    return {
        "task": f"{__name__}:Tools",
        "max_turns": 3,
        "kwargs": kwargs,
        "reply_timeout_s": 0.3,
    }


def test_replies_of_several_episodes_are_made_at_the_same_time(folder: Path) -> None:
    with TextStage(
        folder, says, env=tools() | {"reply_timeout_s": 20.0}, algorithm=LONG
    ) as stage:
        stage.run()
    assert len(stage.groups()) == 3


@pytest.mark.parametrize("odd", ["raises", "hangs", "facts", "bytes", "half", "exits"])
@pytest.mark.parametrize(
    ("on_error", "again", "failures", "left_out"),
    [
        ("skip", False, 1, 1),
        ("retry", False, 1, 0),
        ("retry", True, 3, 1),
    ],
)
def test_an_episode_whose_reply_fails_is_begun_anew_or_left_out(
    folder: Path, odd: str, on_error: str, again: bool, failures: int, left_out: int
) -> None:
    env, faults = tools(odd=odd, again=again), {"on_error": on_error}
    stage = TextStage(
        folder,
        lambda r, s: f"1{s}{r.turn}<eos>",
        env=env,
        prompts=1,
        algorithm=LONG,
        faults=faults,
    )
    with stage:
        metrics = stage.run()[0]
        (group,) = stage.groups()
    assert value(metrics, "env/failures") == failures
    assert [sample.poisoned for sample in group] == [False, bool(left_out)]
    assert value(metrics, "env/episodes") == 2 - left_out


def test_a_function_over_lists_grades_the_answers_that_are_left(folder: Path) -> None:
    """Sample 1 of the group has no reply: the function gets the other two."""
    env = tools(odd="raises", again=True) | {
        "rewards": [{"name": "tests.odd_rewards:how_many"}]
    }
    stage = TextStage(
        folder,
        lambda r, s: f"1{s}{r.turn}<eos>",
        env=env,
        prompts=1,
        samples=3,
        algorithm=LONG,
        faults={"on_error": "skip"},
    )
    with stage:
        stage.run()
        (group,) = stage.groups()
    assert [sample.poisoned for sample in group] == [False, True, False]
    assert [group[0].reward, group[2].reward] == [2, 2]


class Looking(Counting):
    """Shows an image, and fails at the very first reply."""

    failed = False

    def episode(self, number: int) -> TextEpisode:
        return Looked(
            [Message("user", (Image(png(8, 8, seed=number)), "how many?"))], 3
        )


class Looked(Counted):
    def reply(self, answer: str) -> str | None:
        if not Looking.failed:
            Looking.failed = True
            raise OSError("once")
        return super().reply(answer)


def test_images_are_shown_in_every_turn_and_after_a_failure(tmp_path: Path) -> None:
    env = {"task": f"{__name__}:Looking", "max_turns": 3, "chat": True}
    more = {
        "env": env,
        "prompts": 2,
        "algorithm": LONG,
        "faults": {"on_error": "retry"},
    }
    with TextStage(tiny_vlm(tmp_path), says, **more) as stage:
        assert value(stage.run()[0], "env/failures") == 1
        groups = {group[0].group: group for group in stage.groups()}
    seen = [
        (request.turn, request.first_sample, request.images)
        for request in stage.puppet.asked
    ]
    assert len(seen) == 2 + 1 + 2 * 2 * 2  # prompts, the failure, later turns
    shown = [(png(8, 8, seed=number),) for number in range(2)]
    assert all(request.images == shown[request.group] for request in stage.puppet.asked)
    assert all(
        sample.images == shown[number]
        for number, group in groups.items()
        for sample in group
    )


def test_what_an_iteration_left_out_does_not_count_in_the_evaluation_after_it(
    folder: Path,
) -> None:
    runner, faults = (
        {"eval_every": 1, "eval_prompts": 1},
        {"on_error": "skip", "error_budget": 1},
    )
    env = tools(odd="raises", again=True)
    job = {
        "env": env,
        "prompts": 1,
        "runner": runner,
        "algorithm": LONG,
        "faults": faults,
    }
    with TextStage(
        folder, lambda r, s: f"1{1 if r.held_out else s}{r.turn}<eos>", **job
    ) as stage:
        assert value(stage.run()[0], "env/failures") == 1
        evaluated = stage.evaluate()[0]
        assert (
            value(evaluated, "eval/episodes"),
            value(evaluated, "eval/failures"),
        ) == (0, 1)


def test_a_reply_that_does_not_come_stops_the_run_and_names_the_sample(
    folder: Path,
) -> None:
    env = tools(odd="hangs")
    with (
        TextStage(
            folder,
            lambda r, s: f"1{s}{r.turn}<eos>",
            env=env,
            prompts=1,
            algorithm=LONG,
        ) as stage,
        pytest.raises(
            RewardError, match=r"did not come within 0\.3 s, for sample 1 of group 0"
        ) as caught,
    ):
        stage.run()
    assert caught.value.code == "reply-timeout"


@pytest.mark.parametrize(
    ("odd", "error", "says"),
    [
        ("facts", OSError, "no such fact"),
        ("bytes", TypeError, "returned a bytes"),
        ("half", ConfigError, "character"),
        ("exits", RuntimeError, "SystemExit"),
    ],
)
def test_facts_and_replies_that_fail_stop_the_run(
    folder: Path, odd: str, error: type[Exception], says: str
) -> None:
    with (
        TextStage(
            folder,
            lambda r, s: f"1{s}{r.turn}<eos>",
            env=tools(odd=odd),
            prompts=1,
            algorithm=LONG,
        ) as stage,
        pytest.raises(error, match=says) as caught,
    ):
        stage.run()
    assert caught.value.__notes__ == ["for sample 1 of group 0"]


def test_no_more_threads_are_left_behind_than_a_process_has_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where failures are skipped; one that ends at last gives its room back."""
    for left in [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("reply for")
    ]:
        left.join(10.0)
    monkeypatch.setattr(replies, "MOST_HUNG", 2)
    ends = [threading.Event() for _ in range(4)]
    asked = replies.Replies(together=1, timeout_s=0.01)

    def given_up(number: int) -> list[replies.Reply]:
        asked.ask((7, number), Waits(ends[number]), "an answer")
        return asked.done(10.0)

    try:
        for number in range(2):
            (late,) = given_up(number)
            assert isinstance(late.error, RewardError)
        (first,) = (
            thread
            for thread in threading.enumerate()
            if thread.name == "reply for sample 0 of group 7"
        )
        ends[0].set()
        first.join(10.0)
        assert len(given_up(2)) == 1
        with pytest.raises(
            RewardError,
            match="3 replies were given up and have not ended since, such as reply for sa",
        ):
            given_up(3)
    finally:
        for end in ends:
            end.set()


class Waits:
    prompt = "?"

    def __init__(self, end: threading.Event) -> None:
        self._end = end

    def reply(self, answer: str) -> str | None:
        self._end.wait(20.0)
        return None

    def facts(self) -> Mapping[str, Any]:
        return {}


# ── groups without signal ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("env_ranks", "seed"), [(1, 0), (2, 5)])
def test_a_group_of_equal_rewards_gives_way_to_another_prompt(
    folder: Path, env_ranks: int, seed: int
) -> None:
    """Group 0 has a signal at once, group 1 with its third prompt, group 2 with none of those it may ask."""
    asked: dict[int, list[bytes]] = {0: [], 1: [], 2: []}

    def equal_at_first(request: Request, sample: int) -> str:
        prompts = asked[request.group]
        if request.tokens.tobytes() not in prompts:
            prompts.append(request.tokens.tobytes())
        signal = request.group == 0 or (request.group == 1 and len(prompts) == 3)
        return f"{sample if signal else 1}<eos>"

    env = COUNTING | {"max_turns": 1}
    algorithm = LONG | {"name": "dapo", "refills": 2}
    stage = TextStage(
        folder,
        equal_at_first,
        env=env,
        env_ranks=env_ranks,
        algorithm=algorithm,
        seed=seed,
    )
    with stage:
        metrics = stage.run()
        groups = stage.groups()
    assert {group: len(prompts) for group, prompts in asked.items()} == {
        0: 1,
        1: 3,
        2: 3,
    }
    assert sorted((g[0].group, *sorted(s.reward for s in g)) for g in groups) == [
        (0, 0, 1),
        (1, 0, 1),
        (2, 1, 1),
    ]
    assert sum(value(m, "env/groups_refilled") for m in metrics) == 4
    assert sum(value(m, "env/episodes") for m in metrics) == 14


@pytest.mark.parametrize(("by", "refilled"), [(None, 0), ("short", 3)])
def test_groups_may_be_compared_by_one_of_their_rewards(
    folder: Path, by: str | None, refilled: int
) -> None:
    """Answers are equally short, and of different values."""
    names = ("tests.odd_rewards:short", "tests.odd_rewards:last_digit")
    rewards = [{"name": name} for name in names]
    stage = TextStage(
        folder,
        lambda request, sample: f"{sample}<eos>",
        env=COUNTING | {"max_turns": 1, "rewards": rewards},
        algorithm=LONG | {"name": "dapo", "refills": 1, "dynamic_sampling_by": by},
    )
    with stage:
        metrics = stage.run()[0]
    assert value(metrics, "env/groups_refilled") == refilled


def test_a_group_whose_rewards_are_equal_but_for_one_left_out_gives_way(
    folder: Path,
) -> None:
    """What is learned of it has no signal: the reply to its other episode failed."""
    algorithm, faults = LONG | {"name": "dapo", "refills": 1}, {"on_error": "skip"}
    env = tools(odd="raises")
    stage = TextStage(
        folder,
        lambda r, s: f"1{s}{r.turn}<eos>",
        env=env,
        prompts=1,
        algorithm=algorithm,
        faults=faults,
    )
    with stage:
        metrics = stage.run()[0]
        (group,) = stage.groups()
    assert value(metrics, "env/groups_refilled") == 1
    assert [sample.poisoned for sample in group] == [False, False]


def test_groups_are_asked_once_where_other_components_reward_them(folder: Path) -> None:
    with TextStage(
        folder, lambda *_: "1<eos>", env=COUNTING, algorithm=LONG | {"name": "grpo"}
    ) as stage:
        metrics = stage.run()
    assert (
        len(
            {
                request.tokens.tobytes()
                for request in stage.puppet.asked
                if request.turn == 0
            }
        )
        == 3
    )
    assert "env/groups_refilled" not in metrics[0]


# ── evaluation ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_held_out_prompts_are_answered_greedily_and_nothing_is_learned(
    folder: Path,
) -> None:
    runner = {"eval_every": 1, "eval_prompts": 5}
    with TextStage(
        folder, says, env=COUNTING, env_ranks=2, runner=runner, algorithm=LONG
    ) as stage:
        first, second = stage.evaluate(), stage.evaluate(3)
        asked = stage.puppet.asked
        assert stage.groups() == []
    assert all(request.greedy and request.samples == 1 for request in asked)
    opening = sorted(
        Tokenizer.load(folder).decode(r.tokens) for r in asked if r.turn == 0
    )
    assert opening == sorted(2 * [f"user: held_out {n}\nassistant: " for n in range(5)])
    assert [value(m, "eval/reward") for m in first] == [
        value(m, "eval/reward") for m in second
    ]
    assert sum(value(m, "eval/episodes") for m in first) == 5


class Sets(Counting):
    """Every prompt of an odd number is of the set `odd`."""

    def episode(self, number: int) -> TextEpisode:
        return OfSet(f"{self._name} {number}", 1, "odd" if number % 2 else "even")


class OfSet(Counted):
    def __init__(self, prompt: str, turns: int, of: str) -> None:
        super().__init__(prompt, turns)
        self._of = of

    def facts(self) -> Mapping[str, Any]:
        return {**super().facts(), "data_set": self._of}


@pytest.mark.parametrize(
    ("temperature", "samples", "greedy"),
    [(0.6, 1, False), (0.0, 3, True), (0.6, 3, False)],
)
def test_held_out_prompts_are_drawn_at_a_temperature_of_their_own(
    folder: Path, temperature: float, samples: int, greedy: bool
) -> None:
    runner = {
        "eval_every": 1,
        "eval_prompts": 2,
        "eval_samples": samples,
        "eval_temperature": temperature,
    }
    with TextStage(folder, says, env=COUNTING, runner=runner, algorithm=LONG) as stage:
        stage.evaluate()
        asked = stage.puppet.asked
    assert {
        (request.greedy, request.samples) for request in asked if request.turn == 0
    } == {(greedy, samples)}


def test_held_out_prompts_are_answered_several_times_by_set(folder: Path) -> None:
    """Of 4 prompts, those of even numbers are answered by 0, 0, 1, those of odd ones by 0, 0, 0."""
    runner = {"eval_every": 1, "eval_prompts": 4, "eval_samples": 3}
    env = {"task": f"{__name__}:Sets", "max_turns": 1}

    def answer(request: Request, sample: int) -> str:
        return f"{int(sample == 2 and request.group % 2 == 0)}<eos>"

    with TextStage(folder, answer, env=env, runner=runner, algorithm=LONG) as stage:
        (found,) = stage.evaluate()
        asked = stage.puppet.asked
    assert all(
        request.held_out and not request.greedy and request.samples == 3
        for request in asked
    )
    assert value(found, "eval/reward") == pytest.approx(1 / 6)
    assert [value(found, f"eval/{of}passed") for of in ("", "even/", "odd/")] == [
        0.5,
        1.0,
        0.0,
    ]
    assert value(found, "eval/even/reward") == pytest.approx(1 / 3)


# ── what goes wrong ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("weights", "passed", "said"),
    [
        # The form alone gives 1, and no answer is right
        ((1.0, 1.0), 1.0, "without the reward of the largest weight"),
        # The form gives 0.25, and a right answer would give 0.75
        ((0.5, 0.25), 0.0, "add up to 0.75: no answer passes"),
        ((1.0, 0.25), 0.0, None),
    ],
)
def test_what_a_sum_of_rewards_does_not_tell_of_passed_prompts_is_said(
    folder: Path, weights: tuple[float, float], passed: float, said: str | None
) -> None:
    """Of a sum of rewards, 1 need not mean that an answer is right, and a right answer need not have 1."""
    rewards = [
        {"name": "math_answer", "weight": weights[0]},
        {"name": "matches", "weight": weights[1], "kwargs": {"pattern": "x.*"}},
    ]
    runner = {"eval_every": 1, "eval_prompts": 3, "eval_samples": 2}
    env = {"task": "arithmetic", "rewards": rewards}
    with TextStage(folder, lambda r, s: "x<eos>", env=env, runner=runner) as stage:
        (found,) = stage.evaluate()
    assert value(found, "eval/passed") == passed
    assert ("eval/passed/math_answer" in found) == (said is not None)
    notes = found["eval/passed"].notes
    if said is None:
        assert not notes
        return
    assert said in notes[0]
    assert value(found, "eval/passed/math_answer") == 0
    assert value(found, "eval/passed/matches") == 1


def test_playing_while_off_is_refused(folder: Path) -> None:
    with TextStage(
        folder, says, env={"task": "arithmetic", "accelerator_memory": 1 << 20}
    ) as stage:
        (worker,) = stage.env
        assert worker.context.device.held_bytes() == 1 << 20
        report = worker.move(Residency.OFF)
        assert (report.accelerator_bytes, report.host_bytes) == (0, 0)
        with pytest.raises(NotResident):
            worker.run(0)
    assert stage.puppet.asked == []


def test_a_cancelled_worker_stops(folder: Path) -> None:
    with TextStage(folder, says, env={"task": "arithmetic"}) as stage:
        stage.env[0].context.cancelled.set()
        with pytest.raises(ChannelBroken) as caught:
            stage.env[0].run(0)
    assert caught.value.code == "cancelled"


def stray(group: int, sample: int, turn: int) -> Completion:
    tokens, zeros = np.array([END], np.int32), np.zeros(1, np.int32)
    rest: dict[str, Any] = {
        "tokens": tokens,
        "logprobs": zeros.astype(np.float32),
        "versions": zeros,
        "finish": "stop",
    }
    return Completion(
        env_rank=0,
        iteration=0,
        held_out=False,
        group=group,
        sample=sample,
        turn=turn,
        **rest,
    )


@pytest.mark.parametrize(
    ("item", "got"),
    [
        (stray(0, 0, 1), "group 0, sample 0, turn 1"),
        (stray(0, 9, 0), "group 0, sample 9, turn 0"),
        (stray(9, 0, 0), "group 9, sample 0, turn 0"),
        (Done(iteration=4, env_rank=1), "the end of iteration 5"),
    ],
    ids=["turn", "sample", "group", "an env rank is elsewhere"],
)
def test_what_no_open_episode_waits_for_is_refused(
    folder: Path, item: Completion | Done, got: str
) -> None:
    with TextStage(folder, says, env={"task": "arithmetic"}) as stage:
        stage.channels[COMPLETIONS].put_nowait(item, key="0")
        with pytest.raises(ChannelMisuse) as caught:
            stage.run()
    assert (caught.value.code, caught.value.problem.got) == ("out-of-step", got)


def test_an_error_of_the_task_is_raised_as_it_is(folder: Path) -> None:
    stage = TextStage(folder, lambda request, sample: "lookup<eos>", env=COUNTING)
    with stage, pytest.raises(KeyError, match="the task's own"):
        stage.run()


def test_a_reward_that_is_no_number_names_function_and_sample(folder: Path) -> None:
    env = {
        "task": "arithmetic",
        "rewards": [{"name": "tests.odd_rewards:not_a_number"}],
    }
    stage = TextStage(
        folder, lambda request, sample: "no<eos>", env=env, prompts=1, samples=1
    )
    with stage, pytest.raises(RewardError) as caught:
        stage.run()
    assert caught.value.code == "reward-not-finite"
    assert caught.value.problem.key == "reward function tests.odd_rewards:not_a_number"
    assert "sample 0 of group 0" in caught.value.problem.what
    assert caught.value.problem.got == "'no'"


@pytest.mark.parametrize(
    ("lengths", "env", "longest", "got", "enough"),
    [
        (
            [5, 300, 5, 400],
            {},
            200,
            "2 of 4 prompts; the longest, number 3, has 418 tokens",
            418,
        ),
        (
            [300],
            {"long_prompts": "drop"},
            200,
            "1 of 1 prompts; the longest, number 0, has 318 tokens",
            318,
        ),
        (
            [],
            {"task": "arithmetic"},
            10,
            "prompt 0: ",
            0,
        ),  # endless: found before it plays
    ],
    ids=["refused with their count", "none is left", "endless"],
)
def test_long_prompts(
    folder: Path,
    tmp_path: Path,
    lengths: list[int],
    env: dict[str, Any],
    longest: int,
    got: str,
    enough: int,
) -> None:
    limits = {"max_prompt_length": longest}
    stage = TextStage(
        folder,
        says,
        env=(rows(tmp_path, lengths) if lengths else {}) | env,
        algorithm=limits,
    )
    with pytest.raises(ConfigError) as caught, stage:
        pass
    (problem,) = caught.value.problems
    assert (problem.code, problem.key) == (
        "long-prompts",
        "algorithm.max_prompt_length",
    )
    assert str(problem.got).startswith(got)
    assert f"max_prompt_length: {enough or ''}" in str(problem.fix)
    assert check_prompts(stage.job.config, folder) == (problem,)


def test_long_prompts_are_left_out_where_the_config_says_so(
    folder: Path, tmp_path: Path
) -> None:
    env = rows(tmp_path, [5, 300, 6, 400]) | {"long_prompts": "drop"}
    with TextStage(folder, says, env=env, prompts=4) as stage:
        (metrics,) = stage.run()
    assert metrics["env/prompts_dropped"].value == 2
    assert metrics["env/prompts_dropped"].notes == (
        "left out 2 train prompts of more than 200 tokens: env.long_prompts: drop",
    )
    assert sorted(
        Tokenizer.load(folder).decode(r.tokens).count("x") for r in stage.puppet.asked
    ) == [5, 5, 6, 6]


def test_a_prompt_without_tokens_is_found_before_anything_is_asked(
    folder: Path, tmp_path: Path
) -> None:
    env = rows(tmp_path, [3, 0]) | {"chat": False}
    with (
        pytest.raises(ConfigError, match="prompt 1: ''") as caught,
        TextStage(folder, says, env=env),
    ):
        pass
    assert caught.value.codes == ("empty-prompt",)


def test_a_prompt_that_the_template_refuses_is_named_by_its_line(
    folder: Path, tmp_path: Path
) -> None:
    model = tiny_tokenizer(
        tmp_path / "model",
        chat="{{ raise_exception('no') if 'xx' in messages[0].content }}"
        "{{ messages[0].content }}",
    )
    with (
        pytest.raises(ConfigError) as caught,
        TextStage(model, says, env=rows(tmp_path, [1, 1, 2])),
    ):
        pass
    (problem,) = caught.value.problems
    assert (problem.code, problem.got) == ("chat-template-refused", "prompt 2: user")
    assert str(problem.source) == f"{tmp_path / 'rows.jsonl'}:3"


class Halves(Counting):
    """One prompt is of bytes that were decoded as they should not be."""

    def episode(self, number: int) -> TextEpisode:
        return Counted(
            b"\xff".decode(errors="surrogateescape") if number == 1 else f"{number}", 1
        )


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_prompt_that_is_no_text_gives_way_to_another_where_errors_are_skipped(
    folder: Path, on_error: str
) -> None:
    task, faults = {"task": f"{__name__}:Halves"}, {"on_error": on_error}
    with TextStage(
        folder, lambda r, s: f"{r.group}{s}<eos>", env=task, prompts=2, faults=faults
    ) as stage:
        if on_error == "stop":
            with pytest.raises(ConfigError, match=r"no-text(.|\n)*prompt 1: "):
                stage.run()
            return
        metrics = stage.run()[0]
        groups = stage.groups()
    assert value(metrics, "env/failures") == 1
    assert sorted(group[0].group for group in groups) == [0, 1]


def test_a_model_that_does_not_chat(tmp_path: Path) -> None:
    folder = tiny_tokenizer(tmp_path / "model", chat=None)
    with (
        pytest.raises(ConfigError) as caught,
        TextStage(folder, says, env={"task": "arithmetic"}),
    ):
        pass
    assert caught.value.codes == ("no-chat-template",)
    with TextStage(folder, says, env={"task": "arithmetic", "chat": False}) as stage:
        stage.run()
    assert (
        Tokenizer.load(folder)
        .decode(stage.puppet.asked[0].tokens, special=True)
        .startswith("What is ")
    )

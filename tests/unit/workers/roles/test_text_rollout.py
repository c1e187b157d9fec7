"""The rollout worker of language models alone: the far ends of its channels are the test's."""

from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.ends import LocalChannel
from rlplace.config.read import read_config
from rlplace.errors import (
    ChannelBroken,
    ChannelEmpty,
    ChannelMisuse,
    ConfigError,
    DivergedError,
    Problem,
)
from rlplace.placement.schedule import Residency
from rlplace.tokens import Completion, Request
from rlplace.workers.arguments import (
    COMPLETIONS,
    REQUESTS,
    WEIGHTS,
    EndOfIteration,
    TextArguments,
)
from rlplace.workers.roles.rollout import TextRolloutWorker
from rlplace.workers.worker import Rendezvous
from tests.rollout_stage import Ledger
from tests.tiny_lm import request_of, tiny_model
from tests.unit.workers.roles.test_rollout import push
from tests.worker_ranks import context_of

PROMPTS, SAMPLES = 4, 2
END_OF_0 = EndOfIteration(iteration=0)
CACHE_BYTES = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder: Path) -> nn.Module:
    import transformers

    model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return model


def job_of(
    folder: Path,
    *,
    rollout_ranks: int = 1,
    memory: str = "1GiB",
    on_poison: str = "stop",
    env: Mapping[str, Any] | None = None,
    router_replay: bool = False,
    **rollout: Any,
) -> TextArguments:
    placement = {"actor": "0", "env": "0", "rollout": f"0-{rollout_ranks - 1}"}
    lengths = {"max_prompt_length": 40, "max_new_tokens": 60}
    small = {
        "engine": "transformers",
        "dtype": "fp32",
        "kv_cache_memory": CACHE_BYTES,
        "step_sequences": 16,
        "seed": 1,
    }
    config = read_config(
        {
            "cluster": {
                "component_placement": placement,
                "accelerator": {"memory": memory},
            },
            "algorithm": {
                "name": "grpo",
                "prompts": PROMPTS,
                "samples_per_prompt": SAMPLES,
                **lengths,
            },
            "actor": {"model": {"path": str(folder)}, "router_replay": router_replay},
            "env": env or {"task": "arithmetic"},
            "rollout": {**small, **rollout},
            "faults": {"on_poison": on_poison},
        }
    )
    return TextArguments(
        config=config, ranks={"actor": 1, "env": 2, "rollout": rollout_ranks}
    )


class Script:
    """A channel of requests that gives what the test wrote down; None is a moment in which nothing is there, a function
    one in which it happens."""

    def __init__(self, *items: object) -> None:
        self._items = collections.deque(items)

    def named(self, owner: str) -> Script:
        return self

    def get_nowait(self, *, key: str = "") -> Any:
        item = self._items.popleft()
        if callable(item):
            item = item()
        if item is None:
            raise ChannelEmpty(
                Problem(code="channel-empty", key="requests", what="nothing is there")
            )
        return item

    def get(self, *, key: str = "", timeout_s: float | None = None) -> Any:
        while (item := self._items.popleft()) is None:
            pass
        return item


def channels(timeout_s: float = 20.0) -> dict[str, Any]:
    names = (REQUESTS, COMPLETIONS, WEIGHTS)
    return {
        n: LocalChannel(ChannelSpec(name=n, capacity_items=1000, timeout_s=timeout_s))
        for n in names
    }


class Rank:
    """A rollout rank that was set up, with the far ends of its channels."""

    def __init__(
        self, job: TextArguments, channels: dict[str, Any], rank: int = 0
    ) -> None:
        self.channels = channels
        named = {
            name: channel.named(f"rollout rank {rank}")
            for name, channel in channels.items()
        }
        alone, ranks = Rendezvous(host="", port=0), job.ranks["rollout"]
        self.context = context_of("rollout", rank, ranks, alone, named, device=Ledger())
        self.worker = TextRolloutWorker(job, self.context)
        self.worker.setup()

    def sync(self, model: nn.Module, version: int) -> Any:
        push(self.channels[WEIGHTS], self.context.rank, version, model.state_dict())
        return self.worker.pull_weights(version)

    def ask(self, *requests: Request, end: int | None = 0) -> None:
        for request in requests:
            self.channels[REQUESTS].put(request)
        if end is not None:
            self.channels[REQUESTS].put(EndOfIteration(iteration=end))

    def answers(self, env_rank: int) -> list[Completion]:
        channel, key = self.channels[COMPLETIONS], str(env_rank)
        return [
            channel.get_nowait(key=key)
            for _ in range(channel.stats().depth_by_key.get(key, 0))
        ]


Start = Callable[..., Rank]


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Sets up ranks and closes them; with a model, FULL and with its weights as version 3."""
    ranks: list[Rank] = []

    def make(
        model: nn.Module | None = None,
        made: dict[str, Any] | None = None,
        rank: int = 0,
        **job: Any,
    ) -> Rank:
        ranks.append(
            Rank(job_of(folder, **job), channels() if made is None else made, rank)
        )
        if model is not None:
            ranks[-1].worker.move(Residency.FULL)
            ranks[-1].sync(model, 3)
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.worker.close()


@pytest.fixture
def rank(start: Start, model: nn.Module) -> Rank:
    return start(model)


def numbers(answers: Sequence[Completion]) -> list[tuple[int, int, int]]:
    return sorted((a.group, a.sample, a.turn) for a in answers)


def test_every_answer_goes_to_the_env_rank_that_asked(rank: Rank) -> None:
    rank.ask(
        *(
            request_of(group, samples=SAMPLES, env_rank=group % 2)
            for group in range(PROMPTS)
        )
    )
    metrics = rank.worker.generate(0)
    answers = {env_rank: rank.answers(env_rank) for env_rank in (0, 1)}
    assert numbers(answers[0]) == [(0, 0, 0), (0, 1, 0), (2, 0, 0), (2, 1, 0)]
    assert numbers(answers[1]) == [(1, 0, 0), (1, 1, 0), (3, 0, 0), (3, 1, 0)]
    tokens = sum(len(a.tokens) for a in answers[0] + answers[1])
    assert metrics["rollout/answers"].value == PROMPTS * SAMPLES
    assert metrics["rollout/tokens"].value == tokens
    assert metrics["rollout/batch"].value * metrics["rollout/batch"].weight == tokens
    assert metrics["rollout/prompt_cached"].value == pytest.approx(1 / SAMPLES)
    assert metrics["rollout/tokens_per_s"].value > 0
    seconds = {name for name in metrics if name.endswith("_s") and "per_s" not in name}
    assert seconds == {
        "rollout/prefill_s",
        "rollout/decode_s",
        "rollout/policy_s",
        "rollout/wait_s",
        "rollout/put_s",
    }


VLLM = {"engine": "vllm", "enforce_eager": True, "step_tokens": 256}


@pytest.mark.parametrize(
    "built",
    [{}, pytest.param(VLLM, marks=[pytest.mark.vllm, pytest.mark.slow])],
    ids=["transformers", "vllm"],
)
def test_answers_are_of_the_weights_that_were_pulled(
    start: Start, model: nn.Module, built: dict[str, Any]
) -> None:
    rank = start(model, **built)
    rank.ask(request_of(0, samples=SAMPLES))
    rank.worker.generate(0)
    answers, prompt = rank.answers(0), request_of(0).tokens
    assert len(answers) == SAMPLES
    for answer in answers:
        whole = torch.tensor([[*prompt, *answer.tokens]], dtype=torch.int64)
        with torch.no_grad():
            expected = (
                model(whole)
                .logits[0]
                .log_softmax(-1)[:-1]
                .gather(-1, whole[0, 1:, None])[len(prompt) - 1 :, 0]
            )
        assert np.abs(answer.logprobs - expected.numpy()).max() < 1e-4
        assert set(answer.versions) == {3}


def test_what_has_ended_leaves_at_once_and_what_arrives_meanwhile_joins(
    start: Start, model: nn.Module
) -> None:
    long, short, later = (
        request_of(group, longest=longest)
        for group, longest in ((0, 40), (1, 3), (2, 3))
    )
    script = Script(
        long, short, *[None] * 6, later, *[None] * 60, EndOfIteration(iteration=0)
    )
    rank = start(model, {**channels(), REQUESTS: script})
    metrics = rank.worker.generate(0)
    assert [(a.group, len(a.tokens)) for a in rank.answers(0)] == [
        (1, 3),
        (2, 3),
        (0, 40),
    ]
    assert metrics["rollout/batch"].weight == 40  # steps: nobody waited for another


def test_what_a_round_has_left_is_dropped_at_its_end(
    start: Start, model: nn.Module
) -> None:
    script = Script(
        request_of(0, longest=40), *[None] * 3, EndOfIteration(iteration=0, drop=True)
    )
    rank = start(model, {**channels(), REQUESTS: script})
    metrics = rank.worker.generate(0)
    assert (rank.answers(0), rank.worker.engine.in_flight) == ([], 0)
    assert metrics["rollout/batch"].weight == 3  # steps


def test_weights_that_come_meanwhile_sample_what_is_left_of_an_answer(
    start: Start, model: nn.Module
) -> None:
    wires = channels()
    both = [
        functools.partial(push, wires[WEIGHTS], 0, version, model.state_dict())
        for version in (4, 5)
    ]
    script = Script(
        request_of(0, longest=40),
        *[None] * 9,
        both[0],
        *[None] * 9,
        both[1],
        *[None] * 30,
        END_OF_0,
    )
    rank = start(model, {**wires, REQUESTS: script})
    metrics = rank.worker.generate(0)
    (answer,) = rank.answers(0)
    assert answer.versions.tolist() == [3] * 9 + [4] * 10 + [5] * 21
    assert metrics["rollout/updates"].value == 2
    assert metrics["rollout/update_s"].value > 0
    assert rank.worker.pull_weights(5) == {}  # it has them
    assert rank.worker.engine.version == 5


def test_pushes_that_nobody_took_are_taken_in_their_order(
    rank: Rank, model: nn.Module
) -> None:
    for version in (4, 5):
        push(rank.channels[WEIGHTS], 0, version, model.state_dict())
    rank.worker.pull_weights(5)
    assert rank.worker.engine.version == 5
    assert rank.channels[WEIGHTS].stats().depth_items == 0


def test_iterations_follow_each_other(rank: Rank) -> None:
    rank.ask(request_of(0, samples=2), end=0)
    rank.ask(
        request_of(0, samples=2, iteration=1), request_of(1, iteration=1, turn=1), end=1
    )
    rank.worker.generate(0)
    first = rank.answers(0)
    rank.worker.generate(1)
    second = rank.answers(0)
    assert (numbers(first), numbers(second)) == (
        [(0, 0, 0), (0, 1, 0)],
        [(0, 0, 0), (0, 1, 0), (1, 0, 1)],
    )
    assert {tuple(a.tokens) for a in first}.isdisjoint(
        {tuple(a.tokens) for a in second}
    )


def test_ranks_share_requests_and_none_takes_more_than_its_share(
    start: Start, model: nn.Module
) -> None:
    shared = channels()
    ranks = [start(model, shared, number, rollout_ranks=2) for number in range(2)]
    ranks[0].ask(
        *(request_of(group, samples=SAMPLES, longest=30) for group in range(PROMPTS)),
        end=None,
    )

    def env() -> list[Completion]:
        answers = [shared[COMPLETIONS].get(key="0") for _ in range(PROMPTS * SAMPLES)]
        for _ in ranks:
            shared[REQUESTS].put(EndOfIteration(iteration=0))
        return answers

    with ThreadPoolExecutor(3) as threads:
        running = [threads.submit(rank.worker.generate, 0) for rank in ranks]
        answers = threads.submit(env).result()
        metrics = [call.result() for call in running]
    assert len(numbers(answers)) == PROMPTS * SAMPLES
    assert sum(m["rollout/answers"].value for m in metrics) == PROMPTS * SAMPLES
    assert max(m["rollout/batch"].value for m in metrics) <= PROMPTS * SAMPLES / 2


def test_a_request_of_another_iteration_is_refused(rank: Rank) -> None:
    rank.ask(request_of(0, iteration=7), end=None)
    with pytest.raises(ChannelMisuse) as caught:
        rank.worker.generate(8)
    assert caught.value.code == "out-of-step"
    assert "iteration 8" in str(caught.value)


def test_a_cancelled_rank_stops(rank: Rank) -> None:
    rank.context.cancelled.set()
    with pytest.raises(ChannelBroken) as caught:
        rank.worker.generate(0)
    assert caught.value.code == "cancelled"


@pytest.mark.parametrize(
    ("version", "says"),
    [(4, "weights of version 4"), (0, "in the folder of actor.model.path")],
)
def test_an_answer_of_broken_weights_goes_to_nobody(
    rank: Rank, model: nn.Module, version: int, says: str
) -> None:
    broken = copy.deepcopy(model)
    with torch.no_grad():
        next(broken.parameters()).fill_(float("nan"))
    rank.sync(broken, version)
    rank.ask(request_of(0))
    with pytest.raises(DivergedError) as caught:
        rank.worker.generate(0)
    assert caught.value.code == "logprob-not-finite"
    assert says in str(caught.value)
    assert rank.answers(0) == []


def test_an_engine_without_routes_cannot_be_replayed(
    start: Start, model: nn.Module
) -> None:
    """No experts are recorded of a dense model; held-out answers need none."""
    rank = start(model, router_replay=True)
    rank.ask(request_of(0, held_out=True))
    rank.worker.generate(0)
    assert len(rank.answers(0)) == 1
    rank.ask(request_of(0))
    with pytest.raises(ConfigError) as caught:
        rank.worker.generate(0)
    (problem,) = caught.value.problems
    assert (problem.code, problem.fix) == ("no-routes", "router_replay: false")
    assert rank.answers(0) == []


def test_where_poison_is_skipped_the_env_gets_it(
    start: Start, model: nn.Module
) -> None:
    """It waits for every answer; a sample of this one is poisoned: see tests/unit/test_tokens.py."""
    rank, broken = start(model, on_poison="skip"), copy.deepcopy(model)
    with torch.no_grad():
        next(broken.parameters()).fill_(float("nan"))
    rank.sync(broken, 4)
    rank.ask(request_of(0))
    rank.worker.generate(0)
    assert not any(np.isfinite(answer.logprobs).all() for answer in rank.answers(0))


def test_a_pull_loads_and_says_how_much(start: Start, model: nn.Module) -> None:
    rank = start()
    rank.worker.move(Residency.WEIGHTS)
    metrics = rank.sync(model, 4)
    assert rank.worker.engine.version == 4
    assert metrics["rollout/pull_bytes"].value == sum(
        w.nbytes for w in model.state_dict().values()
    )
    assert metrics["rollout/pull_s"].value >= metrics["rollout/load_s"].value > 0


@pytest.mark.parametrize(("task", "taken"), [("arithmetic", 8), ("agent", 12)])
def test_agents_may_have_several_answers_in_flight_for_an_episode(
    start: Start, model: nn.Module, task: str, taken: int
) -> None:
    made = channels()
    seen: list[int] = []
    requests = [request_of(group, samples=1) for group in range(12)]

    def look() -> None:
        seen.append(rank.worker.engine.in_flight)

    made[REQUESTS] = Script(*requests[:taken], look, *requests[taken:], END_OF_0)
    env = {"task": task, "max_turns": 2}
    rank = start(model, made, env=env, kv_cache_memory=4 << 20)
    rank.worker.generate(0)
    # Without agents, a rank looks for no further request while it has its share
    assert seen[0] == taken if task == "agent" else seen[0] < taken


def test_a_share_of_an_emulated_accelerator_is_counted_in_bytes(start: Start) -> None:
    rank = start(memory="8MiB", kv_cache_memory=None, gpu_memory_utilization=0.25)
    assert 1 << 20 < rank.worker.move(Residency.FULL).accelerator_bytes <= 2 << 20

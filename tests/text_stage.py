"""The rollout stage of a text task without a model: env workers in threads, and a rollout rank that tests speak for."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.ends import LocalChannel
from rlplace.config.read import read_config
from rlplace.errors import ChannelEmpty
from rlplace.metrics import Metrics
from rlplace.models.tokenizer import Tokenizer
from rlplace.placement.schedule import Residency
from rlplace.tokens import Completion, Request, Sample
from rlplace.workers.arguments import (
    COMPLETIONS,
    REQUESTS,
    SAMPLES,
    EndOfIteration,
    TextArguments,
)
from rlplace.workers.roles.text_env import TextEnvWorker
from rlplace.workers.worker import Rendezvous, WorkerContext
from tests.rollout_stage import Ledger
from tests.tiny_tokenizer import END
from tests.worker_ranks import context_of

Says = Callable[
    [Request, int], str
]  # (request, sample) -> the answer; without an end it was cut by its length


class Puppet:
    """Answers requests in an order of its own: one of those it has, as its seed says."""

    def __init__(
        self,
        channels: Mapping[str, LocalChannel],
        tokenizer: Tokenizer,
        says: Says,
        *,
        seed: int,
    ) -> None:
        self._channels = {
            name: channel.named("rollout rank 0") for name, channel in channels.items()
        }
        self._tokenizer, self._says, self._draw = tokenizer, says, random.Random(seed)
        self.asked: list[Request] = []
        self.answered: dict[tuple[int, int, int], Completion] = {}

    def generate(self, iteration: int) -> None:
        waiting: list[tuple[Request, int]] = []
        while True:
            try:
                item = (
                    self._channels[REQUESTS].get_nowait()
                    if waiting
                    else self._channels[REQUESTS].get()
                )
            except ChannelEmpty:
                self._answer(*waiting.pop(self._draw.randrange(len(waiting))))
                continue
            if isinstance(item, EndOfIteration):
                assert (not waiting or item.drop, item.iteration) == (True, iteration)
                return
            self.asked.append(item)
            waiting += [
                (item, item.first_sample + index) for index in range(item.samples)
            ]

    def _answer(self, request: Request, sample: int) -> None:
        text = self._says(request, sample)
        cut = not text.endswith("<eos>")
        tokens = self._tokenizer.encode(text)
        if cut:
            tokens = tokens[: request.max_new_tokens]
        assert cut or (tokens[-1] == END and len(tokens) <= request.max_new_tokens)
        completion = Completion(
            env_rank=request.env_rank,
            iteration=request.iteration,
            held_out=request.held_out,
            group=request.group,
            sample=sample,
            turn=request.turn,
            tokens=tokens,
            logprobs=-np.arange(1, len(tokens) + 1, dtype=np.float32) / (1 + sample),
            versions=np.full(len(tokens), 7 + request.turn, np.int32),
            finish="length" if cut else "stop",
        )
        self.answered[request.group, sample, request.turn] = completion
        self._channels[COMPLETIONS].put(completion, key=str(request.env_rank))


class TextStage:
    """All env workers of a job, set up and FULL, and one rollout rank."""

    def __init__(
        self,
        folder: Path,
        says: Says,
        *,
        env: Mapping[str, Any],
        env_ranks: int = 1,
        prompts: int = 3,
        samples: int = 2,
        algorithm: Mapping[str, Any] | None = None,
        runner: Mapping[str, Any] | None = None,
        faults: Mapping[str, Any] | None = None,
        seed: int = 0,
        room: Mapping[str, int]
        | None = None,  # items of a channel, 100 where it is not named
    ) -> None:
        lengths = {"max_prompt_length": 200, "max_new_tokens": 20}
        config = read_config(
            {
                "cluster": {"component_placement": {"env": "0"}},
                "actor": {"model": {"path": str(folder)}},
                "algorithm": {
                    "name": "grpo",
                    "prompts": prompts,
                    "samples_per_prompt": samples,
                    **lengths,
                }
                | dict(algorithm or {}),
                "env": dict(env),
                "runner": dict(runner or {}),
                "faults": dict(faults or {}),
            }
        )
        self.job = TextArguments(
            config=config, ranks={"actor": 1, "env": env_ranks, "rollout": 1}
        )
        self.channels = {
            name: LocalChannel(
                ChannelSpec(
                    name=name, capacity_items=(room or {}).get(name, 100), timeout_s=20
                )
            )
            for name in (REQUESTS, COMPLETIONS, SAMPLES)
        }
        self.puppet = Puppet(self.channels, Tokenizer.load(folder), says, seed=seed)
        self.env = [
            TextEnvWorker(self.job, self._context(rank)) for rank in range(env_ranks)
        ]

    def _context(self, rank: int) -> WorkerContext:
        named = {
            name: channel.named(f"env rank {rank}")
            for name, channel in self.channels.items()
        }
        return context_of(
            "env",
            rank,
            self.job.ranks["env"],
            Rendezvous(host="", port=0),
            named,
            device=Ledger(),
        )

    def __enter__(self) -> TextStage:
        try:
            for worker in self.env:
                worker.setup()
                worker.move(Residency.FULL)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for worker in self.env:
            worker.close()

    def run(self, iteration: int = 0) -> list[Metrics]:
        return self._together(iteration, [worker.run for worker in self.env])

    def evaluate(self, iteration: int = 0) -> list[Metrics]:
        return self._together(iteration, [worker.evaluate for worker in self.env])

    def _together(
        self, iteration: int, calls: Sequence[Callable[[int], Metrics]]
    ) -> list[Metrics]:
        """One iteration; what fails first breaks the channels for all, and is raised after all have ended."""

        def guarded(call: Callable[[int], Any]) -> Any:
            try:
                return call(iteration)
            except BaseException as error:
                failures.append(error)
                for channel in self.channels.values():
                    channel.break_("a test's worker failed")
                raise

        failures: list[BaseException] = []
        with ThreadPoolExecutor(len(calls) + 1) as threads:
            pending = [threads.submit(guarded, call) for call in calls]
            threads.submit(guarded, self.puppet.generate)
        if failures:
            raise failures[0]
        return [p.result() for p in pending]

    def groups(self) -> list[tuple[Sample, ...]]:
        """What the actor was sent since last asked, in the order in which it was put."""
        channel = self.channels[SAMPLES]
        return [channel.get_nowait() for _ in range(channel.stats().depth_items)]

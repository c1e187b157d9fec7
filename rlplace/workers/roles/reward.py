"""Reward workers: score whole episodes by a model, by a Python function, or by an HTTP endpoint."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from rlplace.envs.text.graders import Grader, grader_of
from rlplace.envs.text.rewards import Case, label_of, reward_of_config
from rlplace.errors import RewardError
from rlplace.models.tokenizer import Tokenizer
from rlplace.tokens import Sample
from rlplace.workers.roles.reward_client import RewardClient, endpoint_of
from rlplace.workers.roles.scorer import ModelInput, ModelScorer, Samples, StreamingScorer, Values
from rlplace.workers.roles.scorer_text import queries, retokenized, transcript_of

if TYPE_CHECKING:
    from rlplace.config import FrozenConfig
    from rlplace.models.causal_lm import PackedLm

_POLL_S = 0.5  # how often a wait for the endpoint checks for cancellation and new samples


class RewardModelWorker(ModelScorer):
    """Scores episodes by a model of sequence classification, in its own tokens where the policy has others."""

    @property
    def _block(self) -> FrozenConfig:
        return self.config.config.reward_of(self.component)

    def _kind(self) -> type[PackedLm]:
        from rlplace.models.causal_lm import reward_lm

        return reward_lm(self.config.config.reward_of(self.component).head)

    def setup(self) -> None:
        self._tokens_of = retokenized(self.config, self.folder)
        super().setup()

    def _input(self, sample: Sample) -> ModelInput:
        tokens = self._tokens_of(sample)
        mask = np.zeros(len(tokens), np.bool_)  # the score is of the whole episode
        return ModelInput(group=sample.group, sample=sample.sample, tokens=tokens, mask=mask)

    def _values(self, batch: tuple[ModelInput, ...]) -> Sequence[Values]:
        scores = self._forward(batch).cpu().numpy()
        return [scores[i : i + 1] for i in range(len(batch))]


class RewardFunctionWorker(StreamingScorer):
    """Scores by a shipped function, or by the user's own in processes with limits of time and memory.

    Owns its grader, whose processes live until it is closed. Uses no accelerator. Scoring raises RewardError, naming
    the sample, where the function raises, hangs, dies or returns no finite number.
    """

    _grader: Grader | None = None

    def setup(self) -> None:
        config, block = self.config.config, self.config.config.reward_of(self.component)
        assert block.function is not None, "this worker is for functions"
        self._key = config.key_of(self.component)
        self._reward = reward_of_config(block.function, block.kwargs, key=self._key)
        self._samples: dict[tuple[int, int], Sample] = {}
        self._grader = grader_of(
            [self._reward],
            timeout_s=block.timeout_s,
            memory_bytes=config.text_env.reward_memory,
            processes=config.text_env.reward_processes,
        )

    def _submit(self, samples: Samples) -> None:
        assert self._grader is not None, "setup comes first"
        for sample in samples:
            self._samples[sample.group, sample.sample] = sample
            case = Case(group=sample.group, sample=sample.sample, transcript=transcript_of(sample))
            with self._own_keys():
                self._grader.submit(case)

    def _finished(self) -> tuple[list[Sample], list[float]]:
        assert self._grader is not None, "setup comes first"
        with self._own_keys():
            graded = self._grader.done(wait=True)
        samples = [self._samples.pop((case.group, case.sample)) for case, _ in graded]
        return samples, [rewards[self._reward.name] for _, rewards in graded]

    @contextmanager
    def _own_keys(self) -> Iterator[None]:
        """Name this component's keys in errors: graders name those of the environment's rewards."""
        try:
            yield
        except RewardError as error:
            fix = (error.problem.fix or "").replace("env.reward_timeout_s", f"{self._key}.timeout_s")
            raise RewardError(dataclasses.replace(error.problem, key=f"{self._key}.function", fix=fix)) from error

    def close(self) -> None:
        if self._grader is not None:
            self._grader.close()
            self._grader = None


class RewardEndpointWorker(StreamingScorer):
    """Scores by an HTTP endpoint: batches of samples, several requests at a time.

    Owns its threads, one for each request at a time. Uses no accelerator. Scoring raises RewardError for what the
    endpoint cannot or does not answer.
    """

    _threads: ThreadPoolExecutor | None = None

    def setup(self) -> None:
        """Raises ConfigError for a malformed address; RewardError where no server answers."""
        config, block = self.config.config, self.config.config.reward_of(self.component)
        assert block.url is not None, "this worker is for endpoints"
        endpoint = endpoint_of(
            block.url,
            key=config.key_of(self.component),
            timeout_s=block.timeout_s,
            retries=block.retries,
            api_key_env=block.api_key_env,
            environ=os.environ,
        )
        self._batch = block.batch
        self._client = RewardClient(endpoint, self.context.cancelled)
        self._tokenizer = Tokenizer.load(self.config.model)
        self._client.reach()  # an endpoint that is down is found here, not after an hour of sampling
        self._requests: dict[Future[list[float]], Samples] = {}
        self._threads = ThreadPoolExecutor(block.concurrency, thread_name_prefix=self.context.owner)

    def _submit(self, samples: Samples) -> None:
        assert self._threads is not None, "setup comes first"
        for batch in (samples[i : i + self._batch] for i in range(0, len(samples), self._batch)):
            texts, prompts = queries(batch, self._tokenizer)
            labels = [label_of(transcript_of(sample)) for sample in batch]
            self._requests[self._threads.submit(self._client.scores, texts, prompts, labels)] = batch

    def _finished(self) -> tuple[list[Sample], list[float]]:
        done, _ = concurrent.futures.wait(self._requests, _POLL_S, concurrent.futures.FIRST_COMPLETED)
        samples: list[Sample] = []
        scores: list[float] = []
        for request in done:
            samples += self._requests.pop(request)
            scores += request.result()
        return samples, scores

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None

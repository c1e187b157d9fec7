"""Reward workers without a model: score whole episodes by a Python function, or by an HTTP endpoint."""

from __future__ import annotations

import concurrent.futures
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from rlplace.envs.text.graders import Grader, grader_of
from rlplace.envs.text.rewards import Case, named_reward
from rlplace.models.tokenizer import Tokenizer
from rlplace.tokens import Sample
from rlplace.workers.roles.reward_client import RewardClient
from rlplace.workers.roles.scorer import Samples, Scorer, Scoring, queries

_POLL_S = 0.5  # how often a wait for the endpoint checks for cancellation and new samples


class RewardFunctionWorker(Scorer):
    """Scores by a shipped function, or by the user's own in processes with limits of time and memory.

    Owns its grader, whose processes live until it is closed. Uses no accelerator. Scoring raises RewardError, naming
    the sample, where the function raises, hangs, dies or returns no finite number.
    """

    _grader: Grader

    def setup(self) -> None:
        config, block = self.config.config, self.config.config.reward_of(self.component)
        assert block.function is not None, "this worker is for functions"
        self._reward = named_reward(block.function, block.kwargs, key=config.key_of(self.component))
        self._grader = grader_of(
            [self._reward],
            timeout_s=block.timeout_s,
            memory_bytes=config.text_env.reward_memory,
            processes=config.text_env.reward_processes,
        )
        self._opened.callback(self._grader.close)

    def _score(self, scoring: Scoring) -> None:
        grading: dict[tuple[int, int], Sample] = {}
        while scoring.due or grading:
            for sample in scoring.take(wait=not grading):
                grading[sample.group, sample.sample] = sample
                case = Case(group=sample.group, sample=sample.sample, transcript=sample.transcript)
                self._grader.submit(case)
            graded = self._grader.done(wait=True)
            samples = [grading.pop((case.group, case.sample)) for case, _ in graded]
            scoring.put(samples, [np.array([rewards[self._reward.name]], np.float32) for _, rewards in graded])


class RewardEndpointWorker(Scorer):
    """Scores by an HTTP endpoint: batches of samples, several requests at a time.

    Owns its threads, one for each request at a time. Uses no accelerator. Scoring raises RewardError for what the
    endpoint cannot or does not answer.
    """

    _threads: ThreadPoolExecutor

    def setup(self) -> None:
        """Raises ConfigError for a malformed address; RewardError where no server answers."""
        config, block = self.config.config, self.config.config.reward_of(self.component)
        self._batch = block.batch
        self._client = RewardClient(block, config.key_of(self.component), self.context.cancelled)
        self._tokenizer = Tokenizer.load(self.config.model)
        self._client.reach()  # an endpoint that is down is found here, not after an hour of sampling
        self._threads = ThreadPoolExecutor(block.concurrency, thread_name_prefix=self.context.owner)
        self._opened.callback(self._threads.shutdown, wait=False, cancel_futures=True)

    def _score(self, scoring: Scoring) -> None:
        asked: dict[Future[list[float]], Samples] = {}
        while scoring.due or asked:
            arrived = scoring.take(wait=not asked)
            for batch in (arrived[i : i + self._batch] for i in range(0, len(arrived), self._batch)):
                texts, prompts = queries(batch, self._tokenizer)
                labels = [sample.transcript.facts.get("answer") for sample in batch]
                asked[self._threads.submit(self._client.scores, texts, prompts, labels)] = batch
            done, _ = concurrent.futures.wait(asked, _POLL_S, concurrent.futures.FIRST_COMPLETED)
            for request in done:
                scoring.put(asked.pop(request), [np.array([score], np.float32) for score in request.result()])

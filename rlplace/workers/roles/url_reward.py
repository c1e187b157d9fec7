"""A reward behind HTTP: batches of whole groups' samples, several requests at a time, scores as they come back."""

from __future__ import annotations

import concurrent.futures
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from rlplace.envs.text.list_rewards import label_of
from rlplace.metrics import Metrics
from rlplace.models.tokenizer import Tokenizer
from rlplace.workers.reward_client import RewardClient, endpoint_of
from rlplace.workers.roles.scored_text import queries, transcript_of
from rlplace.workers.roles.scorer import Judge, Samples, Tally

_TURN_S = 0.5  # how often a wait for answers looks whether the run was cancelled, or new samples are here


class RewardEndpointWorker(Judge):
    """Owns its threads, one for each request at a time. Uses no accelerator."""

    _threads: ThreadPoolExecutor | None = None

    def setup(self) -> None:
        """Raises ConfigError for what is no address; RewardError where nobody answers there."""
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
        self._threads = ThreadPoolExecutor(block.concurrency, thread_name_prefix=self.context.owner)

    def infer(self, iteration: int, version: int) -> Metrics:
        """Raises RewardError for what the endpoint cannot or will not answer."""
        self._require_full()
        assert self._threads is not None, "setup comes first"
        tally, intake = Tally(), self._intake(self._even_share)
        asked: dict[Future[list[float]], Samples] = {}
        try:
            while intake.due or asked:
                self._check_cancelled()
                taken = intake.take(wait=not asked)
                for batch in (taken[i : i + self._batch] for i in range(0, len(taken), self._batch)):
                    asked[self._threads.submit(self._client.scores, *self._question(batch))] = batch
                began = time.perf_counter()
                done, _ = concurrent.futures.wait(asked, _TURN_S, concurrent.futures.FIRST_COMPLETED)
                tally.busy_s += time.perf_counter() - began
                for future in done:
                    samples = asked.pop(future)
                    tally.tokens += sum(sample.weight for sample in samples)
                    self._put(samples, [np.array([score], np.float32) for score in future.result()], tally)
        finally:
            for future in asked:
                future.cancel()
        return tally.metrics(self.component, intake.wait_s)

    def _question(self, samples: Samples) -> tuple[list[str], list[str], list[object]]:
        whole, asked = queries(samples, self._tokenizer)
        return whole, asked, [label_of(transcript_of(sample)) for sample in samples]

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None

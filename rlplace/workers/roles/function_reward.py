"""A reward that is a Python function: shipped, or the user's own in processes with limits of time and memory."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from rlplace.envs.text.graders import Grader, grader_of
from rlplace.envs.text.list_rewards import reward_of_config
from rlplace.envs.text.rewards import Case
from rlplace.errors import RewardError
from rlplace.metrics import Metrics
from rlplace.tokens import Sample
from rlplace.workers.roles.scored_text import transcript_of
from rlplace.workers.roles.scorer import Judge, Tally


class RewardFunctionWorker(Judge):
    """Owns its grader, whose processes live until it is closed. Uses no accelerator."""

    _grader: Grader | None = None

    def setup(self) -> None:
        config, block = self.config.config, self.config.config.reward_of(self.component)
        assert block.function is not None, "this worker is for functions"
        self._key = config.key_of(self.component)
        self._reward = reward_of_config(block.function, block.kwargs, key=self._key)
        self._grader = grader_of(
            [self._reward],
            timeout_s=block.timeout_s,
            memory_bytes=config.text_env.reward_memory,
            processes=config.text_env.reward_processes,
        )

    def infer(self, iteration: int, version: int) -> Metrics:
        """Raises RewardError, naming the sample, where the function raises, hangs, dies or gives no finite number."""
        self._require_full()
        assert self._grader is not None, "setup comes first"
        tally, intake = Tally(), self._intake(self._even_share)
        grading: dict[tuple[int, int], Sample] = {}
        while intake.due or grading:
            self._check_cancelled()
            for sample in intake.take(wait=not grading):
                grading[sample.group, sample.sample] = sample
                case = Case(group=sample.group, sample=sample.sample, transcript=transcript_of(sample))
                with self._in_own_words():
                    self._grader.submit(case)
            began = time.perf_counter()
            with self._in_own_words():
                graded = self._grader.done(wait=True)
            tally.busy_s += time.perf_counter() - began
            samples = [grading.pop((case.group, case.sample)) for case, _ in graded]
            tally.tokens += sum(sample.weight for sample in samples)
            self._put(samples, [np.array([v[self._reward.name]], np.float32) for _, v in graded], tally)
        return tally.metrics(self.component, intake.wait_s)

    @contextmanager
    def _in_own_words(self) -> Iterator[None]:
        """Graders speak of rewards that env ranks calculate."""
        try:
            yield
        except RewardError as error:
            fix = (error.problem.fix or "").replace("env.reward_timeout_s", f"{self._key}.timeout_s")
            raise RewardError(dataclasses.replace(error.problem, key=f"{self._key}.function", fix=fix)) from error

    def close(self) -> None:
        if self._grader is not None:
            self._grader.close()
            self._grader = None

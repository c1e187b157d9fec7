"""What all jobs on simulators share: what they count and say, and what they leave behind."""

from __future__ import annotations

import abc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rlplace.contract.job import Job
from rlplace.contract.requests import Evaluation, EvaluationRequest
from rlplace.jobs.played import played_episodes, refuse_transcripts
from rlplace.metrics import ENDLESS_EPISODES, PLAYED_EPISODES
from rlplace.placement.plan import Plan
from rlplace.report.summary import Progress
from rlplace.trained import Trained, where


class SimulatedJob(Job, abc.ABC):
    """A job whose success is the return of episodes in simulators.

    `stepping`: the component that steps the simulators, whose files in a checkpoint have their state.
    """

    stepping: ClassVar[str]

    @abc.abstractmethod
    def steps_of_iteration(self, config: Any) -> int:
        """Return the environment steps of an iteration, over all ranks."""

    def evaluates_every(self, config: Any) -> int:
        every: int = config.runner.eval_every
        return every

    def count(self, config: Any, progress: Progress, numbers: dict[str, float]) -> None:
        steps = self.steps_of_iteration(config)
        progress.add(numbers, steps)
        numbers["env/steps_per_s"] = steps / numbers["time/iteration_s"]
        # Without an episode that ended in this iteration, there is no new return
        if progress.mean_return is not None and "env/return" in numbers:
            numbers["env/mean_return"] = progress.mean_return

    def remarks(
        self, numbers: Mapping[str, float], notes: Mapping[str, Sequence[str]]
    ) -> list[str]:
        found: list[str] = []
        for name in ("env/steps", PLAYED_EPISODES, ENDLESS_EPISODES):
            found += notes.get(name, ())
        return found

    def loaded_text(self, numbers: Mapping[str, float], kept: Any) -> str:
        cut = int(numbers.get("env/episodes_cut", 0))
        if cut:
            lost = int(numbers.get("env/steps_lost", 0))
            return f"; {cut} episodes begin anew, {lost} steps of them are lost"
        return ""

    def evaluate(self, trained: Trained, request: EvaluationRequest) -> Evaluation:
        """Play whole episodes with a trained policy. Return the returns (sums of rewards) and lengths of the episodes.

        Raises ConfigError, SimulatorError, OutputError.
        """
        refuse_transcripts(request)
        # For torch: with small batches, more threads would only wait for each other
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        from rlplace.workers.roles.episodes import read_states

        policy = self.load_policy(trained, seed=request.seed, key=request.key)
        states: Sequence[Mapping[str, Any]] = ()
        if trained.checkpoint:
            states = read_states(trained.folder / self.stepping)
        return played_episodes(
            trained,
            request,
            trained.config.env,
            policy.spaces,
            lambda seen, begins: policy.choose(seen, request.deterministic, begins),
            states,
        )

    def saved_models(self, config: Any, plan: Plan, folder: Path) -> Mapping[str, Path]:
        return {"actor": folder / "policy.safetensors"}

    def last_line(self, run: Path) -> str:
        return where(run)

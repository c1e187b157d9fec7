"""What all jobs on simulators share: what they count and say, and what they leave behind."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlplace.contract.job import Job
from rlplace.metrics import ENDLESS_EPISODES, PLAYED_EPISODES
from rlplace.placement.plan import Plan
from rlplace.report.summary import Progress
from rlplace.trained import where


class SimulatedJob(Job, abc.ABC):
    """A job whose success is the return of episodes in simulators."""

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

    def saved_models(self, config: Any, plan: Plan, folder: Path) -> Mapping[str, Path]:
        return {"actor": folder / "policy.safetensors"}

    def last_line(self, run: Path) -> str:
        return where(run)

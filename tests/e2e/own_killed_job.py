"""A job of one's own whose ranks kill themselves once: an env rank in iteration 2, a learner rank in iteration 4.

The learner adds up numbers: after each iteration its sum says which samples it has learned, and how often.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch

from rlplace import Channel, Job, Stage, Worker, full, run

ROWS = 8


def die_once(file: Path) -> None:
    """Kill this process, unless an earlier one has."""
    if file.exists():
        return
    file.touch()
    os.kill(os.getpid(), signal.SIGKILL)


class Env(Worker):
    """Sends the numbers of an iteration, a part by each rank."""

    def play(self, iteration: int) -> None:
        first = (iteration * self.world_size + self.rank) * ROWS
        self.channel("samples").put(torch.arange(first, first + ROWS))
        if iteration == 2 and self.rank == 1:
            die_once(Path(self.config["folder"]) / "env_died")


class Learner(Worker):
    """Keeps the sum of all numbers that it has learned."""

    def setup(self) -> None:
        self.total = torch.zeros((), dtype=torch.int64)
        self.count = 0

    def learn(self, iteration: int) -> dict[str, int]:
        for _ in range(self.world_size_of("env")):
            samples = self.channel("samples").get()
            self.total += samples.sum()
            self.count += len(samples)
        if iteration == 4:
            die_once(Path(self.config["folder"]) / "learner_died")
        return {"total": int(self.total), "count": self.count}

    def save_state(self) -> object:
        return {"total": self.total, "count": self.count}

    def load_state(self, state: dict[str, object]) -> None:
        self.total = state["total"]
        self.count = state["count"]


job = Job(
    name="killed",
    components={"env": Env, "learner": Learner},
    stages=[
        Stage("play", full("env").calls("play")),
        Stage("learn", full("learner").calls("learn")),
    ],
    channels=[Channel("samples", "env", "learner")],
)

if __name__ == "__main__":
    run(job, "killed.yaml")

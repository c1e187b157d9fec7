"""A job whose runs share accelerators in tests: rollout and actor work by sleeping, and each fills its accelerator.

A tensor of 6 MiB stands for the memory of a component, so two of them do not fit on an accelerator of 8 MiB. The actor
learns random numbers that depend on seed and iteration: its sum says which samples it has learned.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from rlplace import Channel, Job, Stage, Worker, full

ELEMENTS = 6 * (1 << 20) // 4


class Fills(Worker):
    """A rank that holds a tensor on its accelerator, and knows it again after each return."""

    def setup(self) -> None:
        self.block = torch.full((ELEMENTS,), 1.5)
        self.offload({"block": self.block})

    def work(self) -> None:
        assert float(self.block[-1]) == 1.5
        time.sleep(float(self.config["seconds"]))


class Rollout(Fills):
    def generate(self, iteration: int) -> None:
        self.work()
        generator = torch.Generator().manual_seed(
            1000 * int(self.config["seed"]) + iteration
        )
        self.channel("samples").put(torch.rand(4, generator=generator))


class Learner(Fills):
    def setup(self) -> None:
        super().setup()
        self.total = torch.zeros(())

    def learn(self, iteration: int) -> dict[str, float]:
        file = Path(self.config.get("slow", ""))
        if file.name and file.exists():
            # Long enough for a test to look, or to kill
            time.sleep(3.0)
        self.work()
        self.total = self.total * 0.9 + self.channel("samples").get().sum()
        return {"total": self.total.item(), "pid": float(os.getpid())}

    def save_state(self) -> object:
        return {"total": self.total}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        self.total = state["total"]


job = Job(
    name="sharing",
    components={"actor": Learner, "rollout": Rollout},
    stages=[
        Stage("rollout", full("rollout").calls("generate")),
        Stage("learn", full("actor").calls("learn")),
    ],
    channels=[Channel("samples", "rollout", "actor")],
)

"""A job of one's own whose weights go from accelerator to accelerator; a sampler rank kills itself in iteration 2.

The plan is that of GPUs at the same places: hosts share tensors, and broadcast by gloo.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

from rlplace import Job, Stage, Worker, full, run, weights
from rlplace.placement.plan import Plan
from rlplace.workers.facts import JobFacts
from tests.contract.own_weights import as_on_gpus

PLACES = {"learner": "0-1", "sampler": "1-2"}


class Sampler(Worker):
    """Has one weight, which it gets from the learner."""

    def setup(self) -> None:
        self.net = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.net.weight)
        self.weights_of(self.net)
        self.offload(self.net)

    def play(self, iteration: int) -> dict[str, float]:
        died = Path(self.config["folder"]) / "sampler_died"
        if iteration == 2 and self.rank == 1 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"weight": self.net.weight.item()}


class Learner(Sampler):
    """Adds 1 to its weight in each iteration."""

    def learn(self) -> None:
        with torch.no_grad():
            self.net.weight += 1

    def save_state(self) -> object:
        return self.net.state_dict()

    def load_state(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state)


class OnDevices(Job):
    """Plans the weights as between GPUs."""

    def facts(self, config: Any, plan: Plan) -> JobFacts:
        return as_on_gpus(super().facts(config, plan), PLACES)


job = OnDevices(
    name="on_devices",
    components={"learner": Learner, "sampler": Sampler},
    stages=[
        Stage("send", weights("learner", to="sampler")),
        Stage("play", full("sampler").calls("play")),
        Stage("learn", full("learner").calls("learn")),
    ],
)

if __name__ == "__main__":
    run(job, "on_devices.yaml")

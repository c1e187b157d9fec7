"""A custom job whose learner shares its accelerator with its simulator: its tensors may be off while it is saved."""

from __future__ import annotations

from typing import Any

import torch

from rlplace import Channel, Job, Stage, Worker, full


class Env(Worker):
    """Puts numbers that follow from the iteration alone."""

    def rollout(self, iteration: int) -> None:
        random = torch.Generator().manual_seed(iteration)
        self.channel("samples").put(torch.rand(64, 1, generator=random))


class Learner(Worker):
    """Fits a line to the numbers."""

    def setup(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.net = torch.nn.Linear(1, 1)
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=random))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.05)
        self.offload(self.net, self.optimizer)

    def learn(self) -> dict[str, float]:
        seen = self.channel("samples").get()
        loss = ((self.net(seen) - seen) ** 2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item()}

    def save_state(self) -> Any:
        return {"net": self.net.state_dict(), "adam": self.optimizer.state_dict()}

    def load_state(self, state: Any) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["adam"])


def job(save_first: bool = False) -> Job:
    """Return the job. `save_first`: its last stage is that of the simulator, so the learner is off when it is saved."""
    learn = Stage("learn", full("actor").calls("learn"))
    rollout = Stage("rollout", full("env").calls("rollout"))
    after = Stage("after", full("env"))
    stages = [rollout, learn, after] if save_first else [rollout, learn]
    return Job(
        name="resumed",
        components={"actor": Learner, "env": Env},
        stages=stages,
        channels=[Channel("samples", "env", "actor")],
        score="actor/loss",
    )


CONFIG = {
    "cluster": {
        "num_nodes": 1,
        "accelerators_per_node": 1,
        "accelerator": {"kind": "emulated", "memory": "1GiB"},
        "component_placement": {"actor": "0", "env": "0"},
        "launcher": "inline",
    },
    "actor": {"enable_offload": True},
    "env": {"enable_offload": True},
    "runner": {"sinks": ["jsonl"]},
}

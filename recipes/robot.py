"""A job with robots: controllers on nodes of a node group, without accelerators; policy and learner on accelerators.

    python recipes/robot.py --dry-run        the plan: which node has which arm
    python recipes/robot.py                  12 iterations here; threads of one process stand for all nodes
    python recipes/robot.py cluster.launcher=ray cluster.ray.address=auto        on a cluster with these nodes

Printed is `miss`, how far from its goal an arm ends, which falls from 1.2 to about 0.1.

The policy drives the arms, and an operator says at each step what it would have done; the learner fits the policy to
all that the operator has said so far (Ross et al., arXiv:1011.0686). Here both arm and operator are computed.
"""

from __future__ import annotations

import math
import random

import torch

from rlplace import Channel, Job, Stage, Worker, full, on_host, run, weights

STEPS = 80  # of an episode
EPISODES = 2  # of an arm in an iteration
TICK_S = 0.05  # between two commands


class Arm:
    """One joint that carries a load. The driver of a real arm has the same methods, and opens `port`."""

    def __init__(self, port: str, load: float) -> None:
        self.port = port
        self.load = load

    def reset(self) -> None:
        self.angle = 0.0
        self.speed = 0.0

    def move(self, torque: float) -> None:
        # A motor has a strongest torque, a joint has stops.
        torque = max(-10.0, min(10.0, torque)) - self.load * math.sin(self.angle)
        self.speed += TICK_S * (torque - 0.1 * self.speed)
        self.angle += TICK_S * self.speed
        if abs(self.angle) > 2.0:
            self.angle = math.copysign(2.0, self.angle)
            self.speed = 0.0


class Robot(Worker):
    """Controls the arm of its node: reads it, asks the policy, moves it."""

    def setup(self) -> None:
        (hardware,) = self.context.slot.hardware  # the block of this arm in robot.yaml
        self.arm = Arm(hardware.config["port"], hardware.config["load"])
        self.log.info("%s on node %d", self.arm.port, self.context.slot.node)

    def drive(self, iteration: int) -> dict[str, float]:
        draw = random.Random(1000 * iteration + self.rank)
        samples = []
        missed = 0.0
        for _ in range(EPISODES):
            goal = draw.uniform(-1.5, 1.5)
            self.arm.reset()
            for _ in range(STEPS):
                seen = (self.arm.angle, self.arm.speed, goal)
                operators = 8.0 * (goal - self.arm.angle) - 4.0 * self.arm.speed
                samples.append((*seen, operators))
                self.channel("observations").put((self.rank, seen))
                self.arm.move(self.channel("actions").get(key=str(self.rank)))
            missed += abs(self.arm.angle - goal) / EPISODES
        self.channel("samples").put((self.rank, samples))
        return {"miss": missed}


class Policy(Worker):
    """Answers each arm as soon as it asks."""

    def setup(self) -> None:
        linear, tanh = torch.nn.Linear, torch.nn.Tanh()
        self.net = torch.nn.Sequential(linear(3, 32), tanh, linear(32, 1))
        self.offload(self.net)
        self.weights_of(self.net)

    @torch.no_grad()
    def answer(self, iteration: int) -> None:
        steps = self.world_size_of("robot") * EPISODES * STEPS
        for _ in range(steps // self.world_size):
            rank, seen = self.channel("observations").get()
            torque = float(self.net(torch.tensor(seen)))
            self.channel("actions").put(torque, key=str(rank))


class Learner(Policy):
    """Keeps all samples, and fits the policy to them."""

    def setup(self) -> None:
        super().setup()
        # Workers may be threads, which share the generator of torch.manual_seed.
        draw = torch.Generator().manual_seed(0)
        for parameter in self.net.parameters():
            torch.nn.init.uniform_(parameter, -0.3, 0.3, generator=draw)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        self.offload(self.optimizer)
        self.samples = torch.zeros(0, 4)

    def learn(self, iteration: int) -> dict[str, float]:
        channel = self.channel("samples")
        parts = dict(channel.get() for _ in range(self.world_size_of("robot")))
        # The order of the arms, not that of arrival: a run can be repeated.
        new = [torch.tensor(parts[rank]) for rank in sorted(parts)]
        self.samples = torch.cat([self.samples, *new])
        draw = torch.Generator().manual_seed(iteration)
        for _ in range(300):
            rows = torch.randint(len(self.samples), (256,), generator=draw)
            seen, told = self.samples[rows].split([3, 1], dim=1)
            loss = (self.net(seen) - told).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return {"loss": float(loss), "samples": len(self.samples)}

    def save_state(self) -> object:
        states = {"net": self.net.state_dict(), "adam": self.optimizer.state_dict()}
        return {**states, "samples": self.samples}

    def load_state(self, state: dict) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["adam"])
        self.samples = state["samples"]


job = Job(
    name="robot",
    components={"actor": Learner, "rollout": Policy, "robot": Robot},
    stages=[
        Stage("sync", weights("actor", to="rollout")),
        Stage(
            "drive", on_host("robot").calls("drive"), full("rollout").calls("answer")
        ),
        Stage("learn", full("actor").calls("learn")),
    ],
    channels=[
        Channel("observations", "robot", "rollout"),
        Channel("actions", "rollout", "robot", by_rank=True),
        Channel("samples", "robot", "actor"),
    ],
    score="robot/miss",
)

if __name__ == "__main__":
    run(job, "robot.yaml")

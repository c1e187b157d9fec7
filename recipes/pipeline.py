"""The hybrid mode by hand: simulators and a policy answer each other, then hand their accelerators to the learner.

    python recipes/pipeline.py --dry-run        the plan
    python recipes/pipeline.py                  20 iterations

Printed is `error`, how far the policy's answers are from the numbers, which falls to almost 0. The task: say the number
that you see. The policy is one weight and one bias, which the learner fits.
"""

from __future__ import annotations

import torch

from rlplace import Channel, Job, Stage, Worker, full, run, weights

STEPS = 16  # of an iteration
ROWS = 32  # simulators of each env rank


class Env(Worker):
    """Shows numbers, takes the policy's answers, hands whole iterations to the learner."""

    def rollout(self, iteration: int) -> dict[str, float]:
        random = torch.Generator().manual_seed(1000 * iteration + self.rank)
        seen, said = [], []
        for _ in range(STEPS):
            observation = torch.rand(ROWS, 1, generator=random)
            self.channel("observations").put((self.rank, observation))
            seen.append(observation)
            said.append(self.channel("actions").get(key=str(self.rank)))
        samples = torch.cat(seen), torch.cat(said)
        self.channel("samples").put(samples)
        error = (samples[0] - samples[1]).abs().mean()
        return {"error": float(error)}


class Net(Worker):
    """What the policy and its learner have in common: a network, whose tensors leave with the component."""

    def setup(self) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Linear(1, 1)

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.net.named_parameters())


class Policy(Net):
    """Answers observations, with a little noise."""

    def setup(self) -> None:
        super().setup()
        self.offload(self.net)

    def answer(self, iteration: int) -> dict[str, float]:
        envs = self.world_size_of("env")
        for _ in range(STEPS * envs // self.world_size):
            rank, observation = self.channel("observations").get()
            with torch.no_grad(), self.timer("decide"):
                action = self.net(observation)
            self.channel("actions").put(action, key=str(rank))
        return {"answers": STEPS * envs // self.world_size}


class Learner(Net):
    """Fits what was said to what was seen; the ranks of a group average their gradients."""

    needs_own_process = True

    def setup(self) -> None:
        super().setup()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.05)
        self.offload(self.net, self.optimizer)
        self.process_group()

    def learn(self, iteration: int) -> dict[str, float]:
        batches = [None]
        if self.rank == 0:
            count = self.world_size_of("env")
            batches = [self.channel("samples").get() for _ in range(count)]
        batches = self.broadcast(batches, root=0)
        seen = torch.cat([seen for seen, _ in batches])
        mine = seen[self.rank :: self.world_size]
        for _ in range(10):
            loss = ((self.net(mine) - mine) ** 2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            for parameter in self.net.parameters():
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= self.world_size
            self.optimizer.step()
        return {"loss": float(loss)}

    def save_state(self) -> object:
        if self.rank != 0:
            return None  # all ranks have the same
        return {"net": self.net.state_dict(), "adam": self.optimizer.state_dict()}

    def load_state(self, state: dict) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["adam"])


job = Job(
    name="pipeline",
    components={"actor": Learner, "env": Env, "rollout": Policy},
    stages=[
        Stage("sync", weights("actor", to="rollout")),
        Stage("rollout", full("env").calls("rollout"), full("rollout").calls("answer")),
        Stage("learn", full("actor").calls("learn")),
    ],
    channels=[
        Channel("observations", "env", "rollout"),
        Channel("actions", "rollout", "env", by_rank=True),
        Channel("samples", "env", "actor"),
    ],
    score="env/error",
)

if __name__ == "__main__":
    run(job, "pipeline.yaml")

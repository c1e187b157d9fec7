"""Evolution strategies: many rollout workers try noisy copies of one policy; no gradients, no accelerators.

    python recipes/evolution.py --dry-run        the plan
    python recipes/evolution.py                  30 iterations

Printed is `return`, that of an episode of CartPole without noise, which rises from about 30 to over 300. Noise follows
from its number, so that only numbers and returns travel (Salimans et al., arXiv:1703.03864).
"""

from __future__ import annotations

import gymnasium
import torch

from rlplace import Channel, Job, Stage, Worker, on_host, run, weights

PAIRS = 24  # noises of an iteration; each is added to the policy, and subtracted
SCALE = 0.1  # of the noise
LIMIT = 500  # steps of an episode


def new_policy() -> torch.nn.Module:
    linear = torch.nn.Linear
    return torch.nn.Sequential(linear(4, 16), torch.nn.Tanh(), linear(16, 2))


def noise_of(iteration: int, pair: int, size: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(1000 * iteration + pair)
    return torch.randn(size, generator=random)


class Policy(Worker):
    """What both components have: a small network, whose parameters go from the search to the rollout workers."""

    def setup(self) -> None:
        torch.manual_seed(0)
        self.net = new_policy()
        self.weights_of(self.net)

    def flat(self) -> torch.Tensor:
        return torch.nn.utils.parameters_to_vector(self.net.parameters()).detach()

    def fill(self, numbers: torch.Tensor) -> None:
        torch.nn.utils.vector_to_parameters(numbers, self.net.parameters())


class Rollout(Policy):
    """Plays an episode with each of its noises."""

    def setup(self) -> None:
        super().setup()
        self.env = gymnasium.make("CartPole-v1", max_episode_steps=LIMIT)

    def play(self, iteration: int) -> dict[str, float]:
        centre = self.flat().clone()
        for pair in range(self.rank, PAIRS, self.world_size):
            noise = SCALE * noise_of(iteration, pair, len(centre))
            seed = 1000 * iteration + pair
            better = self.episode(centre + noise, seed)
            worse = self.episode(centre - noise, seed)
            self.channel("returns").put((pair, better, worse))
        # The policy itself, without noise, says how far the search is.
        found = self.episode(centre, seed=1_000_000 + self.rank)
        return {"return": found}

    @torch.no_grad()
    def episode(self, numbers: torch.Tensor, seed: int) -> float:
        self.fill(numbers)
        seen, _ = self.env.reset(seed=seed)
        total = 0.0
        ended = False
        while not ended:
            action = int(self.net(torch.as_tensor(seen)).argmax())
            seen, reward, fallen, timed_out, _ = self.env.step(action)
            total += float(reward)
            ended = fallen or timed_out
        return total


class Search(Policy):
    """Moves the policy towards the noises that gained most."""

    def setup(self) -> None:
        super().setup()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.1)

    def improve(self, iteration: int) -> dict[str, float]:
        returns = torch.zeros(PAIRS, 2)
        for _ in range(PAIRS):
            pair, better, worse = self.channel("returns").get()
            returns[pair] = torch.tensor([better, worse])
        # Ranks instead of returns: one lucky episode must not outweigh all others.
        ranks = returns.flatten().argsort().argsort().view(PAIRS, 2)
        gains = (ranks[:, 0] - ranks[:, 1]) / (2 * PAIRS - 1)
        size = len(self.flat())
        step = torch.zeros(size)
        for pair in range(PAIRS):
            step += gains[pair] * noise_of(iteration, pair, size)
        self.descend(-step / PAIRS)
        return {"best": float(returns.max()), "mean": float(returns.mean())}

    def descend(self, estimate: torch.Tensor) -> None:
        first = 0
        for parameter in self.net.parameters():
            part = estimate[first : first + parameter.numel()]
            parameter.grad = part.view_as(parameter).clone()
            first += parameter.numel()
        self.optimizer.step()

    def save_state(self) -> object:
        return {"net": self.net.state_dict(), "adam": self.optimizer.state_dict()}

    def load_state(self, state: dict) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["adam"])


job = Job(
    name="evolution",
    components={"search": Search, "rollout": Rollout},
    stages=[
        Stage("sync", weights("search", to="rollout")),
        Stage("rollout", on_host("rollout").calls("play")),
        Stage("search", on_host("search").calls("improve"), trains=True),
    ],
    channels=[Channel("returns", "rollout", "search", items=PAIRS)],
    score="rollout/return",
)

if __name__ == "__main__":
    run(job, "evolution.yaml")

"""PPO in one flat file: simulators and policy in one component, the learner in another, on the same accelerators.

    python recipes/ppo.py --dry-run        the plan
    python recipes/ppo.py                  40 iterations, about a minute

Printed is `return`, that of CartPole's last 20 episodes, which rises from 20 to over 200. Each rollout rank steps its
simulators and decides for them; learner and rollout take turns on the accelerators.
"""

from __future__ import annotations

import gymnasium
import torch
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch.distributions import Categorical

from rlplace import Channel, Job, Stage, Worker, full, run, weights

STEPS = 128  # of each simulator in an iteration
ROWS = 8  # simulators of each rollout rank
DISCOUNT, TRACE = 0.99, 0.95  # gamma and lambda of the advantages
EPOCHS, MINIBATCHES, CLIP = 6, 8, 0.2


class Network(torch.nn.Module):
    """Logits of the two actions, and the value of the state."""

    def __init__(self) -> None:
        super().__init__()
        linear, tanh = torch.nn.Linear, torch.nn.Tanh()
        self.actor = torch.nn.Sequential(linear(4, 64), tanh, linear(64, 2))
        self.critic = torch.nn.Sequential(linear(4, 64), tanh, linear(64, 1))

    def forward(self, seen: torch.Tensor) -> tuple[Categorical, torch.Tensor]:
        return Categorical(logits=self.actor(seen)), self.critic(seen).squeeze(-1)


class Rollout(Worker):
    """Plays with the newest policy, and hands each learner rank its part of the samples."""

    def setup(self) -> None:
        self.net = Network()
        self.offload(self.net)
        self.weights_of(self.net)
        reset = {"autoreset_mode": "SameStep"}
        envs = gymnasium.make_vec("CartPole-v1", ROWS, "sync", vector_kwargs=reset)
        self.envs = RecordEpisodeStatistics(envs, buffer_length=20)
        self.seen, _ = self.envs.reset(seed=[self.rank * ROWS + r for r in range(ROWS)])

    @torch.no_grad()
    def play(self, iteration: int) -> dict[str, float]:
        torch.manual_seed(1000 * iteration + self.rank)
        steps = [self.step() for _ in range(STEPS)]
        played = map(torch.stack, zip(*steps, strict=True))
        seen, actions, logprobs, values, rewards, going_on = played
        # Advantages, from the last step to the first one.
        _, after = self.net(torch.as_tensor(self.seen))
        advantages = torch.zeros(STEPS + 1, ROWS)
        for t in reversed(range(STEPS)):
            error = rewards[t] + DISCOUNT * after * going_on[t] - values[t]
            advantages[t] = error + DISCOUNT * TRACE * advantages[t + 1] * going_on[t]
            after = values[t]
        samples = (seen, actions, logprobs, advantages[:-1], advantages[:-1] + values)
        # Every second simulator goes to the first of two learner ranks, and so on.
        learners = self.world_size_of("actor")
        for learner in range(learners):
            part = [tensor[:, learner::learners].flatten(0, 1) for tensor in samples]
            self.channel("samples").put((self.rank, part), key=str(learner))
        return {"return": sum(self.envs.return_queue) / len(self.envs.return_queue)}

    def step(self) -> tuple[torch.Tensor, ...]:
        seen = torch.as_tensor(self.seen)
        choice, values = self.net(seen)
        actions = choice.sample()
        self.seen, rewards, ended, cut, info = self.envs.step(actions.numpy())
        rewards = torch.as_tensor(rewards, dtype=torch.float32)
        for row in cut.nonzero()[0]:
            # The time limit is no end: what would have followed is worth its value.
            _, value = self.net(torch.as_tensor(info["final_obs"][row]))
            rewards[row] += DISCOUNT * value
        going_on = torch.as_tensor(~(ended | cut)).float()
        return seen, actions, choice.log_prob(actions), values, rewards, going_on


class Learner(Worker):
    """The clipped loss of PPO; the ranks average their gradients."""

    needs_own_process = True

    def setup(self) -> None:
        torch.manual_seed(0)
        self.net = Network()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-3)
        self.offload(self.net, self.optimizer)
        self.weights_of(self.net)
        self.process_group()

    def learn(self, iteration: int) -> dict[str, float]:
        channel = self.channel("samples")
        ranks = range(self.world_size_of("rollout"))
        parts = dict(channel.get(key=str(self.rank)) for _ in ranks)
        # The order of the ranks, not that of arrival: a run can be repeated.
        samples = map(torch.cat, zip(*(parts[rank] for rank in ranks), strict=True))
        seen, actions, logprobs, advantages, returns = samples
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        torch.manual_seed(iteration)
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(seen)).chunk(MINIBATCHES):
                choice, values = self.net(seen[rows])
                ratio = (choice.log_prob(actions[rows]) - logprobs[rows]).exp()
                clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                advantage = advantages[rows]
                gain = torch.minimum(ratio * advantage, clipped * advantage).mean()
                value_loss = (values - returns[rows]).square().mean()
                entropy = choice.entropy().mean()
                loss = -gain + 0.5 * value_loss - 0.01 * entropy
                self.optimizer.zero_grad()
                loss.backward()
                for parameter in self.net.parameters():
                    torch.distributed.all_reduce(parameter.grad)
                    parameter.grad /= self.world_size
                torch.nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
                self.optimizer.step()
        return {"entropy": float(entropy), "value_loss": float(value_loss)}

    def save_state(self) -> object:
        if self.rank != 0:
            return None  # all ranks have the same
        return {"net": self.net.state_dict(), "adam": self.optimizer.state_dict()}

    def load_state(self, state: dict) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["adam"])


job = Job(
    name="ppo",
    components={"actor": Learner, "rollout": Rollout},
    stages=[
        Stage("sync", weights("actor", to="rollout")),
        Stage("rollout", full("rollout").calls("play")),
        Stage("learn", full("actor").calls("learn")),
    ],
    channels=[Channel("samples", "rollout", "actor", by_rank=True)],
    score="rollout/return",
)

if __name__ == "__main__":
    run(job, "ppo.yaml")

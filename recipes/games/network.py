"""The network of a player, and its loss; without a line of the engine."""

from __future__ import annotations

import torch
from games.board import Game, Moves
from torch.distributions import Categorical

EPOCHS, MINIBATCHES, CLIP = 4, 4, 0.2


class Network(torch.nn.Module):
    """Logits of the cells and the value of the board, from two planes: own pieces, and those of the other player."""

    def __init__(self, game: Game, width: int, seed: int) -> None:
        super().__init__()
        self.game = game
        linear, relu = torch.nn.Linear, torch.nn.ReLU()
        body = (linear(2 * game.cells, width), relu, linear(width, width), relu)
        self.layers = torch.nn.Sequential(*body, linear(width, game.cells + 1))
        # Players may be threads of one process, which share the generator of torch.manual_seed.
        draw = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            bound = parameter.shape[-1] ** -0.5
            torch.nn.init.uniform_(parameter, -bound, bound, generator=draw)

    def forward(self, boards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take boards [n, cells] as the player to move sees them; return logits [n, cells] and values [n]."""
        planes = torch.cat([boards == 1, boards == -1], 1).float()
        out = self.layers(planes)
        return self.game.masked(out[:, :-1], boards), out[:, -1]

    def drawn(self, boards: torch.Tensor) -> torch.Tensor:
        """The policy that draws its moves."""
        logits, _ = self(boards)
        return logits

    def likeliest(self, boards: torch.Tensor) -> torch.Tensor:
        """The policy that takes its likeliest moves: logits so far apart that no other move is drawn."""
        return 1e5 * self.drawn(boards)


def learn(
    network: Network,
    optimizer: torch.optim.Optimizer,
    samples: Moves,
    lr: float,
    entropy_coef: float,
    random: torch.Generator,
) -> dict[str, float]:
    """Improve the network by the clipped loss of PPO. The return of a move is the result of its game for its player.

    Returned are the means of the last minibatch.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    with torch.no_grad():
        logits, values = network(samples.board)
        logprobs = Categorical(logits=logits).log_prob(samples.move)
        advantages = samples.result - values
        advantages = advantages / (advantages.std() + 1e-8)
    for _ in range(EPOCHS):
        order = torch.randperm(len(samples.board), generator=random)
        for rows in order.chunk(MINIBATCHES):
            logits, values = network(samples.board[rows])
            choice = Categorical(logits=logits)
            ratio = (choice.log_prob(samples.move[rows]) - logprobs[rows]).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            advantage = advantages[rows]
            gain = torch.minimum(ratio * advantage, clipped * advantage).mean()
            value_loss = (values - samples.result[rows]).square().mean()
            entropy = choice.entropy().mean()
            loss = -gain + 0.5 * value_loss - entropy_coef * entropy
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 0.5)
            optimizer.step()
    return {"entropy": entropy.item(), "value_loss": value_loss.item()}

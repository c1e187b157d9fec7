"""How strong a player is, without a line of the engine: ratings within a league, and play against known players."""

from __future__ import annotations

import torch
from games.network import Network


class Ratings:
    """Points of all pairs of players; player 0 has the rating 0.

    Elo's model: a player whose rating is higher by R gets 1 / (1 + 10^(-R / 400)) points of a game; a draw is half a
    point.
    """

    def __init__(self) -> None:
        self.points = torch.zeros(1, 1, dtype=torch.float64)  # [i, j]: of i, against j

    def add(self, results: list[torch.Tensor]) -> None:
        """Add a player. `results`: those of its games against each player before it [games], which are 1, 0 or -1."""
        newest = len(self.points)
        self.points = torch.nn.functional.pad(self.points, (0, 1, 0, 1))
        for player, of_games in enumerate(results):
            won = float((1 + of_games).sum()) / 2
            # One more game of each pair counts as drawn, so that every rating is finite.
            self.points[newest, player] = won + 0.5
            self.points[player, newest] = len(of_games) - won + 0.5

    def elo(self) -> torch.Tensor:
        """Return the likeliest ratings of all players [n] (Hunter, Annals of Statistics 32, 2004, equation 3)."""
        games = self.points + self.points.T
        strengths = torch.ones(len(games), dtype=torch.float64)
        change = 1.0
        while change > 1e-6:
            before = strengths
            pairs = games / (strengths[:, None] + strengths)
            strengths = self.points.sum(1) / pairs.sum(1)
            strengths = strengths / strengths[0]
            change = float((strengths / before - 1).abs().max())
        return 400 * strengths.log10()


def measured(network: Network, games: int, random: torch.Generator) -> dict[str, float]:
    """Return the mean result of a network's likeliest moves against players that do not learn, from -1 to 1.

    `games`: how many against each of them. In small games, one of these players is faultless, and `defeats` counts the
    lost final positions that an opponent can reach.
    """
    game = network.game
    others = {"random": torch.zeros_like}
    if game.cells <= 9:
        others["faultless"] = game.faultless
    found: dict[str, float] = {}
    for name, other in others.items():
        results, _ = game.play(network.likeliest, other, games, random)
        found[f"against_{name}"] = results.mean().item()
    if game.cells <= 9:
        found["defeats"] = game.defeats(network.likeliest)
    return found

"""Self-play with a league: the newest policy plays against itself and against its earlier versions.

    python recipes/self_play.py --dry-run        the plan
    python recipes/self_play.py                  tic-tac-toe, 200 iterations, a few minutes
    python recipes/self_play.py game.rows=6 game.columns=7 game.line=4 game.falling=true        connect four

Printed is `elo`, the rating of the newest version among all versions; version 0 moves at random, and has 0. A rating
compares versions alone, so `league/against_random`, `league/against_faultless` and `league/defeats` stand beside it.

Versions are drawn from the whole league, so that what beat an earlier one is not forgotten (fictitious self-play:
Heinrich et al., ICML 2015). Rules, network and loss are in recipes/games, without a line of the engine.
"""

from __future__ import annotations

import copy

import torch
from games.board import Game, Moves
from games.network import Network, learn
from games.rating import Ratings, measured

from rlplace import Channel, Job, Stage, Worker, full, on_host, run, weights


class Player(Worker):
    """What all components have: the game, and a network, whose weights go from the learner to the others."""

    def setup(self) -> None:
        self.game = Game(**self.config["game"])
        self.net = Network(self.game, **self.config["network"])
        self.other = copy.deepcopy(self.net)  # for versions
        self.offload(self.net)
        self.weights_of(self.net)

    def random(self, iteration: int) -> torch.Generator:
        seed = 1000 * self.config["network"]["seed"] + self.rank
        return torch.Generator().manual_seed(100_000 * seed + iteration)

    def against(self, version: dict, games: int, random: torch.Generator):
        self.other.load_state_dict(version)
        return self.game.play(self.net.drawn, self.other.drawn, games, random)


class Rollout(Player):
    """Plays games with the newest policy; each rank plays its own, against its own opponents."""

    def play(self, iteration: int) -> dict[str, float]:
        random = self.random(iteration)
        games = self.config["games"]
        _, moves = self.game.play(self.net.drawn, self.net.drawn, games, random)
        samples = [moves]  # both sides of games against itself teach
        found = []
        for version in self.channel("opponents").get(key=str(self.rank)):
            results, moves = self.against(version, games, random)
            samples.append(moves.of_first())
            found.append(results)
        self.channel("samples").put((self.rank, Moves.joined(samples)))
        return {"against_league": torch.cat(found).mean().item()}


class League(Player):
    """Keeps versions of the weights, gives them to the rollout ranks as opponents, and rates each new one."""

    most_ranks = 1

    def setup(self) -> None:
        super().setup()
        # Equal logits: version 0 moves at random.
        zeros = {name: 0 * weight for name, weight in self.net.state_dict().items()}
        self.versions = [zeros]
        self.ratings = Ratings()
        self.newest: dict[str, float] = {}  # what is known of the newest version

    def offer(self, iteration: int) -> None:
        random = self.random(iteration)
        count = self.config["opponents"]
        for rank in range(self.world_size_of("rollout")):
            drawn = torch.randint(len(self.versions), (count,), generator=random)
            opponents = [self.versions[version] for version in drawn]
            self.channel("opponents").put(opponents, key=str(rank))

    def keep(self, iteration: int) -> dict[str, float]:
        if iteration % self.config["every"] == 0:
            self.rate(self.random(iteration))
            self.versions.append(copy.deepcopy(self.net.state_dict()))
        return self.newest

    def rate(self, random: torch.Generator) -> None:
        games = self.config["rated"]
        found = [self.against(version, games, random)[0] for version in self.versions]
        self.ratings.add(found)
        self.newest = measured(self.net, self.config["measured"], random)
        self.newest["elo"] = self.ratings.elo()[-1].item()

    def save_state(self) -> object:
        known = {"points": self.ratings.points, "newest": self.newest}
        return {**known, "versions": self.versions}

    def load_state(self, state: dict) -> None:
        self.ratings.points = state["points"]
        self.newest = state["newest"]
        self.versions = state["versions"]


class Learner(Player):
    """Learns from the games of all rollout ranks."""

    most_ranks = 1

    def setup(self) -> None:
        super().setup()
        self.optimizer = torch.optim.Adam(self.net.parameters())
        self.offload(self.optimizer)

    def learn(self, iteration: int) -> dict[str, float]:
        ranks = range(self.world_size_of("rollout"))
        parts = dict(self.channel("samples").get() for _ in ranks)
        # The order of the ranks, not that of arrival: a run can be repeated.
        samples = Moves.joined([parts[rank] for rank in ranks])
        lr = self.config["lr"] / (1 + iteration / self.config["lr_halved_at"])
        settings = (lr, self.config["entropy"], self.random(iteration))
        return learn(self.net, self.optimizer, samples, *settings)

    def save_state(self) -> object:
        return {"net": self.net.state_dict(), "adam": self.optimizer.state_dict()}

    def load_state(self, state: dict) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["adam"])


games = full("rollout").calls("play", scales="constant")  # as many on each rank
job = Job(
    name="self_play",
    components={"actor": Learner, "rollout": Rollout, "league": League},
    stages=[
        Stage("sync", weights("actor", to=["rollout", "league"])),
        Stage("play", on_host("league").calls("offer"), games),
        Stage("learn", full("actor").calls("learn"), full("league").calls("keep")),
    ],
    channels=[
        Channel("opponents", "league", "rollout", by_rank=True),
        Channel("samples", "rollout", "actor"),
    ],
    score="league/elo",
)

if __name__ == "__main__":
    run(job, "self_play.yaml")

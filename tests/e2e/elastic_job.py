"""Jobs whose work is sleeping, for tests of the pilot: three components work at once, and ranks share the work.

Each component takes more than half of an accelerator's memory, so no two of them can be on the same of 8 accelerators::

    rollout 2 ranks, actor 4 ranks, scorer 2 ranks    the best placement for little generation: 0.2 s
    rollout 4 ranks, actor 2 ranks, scorer 2 ranks    the best placement for much generation: 0.4 s, the other 0.6 s
"""

from __future__ import annotations

import time

from rlplace import Job, Stage, Worker, full

GENERATE_S = 0.4  # of all ranks, in the first iterations
LEARN_S = 0.8
SCORE_S = 0.3
# From the first to the second of these iterations, generation grows threefold
GROWS = (30, 40)


class Grows(Worker):
    def generate(self, iteration: int) -> None:
        first, last = GROWS
        share = min(1.0, max(0.0, (iteration - first) / (last - first)))
        time.sleep(GENERATE_S * (1.0 + 2.0 * share) / self.world_size)


class Stays(Worker):
    def generate(self, iteration: int) -> None:
        time.sleep(GENERATE_S / self.world_size)


class Crowds(Worker):
    """Slower with more than two ranks: no prediction assumes this."""

    def generate(self, iteration: int) -> None:
        time.sleep(GENERATE_S * max(1.0, self.world_size / 2))


class Learner(Worker):
    def learn(self, iteration: int) -> None:
        time.sleep(LEARN_S / self.world_size)


class Quick(Worker):
    def learn(self, iteration: int) -> None:
        time.sleep(0.3 / self.world_size)


class Scorer(Worker):
    def score(self, iteration: int) -> None:
        time.sleep(SCORE_S / self.world_size)


def job(rollout: type[Worker], actor: type[Worker]) -> Job:
    return Job(
        name="elastic",
        components={"actor": actor, "rollout": rollout, "scorer": Scorer},
        stages=[
            Stage(
                "work",
                full("rollout").calls("generate"),
                full("actor").calls("learn"),
                full("scorer").calls("score"),
            )
        ],
    )


GROWING = job(Grows, Learner)
STEADY = job(Stays, Learner)
CROWDED = job(Crowds, Quick)

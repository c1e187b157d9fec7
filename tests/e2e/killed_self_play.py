"""recipes/self_play.py with ranks that kill themselves once: a rollout rank in iteration 2, the league in iteration 4.

`python tests/e2e/killed_self_play.py CONFIG FOLDER`: a YAML file, and the folder for files that say which has died. The
folder `recipes` has to be in PYTHONPATH.
"""

from __future__ import annotations

import sys
from pathlib import Path

from self_play import League, Learner, Rollout, job

from rlplace import Job, run
from tests.e2e.own_killed_job import die_once


class DyingRollout(Rollout):
    """Dies with its games half way to the learner."""

    def play(self, iteration: int) -> dict[str, float]:
        found = super().play(iteration)
        if iteration == 2 and self.rank == 1:
            die_once(Path(self.config["folder"]) / "rollout_died")
        return found


class DyingLeague(League):
    """Dies after it has rated a new version and kept it."""

    def keep(self, iteration: int) -> dict[str, float]:
        found = super().keep(iteration)
        if iteration == 4:
            die_once(Path(self.config["folder"]) / "league_died")
        return found


dying = Job(
    name=job.name,
    components={"actor": Learner, "rollout": DyingRollout, "league": DyingLeague},
    stages=job.stages,
    channels=job.channels,
    score=job.score,
)

if __name__ == "__main__":
    file, folder = sys.argv[1:]
    words = [f"+{name}.folder={folder}" for name in ("rollout", "league")]
    sys.exit(run(dying, file, words))

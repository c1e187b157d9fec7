"""An environment of the library OpenEnv (0.10) and its server: the policy guesses which drawer is full.

    python -m venv ../openenv && ../openenv/bin/pip install openenv      once: the server's own environment
    ../openenv/bin/python recipes/agents/openenv_drawers.py              in a terminal of its own
    scripts/get_model tiny                                               once: a model with random weights
    python -m rlplace.train --config-dir recipes/agents --config-name openenv_drawers

The file has no word of rlplace. An answer is an action: its last number is the drawer. `env/reward` rises from 0 to
about 0.5 within ten iterations: one of the two drawers is found.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from pydantic import Field

FULL = (3, 8)  # the full drawer of each day
MOST_TURNS = 3
# Episodes at the same time: all samples of all prompts of an iteration
SESSIONS = 256


class Open(Action):
    """The number of the drawer to open."""

    drawer: int = Field(ge=0, le=9)


class Seen(Observation):
    """What is in the drawer."""

    text: str


class Drawers(Environment[Open, Seen, State]):
    """One of ten drawers is full. The reward is higher the fewer drawers were opened before it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._day = 0
        self._opened = 0

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **more: Any
    ) -> Seen:
        """Begin a day."""
        self._day = random.Random(seed).randrange(len(FULL))
        self._opened = 0
        return Seen(text=f"day {self._day}")

    def step(self, action: Open, timeout_s: float | None = None, **more: Any) -> Seen:
        """Open a drawer."""
        self._opened += 1
        if action.drawer == FULL[self._day]:
            return Seen(text="full", done=True, reward=1.2 - 0.2 * self._opened)
        return Seen(text="empty", done=self._opened == MOST_TURNS)

    @property
    def state(self) -> State:
        """The state of the episode."""
        return State(step_count=self._opened)


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
    app = create_app(Drawers, Open, Seen, max_concurrent_envs=SESSIONS)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")

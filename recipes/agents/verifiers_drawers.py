"""A taskset of the library verifiers (0.4): the policy guesses which drawer is full, in several turns.

    pip install -e '.[verifiers]'                                       once
    scripts/get_model tiny                                              once: a model with random weights
    PYTHONPATH=recipes/agents python -m rlplace.train --config-dir recipes/agents --config-name verifiers_drawers

The file has no word of rlplace. `env/reward` rises from 0.05 to about 0.5 within ten iterations: one of the two drawers
is found. `env/part/found` and `env/part/quick` are its reward functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

FULL = ("3", "8")  # the full drawer of each day
MOST_TURNS = 3


class Day(vf.TaskData):
    """A task: a day, and the drawer that is full on this day."""

    day: int
    full: str


class Drawer(vf.Task[Day]):
    """How an episode is scored: its reward functions and its metric."""

    @vf.reward(weight=0.7)
    async def found(self, trace: vf.Trace) -> float:
        """Return 1 if the last answer names the full drawer."""
        return float(self.data.full in trace.last_reply)

    @vf.reward(weight=0.3)
    async def quick(self, trace: vf.Trace) -> float:
        """Return 1 if the first answer names the full drawer, and less for each further one."""
        found = self.data.full in trace.last_reply
        return (MOST_TURNS - trace.num_turns + 1) / MOST_TURNS if found else 0.0

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        """Return the number of answers."""
        return float(trace.num_turns)


class DrawersConfig(vf.TasksetConfig):
    """Arguments of the taskset: `days` is the number of its tasks."""

    days: int = 2


class Drawers(vf.Taskset[Drawer, DrawersConfig]):
    """The tasks: one for each day."""

    def load(self) -> Iterator[Drawer]:
        """Yield the tasks."""
        for day in range(self.config.days):
            full = FULL[day % len(FULL)]
            yield Drawer(Day(prompt=None, day=day, full=full), self.config.task)


class TalkConfig(vf.EnvConfig):
    """Who plays: one agent, which is the policy."""

    player: vf.AgentConfig = vf.AgentConfig()


class Talk(vf.Env[TalkConfig]):
    """How an episode runs: the policy guesses until it finds the drawer."""

    async def run(self, task: Any, agents: vf.Agents) -> None:
        """Play one episode."""
        async with agents.player.interaction(task) as talk:
            said = await talk.turn(f"day {task.data.day % len(FULL)}")
            while not said.terminated and task.data.full not in said.last_reply:
                if talk.trace.num_turns == MOST_TURNS:
                    break
                said = await talk.turn("empty")


__all__ = ["Drawers", "Talk"]

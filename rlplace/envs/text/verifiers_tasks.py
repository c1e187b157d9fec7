"""A task whose episodes are those of an environment of the library verifiers: its tasks, its agents and its rewards.

::

    the library: task ── run ──▶ harness ──▶ its proxy ──▶ endpoint of the env rank ──▶ rollout
                   ◀── rewards ── messages ◀───────────────────────────────────────────────┘

Each model call carries the id of its trace as a session, by which the endpoint finds the episode.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from rlplace.envs.registry import needs
from rlplace.envs.text.agents import SHARED_KEY, LedEpisodes
from rlplace.envs.text.contract import Split
from rlplace.envs.text.rows import Epochs, Share
from rlplace.envs.text.verifiers_library import Environment


class Verifiers(LedEpisodes):
    """A task: the tasks of a taskset of the library verifiers, as an environment of the library plays them.

    `environment`: id of a taskset; or a mapping with the keys of the library's block `env`, such as {"taskset": {"id":
    ...}}. `select`: which tasks are used, with the keys of the library's block `select`. The score of an episode is the
    mean reward of its agents that are trained; each reward function of the library is a part of the score.

    An agent without a `harness` chats within this process, with the tools of the task and no others. Raises ValueError
    for an environment that cannot be loaded.
    """

    def __init__(
        self,
        *,
        seed: int,
        split: Split,
        environment: str | Mapping[str, Any],
        select: Mapping[str, Any] | None = None,
        first_request_s: float = 60.0,
        tool_format: str | None = None,
    ) -> None:
        super().__init__(
            self._lead,
            seed=seed,
            split=split,
            first_request_s=first_request_s,
            tool_format=tool_format,
        )
        # Older versions have no v1
        modules = ("verifiers", "verifiers.v1", "httpx")
        with needs(*modules, got="verifiers", extra="verifiers"):
            for module in modules:
                importlib.import_module(module)
        self._environment = Environment(environment, select, SHARED_KEY)
        everything = Share(rows=range(len(self._environment.tasks)), weight=1.0)
        self._epochs = Epochs([everything], seed)

    def row(self, number: int) -> Mapping[str, Any]:
        """Return {"task": number of a task among the selected ones} for the episode `number`.

        Each epoch has all tasks, in a random order of its own.
        """
        return {"task": self._epochs.row(number)}

    def _lead(self, base_url: str, api_key: str, row: Mapping[str, Any], /) -> Any:
        """Run an episode of the library, and return its facts, as an Agent does."""
        sessions: list[str] = []

        def begun(session: str) -> None:
            sessions.append(session)
            self.endpoint.join(api_key, session)

        try:
            return self._environment.run(row["task"], base_url, begun)
        finally:
            self.endpoint.leave(sessions)

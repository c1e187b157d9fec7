"""The driver's end of a channel inside a worker process: for statistics and endings; items stay in the process."""

from __future__ import annotations

from typing import Any, NoReturn

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from rlplace.comm import channel_errors
from rlplace.comm.channel import ChannelSpec, ChannelStats
from rlplace.errors import ChannelMisuse, Problem
from rlplace.workers.ray_launch.actors import CONTROL, RayProcess

_ANSWER_S = 5.0  # for a process to answer beside its work


class ProcessEnd:
    """Implements Channel from outside of the process; putting and getting are ChannelMisuse."""

    def __init__(self, spec: ChannelSpec, name: str, processes: dict[str, RayProcess]) -> None:
        """`processes`: those that run, by name; this one need not run yet."""
        self._spec = spec
        self._name = name
        self._processes = processes

    @property
    def spec(self) -> ChannelSpec:
        return self._spec

    def named(self, owner: str) -> ProcessEnd:
        return self

    def close(self) -> None:
        self._ask("close")

    def break_(self, why: str) -> None:
        self._ask("break_", why)

    def stats(self) -> ChannelStats:
        stats: ChannelStats = self._ask("stats")
        return stats

    def _ask(self, method: str, *arguments: object) -> Any:
        process = self._processes.get(self._name)
        if process is None:
            raise self._gone("it does not run yet")
        on_channel = process.actor.on_channel.options(concurrency_group=CONTROL)
        try:
            return ray.get(on_channel.remote(self._spec, method, arguments), timeout=_ANSWER_S)
        except GetTimeoutError:
            raise channel_errors.silent(self._spec, "the driver", method, _ANSWER_S) from None
        except RayActorError as death:
            raise self._gone("it has ended") from death

    def _gone(self, what: str) -> Any:
        return channel_errors.broken(self._spec, "the driver", f"it lives inside process {self._name!r}; {what}")

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise ChannelMisuse(
            Problem(
                code="inside-a-process",
                key=f"channel {self._spec.name}",
                what="the driver can neither put nor get here",
                got=f"keys {', '.join(self._spec.keys or ())}",
                why=f"all their users share process {self._name!r}, and items pass there by reference",
                fix="process: own        (for the components that share it)",
            )
        )

    put = put_nowait = get = get_nowait = get_batch = get_batch_nowait = _refuse

"""The templates of all nodes of a Ray cluster."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from rlplace.signals import deliver_deferred
from rlplace.workers.ray_launch.template import END_S, Template

_WAKE_S = 0.2  # longest wait between two deliveries of deferred signals


class Templates:
    """The templates of all nodes of a cluster. On a node without a template, Ray starts workers in its own way."""

    def __init__(
        self, here: Template | None, variables: Mapping[str, str] | None = None
    ) -> None:
        """Hold the templates.

        `here`: template of this machine, for a Ray with one machine; None: `start_on` starts templates.

        `variables`: environment variables of workers.
        """
        self._variables = variables or {}
        self._here = here
        # Actor and fork command, by node
        self._elsewhere: dict[int, tuple[Any, str]] = {}
        # Nodes without a template, and why
        self._without: dict[int, str] = {}

    def start_on(
        self,
        nodes: Mapping[int, Mapping[str, Any]],
        modules: Iterable[str],
        timeout_s: float,
    ) -> None:
        """Start a template on each node where no start was tried yet.

        Wait up to `timeout_s` seconds for all started templates.

        `nodes`: options of the template's Ray actor, by node number. `modules`: names of the modules that a template
        imports. A node whose template fails, or does not start in time, has no template. Do nothing if this machine's
        template is used.
        """
        if self._here is not None:
            return
        made: Any = ray.remote(Template)
        new = {
            node: on
            for node, on in nodes.items()
            if node not in self._elsewhere and node not in self._without
        }
        hosts = {
            node: made.options(num_cpus=0, **on).remote(modules, self._variables)
            for node, on in new.items()
        }
        asked = {node: host.command.remote() for node, host in hosts.items()}
        if asked:
            late_of(list(asked.values()), timeout_s)
        for node, host in hosts.items():
            try:
                self._elsewhere[node] = host, ray.get(asked[node], timeout=0)
            except GetTimeoutError:
                self._without[node] = f"no template within {timeout_s:g} s"
                # Ray ends the actor after this call.
                host.stop.remote()
            except RayError as error:
                self._without[node] = str(error).strip().rpartition("\n")[2]

    def command(self, node: int) -> str | None:
        """Return the command that starts a fork on a node, in place of the Python command.

        Return None if the node has no template.
        """
        if self._here is not None:
            return self._here.command()
        if node in self._elsewhere:
            return self._elsewhere[node][1]
        return None

    def why_not(self) -> str | None:
        """Return why workers on some nodes start without a template, in one line; None if all nodes have a template."""
        if self._here is not None:
            return self._here.why_not()
        asked = {
            node: host.why_not.remote() for node, (host, _) in self._elsewhere.items()
        }
        answers = (
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=END_S)[0]
            if asked
            else []
        )
        ended = dict(self._without)
        for node, reference in asked.items():
            if reference in answers:
                # The node is lost; that is reported elsewhere.
                with contextlib.suppress(RayError):
                    ended |= {node: why} if (why := ray.get(reference)) else {}
        return (
            "; ".join(f"node {node}: {why}" for node, why in sorted(ended.items()))
            or None
        )

    def stop(self) -> None:
        """End all templates; their forks go on. Idempotent."""
        if self._here is not None:
            self._here.stop()
        hosts = [host for host, _ in self._elsewhere.values()]
        if hosts and ray.is_initialized():
            # Wait: Ray would kill the template with its actor, and the folder would be left behind.
            ray.wait(
                [host.stop.remote() for host in hosts],
                num_returns=len(hosts),
                timeout=3 * END_S,
            )
            for host in hosts:
                ray.kill(host)
        self._elsewhere.clear()


def late_of(references: Sequence[Any], timeout_s: float) -> list[Any]:
    """Wait up to `timeout_s` seconds for Ray results, and return the references whose results are late.

    During the wait, deferred signals are delivered.
    """
    late = list(references)

    def poll(seconds: float) -> bool:
        nonlocal late
        late = ray.wait(late, num_returns=len(late), timeout=seconds)[1]
        return not late

    if late:
        wait_ready(poll, timeout_s)
    return late


def wait_ready(poll: Callable[[float], bool], timeout_s: float) -> bool:
    """Call `poll` until it returns True, and return True; return False after `timeout_s` seconds without success.

    `poll`: gets the seconds that it may wait. Deferred signals are delivered between the calls.
    """
    until = time.monotonic() + timeout_s
    while True:
        left_s = until - time.monotonic()
        ready = poll(max(0.0, min(_WAKE_S, left_s)))
        deliver_deferred()
        if ready or left_s < _WAKE_S:
            return ready

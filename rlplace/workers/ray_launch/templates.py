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


def _nothing() -> None:
    pass


class Templates:
    """The template processes of all nodes of a cluster. On a node without a template, Ray starts workers in its own
    way.
    """

    def __init__(
        self, here: Template | None, variables: Mapping[str, str] | None = None
    ) -> None:
        """Start without templates, or with the template of this machine.

        `here`: template of this machine, if Ray runs on this machine alone; None: `start_on` starts templates on the
        nodes. `variables`: environment variables of workers.
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
        interrupt: Callable[[], None] = _nothing,
        tried: Iterable[str] = (),
    ) -> None:
        """Start a template on each node of `nodes` where none was tried before; wait for all of them, at most
        `timeout_s` seconds.

        A node has no template if the start fails or takes too long. If the template of this machine is used, do
        nothing.

        `nodes`: node number -> options of the Ray actor that starts the template there. `modules`: names of the modules
        that a template imports. `interrupt`: as for `wait_ready`. `tried`: as for `Template`.
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
            node: made.options(num_cpus=0, **on).remote(modules, self._variables, tried)
            for node, on in new.items()
        }
        asked = {node: host.command.remote() for node, host in hosts.items()}
        if asked:
            late_of(list(asked.values()), timeout_s, interrupt)
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
        """Return the command line that starts a worker of `node` as a fork, which Ray runs instead of the Python
        interpreter.

        Return None if the node has no template.
        """
        if self._here is not None:
            return self._here.command()
        if node in self._elsewhere:
            return self._elsewhere[node][1]
        return None

    def why_not(self) -> str | None:
        """Return one line of text that says which nodes have no template, and why. Return None if all nodes have a
        template.
        """
        if self._here is not None:
            return self._here.why_not()
        asked = {
            node: host.why_not.remote() for node, (host, _) in self._elsewhere.items()
        }
        return _by_node(self._without | _texts(asked))

    def left_out(self) -> str | None:
        """Return one line of text that says which templates do without some modules, and why. Return None if all have
        all modules.
        """
        if self._here is not None:
            return self._here.left_out()
        asked = {
            node: host.left_out.remote() for node, (host, _) in self._elsewhere.items()
        }
        return _by_node(_texts(asked))

    def stop_on(self, node: int) -> None:
        """End the template of a node, if it has one of its own; workers that were forked continue."""
        host, _ = self._elsewhere.pop(node, (None, ""))
        self._without.pop(node, None)
        if host is not None:
            ray.wait([host.stop.remote()], timeout=3 * END_S)
            ray.kill(host)

    def stop(self) -> None:
        """End all templates; workers that were forked continue. A second call does nothing."""
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


def _texts(asked: Mapping[int, Any]) -> dict[int, str]:
    """Wait a short time for the results of Ray calls, one per node; return those that are texts, by node.

    `asked`: node number -> reference to a text or None.
    """
    references = list(asked.values())
    if not references:
        return {}
    answers, _ = ray.wait(references, num_returns=len(references), timeout=END_S)
    texts = {}
    for node, reference in asked.items():
        if reference in answers:
            # The node is lost; that is reported elsewhere.
            with contextlib.suppress(RayError):
                text = ray.get(reference)
                if text:
                    texts[node] = text
    return texts


def _by_node(texts: Mapping[int, str]) -> str | None:
    """Return the texts of nodes in one line. Return None if there is no text."""
    return (
        "; ".join(f"node {node}: {text}" for node, text in sorted(texts.items()))
        or None
    )


def late_of(
    references: Sequence[Any],
    timeout_s: float,
    interrupt: Callable[[], None] = _nothing,
) -> list[Any]:
    """Wait up to `timeout_s` seconds for the results of Ray calls; return the references that have no result by then.

    `interrupt`: as for `wait_ready`. Signals of this process that rlplace has deferred are handled during the wait.
    """
    late = list(references)

    def poll(seconds: float) -> bool:
        nonlocal late
        late = ray.wait(late, num_returns=len(late), timeout=seconds)[1]
        return not late

    if late:
        wait_ready(poll, timeout_s, interrupt)
    return late


def wait_ready(
    poll: Callable[[float], bool],
    timeout_s: float,
    interrupt: Callable[[], None] = _nothing,
) -> bool:
    """Call `poll` repeatedly until it returns True; return True. Return False if this takes more than `timeout_s`
    seconds.

    `poll`: its argument is the number of seconds that it may wait. Between calls, signals of this process that rlplace
    has deferred are handled, and `interrupt` is called; an error that it raises ends the wait.
    """
    until = time.monotonic() + timeout_s
    while True:
        left_s = until - time.monotonic()
        ready = poll(max(0.0, min(_WAKE_S, left_s)))
        deliver_deferred()
        if ready or left_s < _WAKE_S:
            return ready
        interrupt()

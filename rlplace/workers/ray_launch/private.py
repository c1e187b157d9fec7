"""The only module that uses private functions of Ray. Each use has a fallback for a Ray without that function.

Private functions that only save time are used with versions of Ray that were tried (`rlplace.tried`). Other versions
start in their own way, and `RaySession.notes` says so.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlplace.tried import untried

_NODE_S = 30.0  # longest wait for a node to be listed, as in Ray
_LOOK_S = 0.02
_ADDRESS_FILE = "ray/ray_current_cluster"  # file where `ray start` writes its address


def why_not_lean() -> str | None:
    """Return why `lean_start` has no effect with this version of Ray, as a text; None if it has an effect."""
    import ray

    window = untried("ray", ray.__version__)
    if window is not None:
        return f"{ray.__version__} was not tried ({window.oldest} to {window.newest} were), so it starts its own way"
    lacks = [
        f"{_name(owner)}.{name}"
        for owner, name, _ in _lean("")
        if not hasattr(owner, name)
    ]
    lacks += [
        f"RayParams({name})"
        for name in ("setup_worker_path", *_LEFT_OUT)
        if not _has_parameter(name)
    ]
    if lacks:
        return f"{ray.__version__} has no {', '.join(lacks)}, so it starts its own way"
    return None


_LEFT_OUT: dict[str, Any] = {"no_monitor": True, "include_log_monitor": False}


@contextlib.contextmanager
def lean_start(setup_worker: str) -> Iterator[None]:
    """Return a context manager: a Ray that is started in its `with` block starts only the services that workers need.

    Ray has no public switch for this. Left out are the API server, for which the other services would wait, the
    dashboard's part of a node's agent, the autoscaler's monitor, and the collection of logs. A started node is found
    without delay. The block has no effect if this version of Ray was not tried, or lacks one of the functions that are
    replaced.

    `setup_worker`: script through which Ray starts workers.
    """
    if why_not_lean() is not None:
        yield
        return
    ours = _lean(setup_worker)
    theirs = [(owner, name, getattr(owner, name)) for owner, name, _ in ours]
    try:
        for owner, name, value in ours:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in theirs:
            setattr(owner, name, value)


def _lean(setup_worker: str) -> list[tuple[Any, str, Any]]:
    """Return the attributes of Ray that `lean_start` replaces: (object, name of the attribute, new value).

    `setup_worker`: script through which Ray starts workers.
    """
    from ray._private import node, parameter, services, utils

    params = functools.partial(
        parameter.RayParams, setup_worker_path=setup_worker, **_LEFT_OUT
    )
    # `why_not_lean` checks that the function exists.
    ask: Any = getattr(services, "get_node", None)
    return [
        (parameter, "RayParams", params),
        (node.Node, "start_api_server", lambda *_, **__: None),
        (
            utils,
            "get_dashboard_dependency_error",
            lambda: "not wanted",
        ),  # so agents start without it
        (services, "get_node", functools.partial(listed_node, ask)),
    ]


def _has_parameter(name: str) -> bool:
    from ray._private import parameter

    return name in inspect.signature(parameter.RayParams.__init__).parameters


def _name(owner: Any) -> str:
    return str(owner.__name__).rpartition(".")[2]


def listed_node(ask: Callable[[str, str], Any], gcs_address: str, node_id: str) -> Any:
    """Wait until Ray lists the node `node_id`, and return `ask(gcs_address, node_id)`.

    `ask`: Ray's own function, which would wait too, but look only once a second. `gcs_address`: address of the cluster.
    `node_id`: Ray's id of the node.
    """
    from ray._private import services, state

    nodes = state.GlobalState()
    until = time.monotonic() + _NODE_S
    nodes._initialize_global_state(services._get_gcs_client_options(gcs_address))
    while (
        all(node["NodeID"] != node_id for node in nodes.node_table())
        and time.monotonic() < until
    ):
        time.sleep(_LOOK_S)
    nodes.disconnect()
    return ask(gcs_address, node_id)


@contextlib.contextmanager
def signals_kept() -> Iterator[None]:
    """Return a context manager that keeps the program's SIGTERM handler while Ray starts, joins or ends in its `with`
    block.

    Ray would install a handler of its own, which exits in the middle of Ray's calls.
    """
    from ray._private import utils

    before = getattr(utils, "set_sigterm_handler", None)
    if before is None:
        with _sigterm_put_back():
            yield
        return
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = before


@contextlib.contextmanager
def _sigterm_put_back() -> Iterator[None]:
    """Return a context manager that restores the program's SIGTERM handler at the end of its `with` block.

    It uses only public functions. Unlike with `signals_kept`, Ray's handler is active during the block.
    """
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if (
            threading.current_thread() is threading.main_thread()
            and handler is not None
        ):
            signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def servers_killed() -> Iterator[None]:
    """Return a context manager: `ray.shutdown` in its `with` block kills the servers that Ray has started.

    Otherwise `ray.shutdown` would wait a second for each server to end after SIGTERM.
    """
    from ray._private import worker

    node: Any = getattr(worker, "_global_node", None)
    kill = getattr(node, "kill_all_processes", None)
    if kill is None or not {"check_alive", "allow_graceful"} <= set(
        inspect.signature(kill).parameters
    ):
        # Ray was joined, or does not have the function: it ends in its own way.
        yield
        return
    node.kill_all_processes = lambda **_: kill(check_alive=False, allow_graceful=False)
    yield


def free_by_node() -> Mapping[str, Mapping[str, float]]:
    """Return the resources that are free: node id -> resource name -> amount.

    Ray has no public function for this. The result is empty if Ray's private function is missing.
    """
    try:
        from ray._private.state import available_resources_per_node
    except ImportError:
        return {}
    return available_resources_per_node()


def address_of_start() -> str | None:
    """Return the cluster address that the last `ray start` on this machine has written to a file; None if there is no
    file.
    """
    try:
        from ray._private.services import find_bootstrap_address
    except ImportError:
        with contextlib.suppress(OSError):
            return (Path(tempfile.gettempdir()) / _ADDRESS_FILE).read_text(
                encoding="utf-8"
            ).strip() or None
        return None
    return find_bootstrap_address(None)


def is_server(words: Sequence[str]) -> bool:
    """Return whether a process is the Ray server that runs on each node (the raylet), by its command line.

    `words`: the words of the command line.
    """
    try:
        from ray._private.services import _is_raylet_process
    except ImportError:
        return bool(words) and Path(words[0]).name == "raylet"
    return bool(_is_raylet_process(list(words)))


def show_name(name: str) -> None:
    """Set this process's name in `ps` and `nvidia-smi`. Do nothing if this version of Ray has no function for it."""
    title = getattr(_extension(), "setproctitle", None)
    if title is not None:
        title(f"ray::{name}")


# ── the token of a cluster ───────────────────────────────────────────────────────────────────────────────────────────


def token_loader() -> Any | None:
    """Return the object by which Ray's code in this process finds its authentication token.

    Return None if this version of Ray is older than 2.53.
    """
    if not hasattr(_extension(), "AuthenticationTokenLoader"):
        return None
    loader = _extension().AuthenticationTokenLoader.instance()
    try:
        loader.has_token(ignore_auth_mode=True)
    except (
        TypeError
    ):  # before 2.53 a token is found only if RAY_AUTH_MODE is set, as it must be there
        return None
    return loader


def read_mode_again() -> None:
    """Make Ray read the variable RAY_AUTH_MODE and the token anew."""
    _extension().Config.initialize("")
    if (loader := token_loader()) is not None:
        loader.reset_cache()


def send_token() -> None:
    """Make Ray send its authentication token with each call, as `ray.init` does if it finds a token."""
    os.environ["RAY_AUTH_MODE"] = "token"
    _extension().Config.initialize("")


def _extension() -> Any:
    from ray import _raylet

    # The stubs of Ray lack what is used here.
    return _raylet

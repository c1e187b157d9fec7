"""The start of a Ray on this machine, without one."""

from __future__ import annotations

import os
import platform
import signal
from pathlib import Path
from typing import Any

import pytest

from rlplace.signals import deferred
from rlplace.workers.ray_launch import private, session, token


def test_a_node_is_asked_for_once_it_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import services, state

    looks, ended = (
        [[], [{"NodeID": "other"}], [{"NodeID": "other"}, {"NodeID": "ours"}]],
        list[bool](),
    )

    class Nodes:
        def _initialize_global_state(self, options: object) -> None:
            assert options == "127.0.0.1:1"

        def node_table(self) -> list[dict[str, str]]:
            return looks.pop(0)

        def disconnect(self) -> None:
            ended.append(True)

    monkeypatch.setattr(state, "GlobalState", Nodes)
    monkeypatch.setattr(services, "_get_gcs_client_options", lambda address: address)

    def ask(address: str, node: str) -> str:
        assert not looks, "asked before it was listed: Ray would sleep for a second"
        return f"{node} at {address}"

    assert private.listed_node(ask, "127.0.0.1:1", "ours") == "ours at 127.0.0.1:1"
    assert ended == [True]


def test_a_signal_is_taken_between_two_attempts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    attempts = list[str]()

    def start(**kwargs: object) -> None:
        attempts.append(str(kwargs["address"]))
        signal.raise_signal(signal.SIGINT)
        raise RuntimeError("slow")

    def attempt() -> None:
        with deferred():
            session._start_local(60.0)

    monkeypatch.setattr(ray, "init", start)
    with pytest.raises(KeyboardInterrupt):
        attempt()
    assert attempts == ["local"]


def test_a_token_that_was_made_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loader: Any = private.token_loader()
    if loader is None:
        pytest.skip("this Ray knows no token")
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # for what was there to be put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    loader.reset_cache()
    forget = token.make_token()
    assert forget is not None
    private.send_token()  # as ray.init does
    assert token.make_token() is None, "it is used again"
    file = tmp_path / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text("f" * 64)
    forget()
    assert not {"RAY_AUTH_TOKEN", "RAY_AUTH_MODE"} & set(os.environ)
    private.send_token()
    assert loader.get_token_for_http_header()["authorization"] == "Bearer " + "f" * 64
    monkeypatch.undo()
    loader.reset_cache()


# ── Rays of other versions ───────────────────────────────────────────────────────────────────────────────────────────


def replaced() -> tuple[object, ...]:
    from ray._private import node, parameter, services

    return parameter.RayParams, node.Node.start_api_server, services.get_node


def test_a_ray_that_was_tried_starts_lean_and_is_as_it_was_afterwards() -> None:
    before = replaced()
    assert private.why_not_lean() is None, "the Ray of our own set-up was tried"
    with private.lean_start("fork.py"):
        assert not set(before) & set(replaced())
    assert replaced() == before


@pytest.mark.parametrize("lacking", ["version", "function", "parameter"])
def test_a_ray_that_is_not_as_those_that_were_tried_starts_its_own_way(
    lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray
    from ray._private import parameter, services

    said = {
        "version": "9.0.0 was not tried",
        "function": "services.get_node",
        "parameter": "RayParams(no_monitor)",
    }
    if lacking == "version":
        monkeypatch.setattr(ray, "__version__", "9.0.0")
    elif lacking == "function":
        monkeypatch.delattr(services, "get_node")
    else:
        monkeypatch.setattr(
            parameter,
            "RayParams",
            type("RayParams", (), {"__init__": _without_no_monitor}),
        )
    why = private.why_not_lean()
    assert why is not None
    assert said[lacking] in why
    assert why.endswith("so it starts its own way")
    params = parameter.RayParams
    with private.lean_start("fork.py"):
        assert parameter.RayParams is params


def _without_no_monitor(
    self: object, setup_worker_path: str, include_log_monitor: bool
) -> None: ...


def test_what_a_ray_does_not_have_is_done_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from ray._private import services, state, utils

    for owner, name in (
        (utils, "set_sigterm_handler"),
        (state, "available_resources_per_node"),
        (services, "find_bootstrap_address"),
        (services, "_is_raylet_process"),
        (private._extension(), "setproctitle"),
        (private._extension(), "AuthenticationTokenLoader"),
    ):
        monkeypatch.delattr(owner, name, raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    handler = signal.getsignal(signal.SIGTERM)
    with private.signals_kept():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is handler
    assert private.free_by_node() == {}
    assert private.address_of_start() is None
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:6379\n")
    assert private.address_of_start() == "127.0.0.1:6379"
    assert private.is_server(
        ["/lib/ray/core/src/ray/raylet/raylet", "--gcs-address=127.0.0.1:6379"]
    )
    assert not private.is_server(["/usr/bin/python3", "raylet.py"])
    private.show_name("actor rank 0")
    assert private.token_loader() is None
    assert token.make_token() is None


@pytest.mark.parametrize(
    ("ray_version", "python", "what", "fix"),
    [
        ("2.49.2", None, "the cluster has another Ray", "pip install 'ray==2.49.2' "),
        (None, "3.10.2", "the cluster has another Python", "uv venv --python 3.10.2 "),
        (
            "2.49.2",
            "3.10.2",
            "the cluster has another Ray and another Python",
            "uv venv --python 3.10.2 ",
        ),
    ],
)
def test_a_cluster_of_other_versions_says_which_is_where(
    ray_version: str | None, python: str | None, what: str, fix: str
) -> None:
    import ray
    from ray._private.utils import check_version_info

    here = (ray.__version__, platform.python_version())
    there = {"ray_version": ray_version or here[0], "python_version": python or here[1]}
    with pytest.raises(
        RuntimeError
    ) as theirs:  # the words of the Ray that is installed
        check_version_info(there, "node 10.0.0.2:6379")
    error = session._of_other_versions(str(theirs.value), "10.0.0.1:6379")
    assert error is not None
    assert (error.code, error.problem.what, error.problem.got) == (
        "ray-differs",
        what,
        "10.0.0.1:6379",
    )
    lines = (error.problem.why or "").splitlines()
    assert (
        lines[0]
        == f"cluster: Ray {there['ray_version']} and Python {there['python_version']}"
    )
    assert lines[1].startswith(f"driver:  Ray {here[0]} and Python {here[1]}, ")
    assert (error.problem.fix or "").startswith(fix)


def test_what_else_ray_says_is_not_about_versions() -> None:
    assert session._of_other_versions("Failed to connect to GCS", "auto") is None

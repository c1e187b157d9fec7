"""The start of a Ray on this machine, without one."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rlplace.signals import deferred
from rlplace.workers.ray_launch import session, token


def test_a_node_is_asked_for_once_it_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import services, state

    looks, ended = [[], [{"NodeID": "other"}], [{"NodeID": "other"}, {"NodeID": "ours"}]], list[bool]()

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

    assert session._listed_node(ask, "127.0.0.1:1", "ours") == "ours at 127.0.0.1:1"
    assert ended == [True]


def test_a_signal_is_taken_between_two_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_token_that_was_made_is_forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ray._private.authentication.authentication_token_setup import _enable_token_auth

    loader: Any = token._loader()
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # for what was there to be put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    loader.reset_cache()
    forget = token.make_token()
    assert forget is not None
    _enable_token_auth()  # as ray.init does
    assert token.make_token() is None, "it is used again"
    file = tmp_path / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text("f" * 64)
    forget()
    assert not {"RAY_AUTH_TOKEN", "RAY_AUTH_MODE"} & set(os.environ)
    _enable_token_auth()
    assert loader.get_token_for_http_header()["authorization"] == "Bearer " + "f" * 64
    monkeypatch.undo()
    loader.reset_cache()

"""The start of a Ray on this machine, without one."""

from __future__ import annotations

import pytest

from rlplace.workers.ray_launch import session


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

"""A run's side of the arbiter: what it sends before a stage, and what it raises if it gets no lease."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from rlplace.errors import SharingEnded
from rlplace.execution.lease import VARIABLE, Invitation, Lease

STAGES = {"sync": [0, 1], "rollout": [1], "learn": [0]}


class Other:
    """The end of the arbiter."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end

    def says(self, **message: Any) -> None:
        self.end.sendall(json.dumps(message).encode() + b"\n")

    def heard(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.end.recv(4096).splitlines()]


@pytest.fixture
def ends() -> Iterator[tuple[Lease, Other]]:
    mine, theirs = socket.socketpair()
    invitation = Invitation(
        descriptor=mine.fileno(), run="pole", account="accounts", timeout_s=5.0
    )
    lease = Lease(mine, invitation)
    lease.plan(STAGES, frozenset([0, 1]))
    with mine, theirs:
        yield lease, Other(theirs)


def test_a_run_asks_for_the_accelerators_of_its_next_stage(
    ends: tuple[Lease, Other],
) -> None:
    lease, other = ends
    other.says(granted=0.5)
    other.says(granted=0.25)
    lease.enter("sync", "rollout")
    lease.enter("rollout", "learn")
    assert other.heard() == [
        {"ask": [1], "stage": "rollout"},
        {"ask": [0], "stage": "learn"},
    ]
    assert lease.waited_s == 0.75


def test_the_first_stage_keeps_what_the_start_has(ends: tuple[Lease, Other]) -> None:
    lease, other = ends
    other.says(granted=0.0)
    lease.take_all("start")
    lease.enter(None, "sync")
    # After an evaluation or a recovery, the run goes on in the stage in which it is
    lease.enter("rollout", "rollout")
    assert other.heard() == [{"ask": [0, 1], "stage": "start"}, {"keep": [1]}]


def test_a_recovery_keeps_what_it_has_while_it_waits(ends: tuple[Lease, Other]) -> None:
    lease, other = ends
    other.says(granted=0.0)
    lease.take_all("recovery", keeping=True)
    (asked,) = other.heard()
    assert asked == {"ask": [0, 1], "stage": "recovery", "keeping": True}


def test_the_end_of_the_arbiter_is_noticed_at_once(ends: tuple[Lease, Other]) -> None:
    lease, other = ends
    other.end.close()
    with pytest.raises(SharingEnded, match="rlplace share has ended") as raised:
        lease.enter("sync", "rollout")
    assert raised.value.code == "sharing-ended"
    # Nothing is raised at the end of a run
    lease.close()


def test_a_refusal_says_why(ends: tuple[Lease, Other]) -> None:
    lease, other = ends
    other.says(refused="after 9 s, a waits for accelerators 1")
    with pytest.raises(SharingEnded, match="after 9 s, a waits for accelerators 1"):
        lease.enter("sync", "rollout")


def test_the_invitation_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Lease.from_environment() is None
    mine, theirs = socket.socketpair()
    with theirs:
        invitation = Invitation(
            descriptor=mine.detach(), run="pole", account="accounts", timeout_s=5.0
        )
        monkeypatch.setenv(VARIABLE, invitation.text())
        lease = Lease.from_environment()
        assert lease is not None
        assert VARIABLE not in os.environ
        # Processes that this one starts do not have its end
        assert not os.get_inheritable(invitation.descriptor)
        lease.close()
        assert json.loads(theirs.recv(100)) == {"end": True}

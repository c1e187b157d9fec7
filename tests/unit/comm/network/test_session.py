"""What a channel server owes a client: once performed, kept until received, undone when no client receives it."""

from __future__ import annotations

from typing import Any

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.network.server import Session
from rlplace.comm.queue import Get


class End:
    """Stands for the end of a channel, which something was taken or reserved from; writes down how that ended."""

    def __init__(self, name: str, log: list[str], *, fails: bool = False) -> None:
        self.spec = ChannelSpec(name=name, capacity_items=1)
        self._name, self._log, self._fails = name, log, fails

    def _end(self, how: str) -> None:
        if self._fails:
            raise OSError("the disk is full")
        self._log.append(f"{self._name} {how}")

    def confirm(self, get: object) -> None:
        self._end("confirmed")

    def give_back(self, get: object) -> None:
        self._end("restored")

    def break_(self, why: str) -> None:
        assert "the disk is full" in why
        self._log.append(f"{self._name} broken")


def answered(log: list[str], *serials: int, fails: int = 0) -> Session:
    session = Session(b"c")
    for serial in serials:
        end: Any = End(str(serial), log, fails=serial == fails)
        session.held[serial] = end, Get("rollout rank 0", "", None, remote=True)
    return session


def test_everything_goes_back_in_the_order_that_keeps_the_line() -> None:
    log: list[str] = []
    answered(log, 1, 2, 3).withdraw_all()
    assert log == ["3 restored", "2 restored", "1 restored"]


def test_what_cannot_be_undone_breaks_its_channel_alone() -> None:
    log: list[str] = []
    answered(log, 1, 2, 3, fails=2).died()
    assert log == ["3 restored", "2 broken", "1 restored"]
    answered(log, 4, fails=4).done([4])
    assert log[3:] == ["4 broken"]

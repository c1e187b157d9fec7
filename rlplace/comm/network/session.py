"""What a channel server owes one client: requests under way, credit without data, answers that may not have arrived."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Collection, Sequence

from rlplace.comm.network.wire import Frame
from rlplace.comm.shared_memory.channel import Reservation, SharedChannel, Taking


@dataclasses.dataclass(slots=True, kw_only=True)
class Answer:
    """An answer, kept until the client has it: sent again when it asks again, undone when it is gone."""

    envelope: bytes
    frames: Sequence[Frame] = ()
    taking: Taking | None = None


class Session:
    """The state of one client (a process that connected). Lives in the server's loop.

    A request is performed once, however often it arrives: it is under way, or answered, until the client says `done`.
    """

    def __init__(self, client: bytes) -> None:
        self.client = client
        self.lost_since: float | None = None  # since when it cannot be reached, on the loop's clock
        self._performing: dict[int, asyncio.Task[None]] = {}
        self._answers: dict[int, Answer] = {}
        self._reservations: dict[int, Reservation] = {}
        self._users: dict[tuple[str, str], SharedChannel] = {}  # by channel and owner

    def performs(self, serial: int) -> bool:
        return serial in self._performing

    def answer(self, serial: int) -> Answer | None:
        return self._answers.get(serial)

    def begin(self, serial: int, task: asyncio.Task[None]) -> None:
        self._performing[serial] = task

    def end(self, serial: int, answer: Answer) -> None:
        self._performing.pop(serial, None)
        self._answers[serial] = answer

    def hold(self, serial: int, reservation: Reservation) -> None:
        """Credit was granted to request `serial`; `take_hold` or `withdraw` ends it."""
        self._reservations[serial] = reservation

    def take_hold(self, serial: int) -> Reservation | None:
        return self._reservations.pop(serial, None)

    def end_of(self, name: str, owner: str, channel: SharedChannel) -> SharedChannel:
        """The end of `channel` that is named for `owner`; made once."""
        end = self._users.get((name, owner))
        if end is None:
            end = self._users[name, owner] = channel.named(owner)
        return end

    def done(self, serials: Collection[int]) -> None:
        """The client has these answers."""
        for serial in serials:
            self._answers.pop(serial, None)

    def keep_only(self, wanted: Collection[int]) -> None:
        """After a gap in the connection: the client has every answer that it does not want any more."""
        self.done([serial for serial in self._answers if serial not in wanted])

    def withdraw(self, serial: int) -> None:
        """The client waits for this no longer: nothing stays taken or reserved for it."""
        task = self._performing.pop(serial, None)
        if task is not None:
            task.cancel()
        reservation = self._reservations.pop(serial, None)
        if reservation is not None:
            reservation.withdraw()
        answer = self._answers.pop(serial, None)
        if answer is not None and answer.taking is not None:
            answer.taking.restore()

    def withdraw_all(self) -> None:
        for serial in sorted({*self._performing, *self._reservations, *self._answers}, reverse=True):
            self.withdraw(serial)  # the last that was taken first, so that the front of a line is as it was

    def died(self) -> None:
        """The client is gone for good."""
        self.withdraw_all()
        for (_, owner), end in self._users.items():
            end.died(owner)

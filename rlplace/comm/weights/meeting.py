"""Where the members of a joint weight sync meet: all of them go on together, or none does and each knows why.

::

    each member    here ─▶ waits for the others ─▶ verdict: the first to speak decides, "go" or who is missing
    later          notes between members: what is lent, what has been taken, who has which version

Rounds are numbered by the pushes. A member's notes of the round before last are forgotten when it enters the next.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rlplace.comm.weights import refusals
from rlplace.errors import ChannelTimeout

_GO = "go"
_LEAST_S = 0.001


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeetingPoint:
    """The address of a `torch.distributed.TCPStore` that one of the members, or somebody who outlives them, serves."""

    host: str
    port: int

    def enter(self, timeout_s: float) -> Any:
        """A store of this member's own: a wait of one member blocks no other. Raises RuntimeError if nobody serves."""
        return dist.TCPStore(  # type: ignore[attr-defined]  # it is there, but not in the stubs
            self.host, self.port, is_master=False, timeout=timedelta(seconds=timeout_s)
        )


class Meeting:
    """One member's end; used by one thread."""

    def __init__(self, store: Any, me: str) -> None:
        self.me = me
        self.store = _below(store, "weights")
        self._round = -1
        self._notes: list[list[str]] = [[], [], []]  # keys of this round, the one before, the one before that

    # ── going on together ────────────────────────────────────────────────────────────────────────────────────────────

    def meet(self, round: int, word: str, members: Sequence[str], *, deadline_s: float) -> list[str]:
        """What all members said, in their order, once all are here.

        ChannelTimeout names who did not come; WeightSyncError says why another member did not go on. Then nobody does.
        """
        began = time.monotonic()
        self._enter(round)
        self.note(f"here/{self.me}", word.encode())
        keys = [self._key(f"here/{member}") for member in members]
        absent = "" if self._come(keys, deadline_s) else self._absent(members)
        verdict = self._decide(f"{absent} did not come" if absent else _GO)
        if absent and verdict != _GO:
            raise refusals.nobody_came(self.me, absent, time.monotonic() - began)
        if verdict != _GO:
            raise refusals.called_off(self.me, verdict)
        return [said.decode() for said in self.store.multi_get(keys)]

    def refuse(self, round: int, why: str) -> None:
        """Keeps the round from going on, unless it does already."""
        self._enter(round)
        self._decide(f"{self.me} {why}")
        self.note(f"here/{self.me}", b"")  # after the verdict: nobody needs to wait for us

    def group_store(self, round: int) -> Any:
        """For a process group that forms in this round."""
        return _below(self.store, f"group/{round}")

    def _decide(self, verdict: str) -> str:
        key = self._key("verdict")
        self._notes[0].append(key)
        found: bytes = self.store.compare_set(key, "", verdict)
        return found.decode()

    def _absent(self, members: Sequence[str]) -> str:
        return ", ".join(m for m in members if not self.store.check([self._key(f"here/{m}")]))

    # ── notes ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def note(self, about: str, what: bytes) -> None:
        key = self._key(about)
        self._notes[0].append(key)
        self.store.set(key, what)

    def read(self, about: str, source: str, *, deadline_s: float) -> bytes:
        """What `source` notes about it; ChannelTimeout names it."""
        began, key = time.monotonic(), self._key(about)
        if not self._come([key], deadline_s):
            raise self.late(source, about, began)
        found: bytes = self.store.get(key)
        return found

    def late(self, source: str, about: str, began: float) -> ChannelTimeout:
        return refusals.no_note(self.me, source, about, time.monotonic() - began)

    def has(self, member: str) -> int:
        """The last version a member said it has; -1 before."""
        key = f"has/{member}"
        return int(self.store.get(key)) if self.store.check([key]) else -1

    def say_has(self, version: int) -> None:
        self.store.set(f"has/{self.me}", str(version))

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _enter(self, round: int) -> None:
        if round != self._round:
            self._round = round
            for key in self._notes.pop():
                self.store.delete_key(key)
            self._notes.insert(0, [])

    def _key(self, about: str) -> str:
        return f"{self._round}/{about}"

    def _come(self, keys: list[str], deadline_s: float) -> bool:
        """Waits for all of them; False at the deadline."""
        left = timedelta(seconds=max(_LEAST_S, deadline_s - time.monotonic()))
        try:
            self.store.wait(keys, left)
        except dist.DistStoreError:
            return False
        return True


def _below(store: Any, prefix: str) -> Any:
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]  # it is there, but not in the stubs

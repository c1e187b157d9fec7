"""Where the members of a device sync agree to go on together, and leave notes for each other.

::

    each member    here ─▶ waits for the others ─▶ verdict: the first to write it decides, "go" or which are missing
    later          notes between members: what is shared, what has been taken, which version each has

Rounds are numbered by the pushes. A member's notes of the round before last are deleted when it enters the next.
The store has no password: what is read from it is parsed as text and numbers, and never unpickled.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rlplace.comm.weights.version import failed_sync
from rlplace.errors import ChannelTimeout

_GO = "go"
_LEAST_S = 0.001


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Address of a `torch.distributed.TCPStore` that a member, or a process that outlives them, serves."""

    host: str
    port: int

    def connect(self, timeout_s: float) -> Any:
        """Open a store of this member's own: a wait of one member blocks no other. RuntimeError if none listens."""
        return dist.TCPStore(  # type: ignore[attr-defined]  # it is there, but not in the stubs
            self.host, self.port, is_master=False, timeout=timedelta(seconds=timeout_s)
        )


class SyncRendezvous:
    """One member's end; used by one thread."""

    def __init__(self, store: Any, me: str) -> None:
        self.me = me
        self.store = _below(store, "weights")
        self._round = -1
        self._notes: list[list[str]] = [[], [], []]  # keys of this round, the one before, the one before that

    def join(self, round: int, word: str, members: Sequence[str], *, deadline_s: float) -> list[str]:
        """Return the words of all members, in their order, once all are here.

        Raises ChannelTimeout with the members that did not come, WeightSyncError with the reason of another member;
        then no member goes on.
        """
        began = time.monotonic()
        self._enter(round)
        self.note(f"here/{self.me}", word.encode())
        keys = [self._key(f"here/{member}") for member in members]
        absent = ""
        if not self._come(keys, deadline_s):
            absent = ", ".join(m for m in members if not self.store.check([self._key(f"here/{m}")]))
        verdict = self._decide(f"{absent} did not come" if absent else _GO)
        if absent and verdict != _GO:
            raise ChannelTimeout.about(
                "channel-timeout",
                "weights",
                f"{self.me} waited {time.monotonic() - began:.1f} s for {absent} to take part in the sync",
                why="device tensors go to all ranks at once, so no rank went on; the weights in use are unchanged",
                fix="find out why they stopped, or raise the deadline if they are really this slow",
            )
        if verdict != _GO:
            raise failed_sync("incomplete-weights", self.me, f"the sync did not take place: {verdict}")
        return [found.decode() for found in self.store.multi_get(keys)]

    def refuse(self, round: int, why: str) -> None:
        """Keep the round from going on, unless it does already."""
        self._enter(round)
        self._decide(f"{self.me} {why}")
        self.note(f"here/{self.me}", b"")  # after the verdict: no member needs to wait for this one

    def group_store(self, round: int) -> Any:
        """Return the store of a process group that forms in this round."""
        return _below(self.store, f"group/{round}")

    def note(self, about: str, what: bytes) -> None:
        key = self._key(about)
        self._notes[0].append(key)
        self.store.set(key, what)

    def read(self, about: str, source: str, *, deadline_s: float) -> bytes:
        """Wait for the note of `source`; ChannelTimeout names it."""
        began, key = time.monotonic(), self._key(about)
        if not self._come([key], deadline_s):
            what = f"{self.me} waited {time.monotonic() - began:.1f} s for {source}: {about}"
            why = f"{source} stopped or died in the middle of a sync; the weights in use are unchanged"
            raise ChannelTimeout.about("channel-timeout", "weights", what, why=why)
        found: bytes = self.store.get(key)
        return found

    def version_of(self, member: str) -> int:
        """Return the newest version that a member has; -1 before the first."""
        key = f"has/{member}"
        return int(self.store.get(key)) if self.store.check([key]) else -1

    def set_version(self, version: int) -> None:
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

    def _decide(self, verdict: str) -> str:
        key = self._key("verdict")
        self._notes[0].append(key)
        found: bytes = self.store.compare_set(key, "", verdict)
        return found.decode()

    def _come(self, keys: list[str], deadline_s: float) -> bool:
        """Wait for all of them; False at the deadline."""
        left = timedelta(seconds=max(_LEAST_S, deadline_s - time.monotonic()))
        try:
            self.store.wait(keys, left)
        except dist.DistStoreError:
            return False
        return True


def _below(store: Any, prefix: str) -> Any:
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]  # it is there, but not in the stubs

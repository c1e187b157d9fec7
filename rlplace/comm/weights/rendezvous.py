"""The store where the members of a sync between accelerators meet.

::

    each member    here ─▶ waits for the others ─▶ verdict: the first to write it decides, "go" or which are missing
    later          notes between members: what is shared, what has been taken, which version each has

It has no password: what is read from it is parsed as text, numbers and handles of CUDA, and never unpickled.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# Not in the public types of `torch.distributed`
from torch._C._distributed_c10d import (
    PrefixStore,
    Store,
    TCPStore,
)

from rlplace.codes import problem
from rlplace.comm.weights.version import failed_sync
from rlplace.errors import ChannelTimeout

_GO = "go"
_LEAST_S = 0.001


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Address of the TCPStore (torch's key-value server) at which all members of a sync meet.

    `prefix`: comes before each key, so that several syncs can meet at one store; "": there is only one sync.
    """

    host: str
    port: int
    prefix: str = ""

    def connect(self, timeout_s: float) -> Store:
        """Return a new connection to the store. A wait on it does not block other connections.

        Raise RuntimeError if no process listens within `timeout_s` seconds.
        """
        store = TCPStore(
            self.host, self.port, is_master=False, timeout=timedelta(seconds=timeout_s)
        )
        if self.prefix:
            return PrefixStore(self.prefix, store)
        return store


def serve_store(host: str, port: int, listen_fd: int, timeout_s: float) -> Store:
    """Return a new TCPStore in this process, which serves as long as the caller keeps it.

    `listen_fd`: the socket that already listens at `port` of `host`; the store owns it from now on. `timeout_s`: the
    deadline of this process's own waits.
    """
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )


class SyncRendezvous:
    """One member's end of the store at which the members of weight syncs meet. Used by one thread.

    `me`: name of the member, such as "actor rank 0".
    """

    def __init__(self, store: Store, me: str) -> None:
        self.me = me
        # Any: its type stubs do not accept bytes
        self.store: Any = PrefixStore("weights", store)
        self._round = -1
        # Keys of this round, the one before, the one before that
        self._notes: list[list[str]] = [
            [],
            [],
            [],
        ]

    def join(
        self, round: int, word: str, members: Sequence[str], *, deadline_s: float
    ) -> list[str]:
        """Wait until all `members` have joined sync number `round`; return the `word` of each member, in their order.

        `word`: a text from this member to all other members. `deadline_s`: time of the deadline by `time.monotonic()`.
        At the deadline, raise ChannelTimeout with the missing members. Raise WeightSyncError if another member has
        decided against the sync. If one member gets one of these errors, no member goes on with the sync.
        """
        began = time.monotonic()
        self._enter(round)
        self.note(f"here/{self.me}", word.encode())
        keys = [self._key(f"here/{member}") for member in members]
        absent = ""
        if not self._come(keys, deadline_s):
            absent = ", ".join(
                m for m in members if not self.store.check([self._key(f"here/{m}")])
            )
        verdict = self._decide(f"{absent} did not come" if absent else _GO)
        if absent and verdict != _GO:
            raise ChannelTimeout(
                problem(
                    "channel-timeout",
                    "weights",
                    error="absent",
                    owner=self.me,
                    waited_s=time.monotonic() - began,
                    absent=absent,
                )
            )
        if verdict != _GO:
            raise failed_sync("incomplete-weights", "refused", self.me, verdict=verdict)
        return [found.decode() for found in self.store.multi_get(keys)]

    def refuse(self, round: int, why: str, absent: Sequence[str]) -> None:
        """Decide that sync number `round` must not take place, unless its members have gone on already.

        `why`: the reason, for the other members. `absent`: members that will not join; the other members then do not
        wait for the absent members.
        """
        self._enter(round)
        verdict = f"{self.me} {why}"
        for member in absent if self._decide(verdict) == verdict else ():
            self.note(f"here/{member}", b"")

    def note(self, about: str, what: bytes) -> None:
        key = self._key(about)
        self._notes[0].append(key)
        self.store.set(key, what)

    def read(self, about: str, source: str, *, deadline_s: float) -> bytes:
        """Wait for the note `about` of the member `source`, and return its content.

        `deadline_s`: time of the deadline by `time.monotonic()`. At the deadline, raise ChannelTimeout with the name of
        the member.
        """
        began = time.monotonic()
        key = self._key(about)
        if not self._come([key], deadline_s):
            raise ChannelTimeout(
                problem(
                    "channel-timeout",
                    "weights",
                    error="step",
                    owner=self.me,
                    waited_s=time.monotonic() - began,
                    sender=source,
                    about=about,
                )
            )
        found: bytes = self.store.get(key)
        return found

    def version_of(self, member: str) -> int:
        """Return the newest version that a member has loaded, or -1 if it has loaded none."""
        key = f"has/{member}"
        if self.store.check([key]):
            return int(self.store.get(key))
        return -1

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
        """Wait until all keys are in the store; return False if the deadline passes before, else True."""
        left = timedelta(seconds=max(_LEAST_S, deadline_s - time.monotonic()))
        try:
            self.store.wait(keys, left)
        except dist.DistStoreError:
            return False
        return True

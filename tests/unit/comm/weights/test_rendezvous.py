"""Notes between the members of a sync; how they join is tested by whole syncs."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from rlplace.comm.weights.rendezvous import SyncRendezvous
from rlplace.errors import ChannelTimeout

MEMBERS = ("actor rank 0", "rollout rank 0", "rollout rank 1")


def members() -> list[SyncRendezvous]:
    store = dist.HashStore()  # type: ignore[attr-defined]  # it is there, but not in the stubs
    return [SyncRendezvous(store, member) for member in MEMBERS]


def test_a_note_that_does_not_come_names_its_source() -> None:
    actor, first, _ = members()
    actor.refuse(0, "")
    with pytest.raises(ChannelTimeout, match=r"actor rank 0 waited .* s for rollout rank 1: bucket 3 taken"):
        actor.read("bucket 3 taken", "rollout rank 1", deadline_s=0.0)
    first.refuse(0, "")
    first.note("bucket 3 taken", b"yes")
    assert actor.read("bucket 3 taken", "rollout rank 0", deadline_s=time.monotonic() + 60.0) == b"yes"


def test_notes_are_forgotten_two_rounds_later_and_versions_are_not() -> None:
    actor = members()[0]
    actor.set_version(7)
    for round in range(10):
        actor.refuse(round, "")
        actor.note("something", b"x" * 100)
    assert actor.store.num_keys() <= 3 * 3 + 1
    assert (actor.version_of("actor rank 0"), actor.version_of("rollout rank 0")) == (7, -1)

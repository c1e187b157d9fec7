"""The errors of a weight sync, in the house form: which rank, which version, and who lacks it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rlplace.errors import ChannelTimeout, Problem, WeightSyncError

_UNCHANGED = "the weights in use are unchanged"


def refused(code: str, reader: int | str, what: str, why: str | None = None) -> WeightSyncError:
    """`what` kept a rollout rank from taking a version."""
    why = f"{why}; {_UNCHANGED}" if why else _UNCHANGED
    return WeightSyncError(Problem(code=code, key=f"rollout rank {reader}", what=what, why=why))


def other_version(reader: int, arrived: int, asked: int) -> WeightSyncError:
    why = "the push is late or the driver's version is ahead" if arrived < asked else None
    what = f"version {arrived} arrived, version {asked} was asked for"
    return refused("version-mismatch", reader, what, why)


def not_here(reader: int, version: int, late: Sequence[int], lacking: Sequence[int]) -> WeightSyncError:
    if late:
        what = f"version {version} was not written by {ranks('actor', late)}"
    else:
        what = f"version {version} is no longer there: a later one has taken its place"
    return refused("incomplete-weights", reader, what, _without(version, lacking))


def damaged(reader: int, version: int, writer: int, lacking: Sequence[int]) -> WeightSyncError:
    what = f"what actor rank {writer} wrote of version {version} is damaged"
    return refused("checksum-mismatch", reader, what, _without(version, lacking))


def _without(version: int, lacking: Sequence[int]) -> str | None:
    return f"without version {version} now: {ranks('rollout', lacking)}" if lacking else None


def outdated(writer: int, version: int, newest: int) -> WeightSyncError:
    return WeightSyncError(
        Problem(
            code="version-mismatch",
            key=f"actor rank {writer}",
            what=f"version {version} was pushed after version {newest}",
            why="versions only go up: readers could not tell an old one from a late one",
        )
    )


def no_free_buffer(
    writer: int, version: int, began: float, holders: Iterable[tuple[Sequence[int], Sequence[int]]]
) -> ChannelTimeout:
    """`holders`: of each buffer, the actor ranks and the rollout ranks it waits for."""
    waited = [ranks(of, who) for pair in holders for of, who in zip(("actor", "rollout"), pair, strict=True) if who]
    return ChannelTimeout(
        Problem(
            code="channel-timeout",
            key=f"weights version {version}",
            what=f"actor rank {writer} waited {time.monotonic() - began:.1f} s for a free buffer",
            why=f"buffers are still in use by {'; '.join(waited)}",
            fix="find out why they stopped, or raise the deadline if they are really this slow",
        )
    )


def locked(path: Path, began: float) -> ChannelTimeout:
    return ChannelTimeout(
        Problem(
            code="channel-timeout",
            key=f"weights {path.name}",
            what=f"the board stayed locked for {time.monotonic() - began:.1f} s",
            why="another process of this node is making it, or was stopped while it held the lock",
        )
    )


def push_unfinished(version: int, timeout_s: float | None) -> ChannelTimeout:
    return ChannelTimeout(
        Problem(
            code="channel-timeout",
            key=f"weights version {version}",
            what=f"the push was not finished after {timeout_s} s",
            why="the rollout ranks have not taken what was pushed before",
        )
    )


def nobody_came(me: str, absent: str, waited_s: float) -> ChannelTimeout:
    return ChannelTimeout(
        Problem(
            code="channel-timeout",
            key="weights",
            what=f"{me} waited {waited_s:.1f} s for {absent} to take part in the sync",
            why=f"device tensors go to all ranks at once, so nobody went on; {_UNCHANGED}",
            fix="find out why they stopped, or raise the deadline if they are really this slow",
        )
    )


def no_note(me: str, source: str, about: str, waited_s: float) -> ChannelTimeout:
    return ChannelTimeout(
        Problem(
            code="channel-timeout",
            key="weights",
            what=f"{me} waited {waited_s:.1f} s for {source}: {about}",
            why=f"{source} stopped or died in the middle of a sync; {_UNCHANGED}",
        )
    )


def called_off(me: str, why: str) -> WeightSyncError:
    return WeightSyncError(
        Problem(code="incomplete-weights", key=me, what=f"the sync did not take place: {why}", why=_UNCHANGED)
    )


def broken_off(me: str, version: int, what: str, lacking: Sequence[int]) -> WeightSyncError:
    """A sync of device tensors that ended in the middle."""
    why = _without(version, lacking)
    return WeightSyncError(
        Problem(
            code="incomplete-weights",
            key=me,
            what=f"version {version} broke off: {what}",
            why=f"{why}; {_UNCHANGED}" if why else _UNCHANGED,
        )
    )


def ranks(component: str, numbers: Sequence[int]) -> str:
    """ "actor ranks 0, 3"."""
    return f"{component} rank{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}"

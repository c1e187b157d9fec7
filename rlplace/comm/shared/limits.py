"""The errors that only a channel in shared memory has: its tables are of fixed size, and its lock can be held."""

from __future__ import annotations

from rlplace.comm.channel import ChannelSpec
from rlplace.errors import ChannelError, ChannelMisuse, ChannelTimeout, Problem


def crowded(spec: ChannelSpec, owner: str, what: str) -> ChannelError:
    return ChannelError(
        Problem(
            code="channel-crowded",
            key=f"channel {spec.name}",
            what=f"no place for {owner}",
            why=f"it was made with places for {spec.participants} {what}, and all are taken",
            fix=f"ChannelSpec(..., participants={2 * spec.participants})",
        )
    )


def name_too_long(spec: ChannelSpec, owner: str, name: str, limit_bytes: int) -> ChannelMisuse:
    return ChannelMisuse(
        Problem(
            code="name-too-long",
            key=f"channel {spec.name}",
            what=f"{owner[:60]} used a name or key that is too long",
            got=repr(name if len(name) <= 60 else name[:60] + "…"),
            why=f"in shared memory it may have {limit_bytes} bytes",
            fix="a shorter one",
        )
    )


def held(spec: ChannelSpec, owner: str, waited_s: float, holder: str) -> ChannelTimeout:
    return ChannelTimeout(
        Problem(
            code="channel-timeout",
            key=f"channel {spec.name}",
            what=f"{owner} waited {waited_s:.1f} s for the channel itself",
            why=f"{holder} is in the middle of a change and does not go on: stopped, or the machine is overloaded",
            fix="let it go on or end it; a dead process holds up nobody",
        )
    )

"""Bytes of a replay memory on its host. The planner needs no NumPy for them."""

from __future__ import annotations

from rlplace.placement.memory.policies import (
    PolicySpaces,
    action_bytes,
    observation_bytes,
)

_REWARD = 4
_FLAGS = 2  # terminated, truncated
_PRIORITY = 8


def leaves_of(steps: int) -> int:
    """Return the number of leaves of a binary tree with at least `steps` leaves: the next power of 2."""
    return 1 << max(0, steps - 1).bit_length()


def step_bytes(spaces: PolicySpaces) -> int:
    """Return the bytes of one step: observation, action, reward, two flags, and the observation after it."""
    return (
        2 * observation_bytes(spaces) + action_bytes(spaces.actions) + _REWARD + _FLAGS
    )


def replay_bytes(spaces: PolicySpaces, steps: int, *, prioritised: bool) -> int:
    """Return the bytes of a memory of `steps` steps, with priorities if it is `prioritised`."""
    size = steps * step_bytes(spaces)
    if prioritised:
        size += 2 * _PRIORITY * leaves_of(steps)
    return size

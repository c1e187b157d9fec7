"""The errors of a worker that is asked for something it cannot do now, in the house form."""

from __future__ import annotations

from collections.abc import Mapping

from rlplace.errors import ChannelBroken, ChannelMisuse, DivergedError, NotResident, Problem
from rlplace.placement.schedule import Residency


def not_resident(owner: str, method: str, *, has: Residency, needs: Residency) -> NotResident:
    return NotResident(
        Problem(
            code="not-resident",
            key=owner,
            what=f"{method} was called while the worker is {has.word}",
            why=f"{method} needs residency {needs.word}; the schedule moves a component there on entry to its stage",
            fix=f"group.move(Residency.{needs.name}).wait() before group.{method}(...)",
        )
    )


def no_weights(owner: str, method: str) -> NotResident:
    return NotResident(
        Problem(
            code="no-weights",
            key=owner,
            what=f"{method} was called on weights that nobody loaded",
            why="offloading a rollout rank drops its weights, since the next sync brings all of them",
            fix="run the sync stage first: actor.push_weights(version) and rollout.pull_weights(version)",
        )
    )


def cancelled(owner: str, method: str) -> ChannelBroken:
    return ChannelBroken(
        Problem(
            code="cancelled", key=owner, what=f"{method} was cancelled", why="a sibling failed, or the run is ending"
        )
    )


def diverged(owner: str, numbers: Mapping[str, float], *, iteration: int) -> DivergedError:
    shown = ", ".join(f"{name} {value:g}" for name, value in numbers.items())
    return DivergedError(
        Problem(
            code="diverged",
            key=owner,
            what=f"the update of iteration {iteration} is not a finite number",
            got=shown,
            why="a reward or observation was not finite, or the policy left the range of its numbers",
            fix="actor.optimizer.lr=<smaller>, or look for nan in what the simulator returns",
        )
    )


def out_of_step(owner: str, what: str, *, got: str, expected: str) -> ChannelMisuse:
    """A message of another step, stage group or row than the one that was due."""
    return ChannelMisuse(
        Problem(
            code="out-of-step",
            key=owner,
            what=what,
            got=got,
            why=f"due was {expected}; nothing may be left from before",
        )
    )

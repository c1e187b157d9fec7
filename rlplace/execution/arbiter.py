"""The rule by which several runs use the same accelerators in turns. It has no clock, no process and no socket.

::

    run A   rollout on 0-3 ──▶ gives 0-3 back, asks for 4-7 ──▶ learn on 4-7 ──▶ gives 4-7 back, asks for 0-3
    run B   waits for 0-3 ──────────────────────────────────▶ rollout on 0-3 ──▶ gives 0-3 back, asks for 4-7

A run asks for all accelerators of its next stage at once, and gives the others back before. So a run that waits holds
nothing, and no two runs can wait for each other. Only a run that replaces lost workers asks for more and keeps what it
has; a second one that would have to wait for the first is refused.

Of several runs that wait for the same accelerators, the one with the highest priority goes first; among equal ones, the
one that has used the fewest accelerator-seconds for its weight (deficit of weighted fair shares). Accelerators for
which a run waits are given to no run behind it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of the accelerators that a run may have.

    `weight`: its accelerator-seconds are to those of another run as the two weights, if both want the same ones.
    `priority`: a run with a higher number always goes first.
    """

    weight: float = 1.0
    priority: int = 0


@dataclasses.dataclass(slots=True, kw_only=True)
class _Asked:
    """What a run waits for. `number`: rises with each request."""

    accelerators: frozenset[int]
    stage: str
    since_s: float
    number: int
    keeping: bool


@dataclasses.dataclass(slots=True, kw_only=True)
class _Run:
    """What the arbiter knows of a run.

    `holds`: accelerators that are leased to it, in `stage` since `since_s`. `used_s`: accelerator-seconds of leases
    that are over. `asked`: what it waits for; None: it does not wait.
    """

    share: Share
    holds: frozenset[int] = frozenset()
    stage: str = ""
    since_s: float = 0.0
    used_s: float = 0.0
    asked: _Asked | None = None


class Refused(Exception):
    """A request that cannot be granted. Its text is the reason."""


class Arbiter:
    """Leases accelerators to runs. Times are seconds of any clock that does not go back."""

    def __init__(self, shares: Mapping[str, Share]) -> None:
        """Lease nothing yet. `shares`: run -> its share."""
        self._runs = {name: _Run(share=share) for name, share in shares.items()}
        self._asked = 0

    def ask(
        self,
        run: str,
        accelerators: Collection[int],
        stage: str,
        now_s: float,
        *,
        keeping: bool = False,
    ) -> None:
        """Ask for all accelerators of a stage. `granted` returns the run when it has them.

        `keeping`: the run keeps what it holds while it waits, since its workers are in an unknown state; otherwise it
        gives everything back now. Raises Refused if two such runs would wait for each other.
        """
        asking = self._runs[run]
        wanted = frozenset(accelerators)
        if keeping:
            self._refuse_circle(run, wanted)
        else:
            self._give_back(asking, asking.holds, now_s)
        self._asked += 1
        asking.asked = _Asked(
            accelerators=wanted,
            stage=stage,
            since_s=now_s,
            number=self._asked,
            keeping=keeping,
        )

    def withdraw(self, run: str) -> None:
        """Forget what a run waits for. It keeps what it holds."""
        self._runs[run].asked = None

    def keep(self, run: str, accelerators: Collection[int], now_s: float) -> None:
        """Give back all accelerators of a run that are not among `accelerators`."""
        keeping = self._runs[run]
        self._give_back(keeping, keeping.holds - frozenset(accelerators), now_s)

    def leave(self, run: str, now_s: float) -> None:
        """Give back everything of a run that has ended. It waits for nothing any more."""
        leaving = self._runs[run]
        leaving.asked = None
        self._give_back(leaving, leaving.holds, now_s)

    def granted(self, now_s: float) -> list[str]:
        """Lease accelerators to the runs whose turn it is, and return these runs."""
        found: list[str] = []
        claimed: set[int] = set()
        for name in self._in_order(now_s):
            run = self._runs[name]
            asked = run.asked
            assert asked is not None, "only runs that wait are in the order"
            taken = claimed | self._held_by_others(name)
            if asked.accelerators.isdisjoint(taken):
                self._give_back(run, run.holds, now_s)
                run.holds = asked.accelerators
                run.stage = asked.stage
                run.since_s = now_s
                run.asked = None
                found.append(name)
            claimed |= asked.accelerators
        return found

    def waiting_s(self, run: str, now_s: float) -> float | None:
        """Return the seconds that a run has been waiting; None if it does not wait."""
        asked = self._runs[run].asked
        if asked is None:
            return None
        return now_s - asked.since_s

    def used_s(self, run: str, now_s: float) -> float:
        """Return the accelerator-seconds of a run: for each lease, its seconds times its accelerators."""
        found = self._runs[run]
        return found.used_s + len(found.holds) * (now_s - found.since_s)

    def holds(self, run: str) -> frozenset[int]:
        """Return the accelerators that are leased to a run."""
        return self._runs[run].holds

    def explain(self, run: str, now_s: float) -> str:
        """Return, in words, what a run waits for: the accelerators, and which run has them in which stage."""
        asked = self._runs[run].asked
        if asked is None:
            return f"{run} does not wait"
        reasons = []
        for name, other in self._runs.items():
            both = asked.accelerators & other.holds
            if name != run and both:
                seconds = now_s - other.since_s
                reasons.append(
                    f"{name} has {_listed(both)} in {other.stage} for {seconds:.0f} s"
                )
        if not reasons:
            reasons = ["another run goes first"]
        return (
            f"{run} waits for {_listed(asked.accelerators)} to enter {asked.stage}: "
            f"{', '.join(reasons)}"
        )

    def _in_order(self, now_s: float) -> list[str]:
        """Return the runs that wait, in the order of their turns. A run that keeps accelerators goes first."""

        def key(name: str) -> tuple[bool, int, float, int]:
            run = self._runs[name]
            assert run.asked is not None, "it waits"
            share = run.share
            used_s = self.used_s(name, now_s) / share.weight
            return not run.asked.keeping, -share.priority, used_s, run.asked.number

        return sorted((n for n, run in self._runs.items() if run.asked), key=key)

    def _held_by_others(self, name: str) -> frozenset[int]:
        held = [run.holds for other, run in self._runs.items() if other != name]
        return frozenset().union(*held)

    def _refuse_circle(self, name: str, wanted: frozenset[int]) -> None:
        """Raise Refused if another run keeps accelerators of `wanted`, and itself waits for some of the run `name`."""
        mine = self._runs[name].holds
        for other, run in self._runs.items():
            asked = run.asked
            if other == name or asked is None or not asked.keeping:
                continue
            if run.holds & wanted and asked.accelerators & mine:
                raise Refused(
                    f"{other} replaces lost workers too, and waits for accelerators of {name}"
                )

    @staticmethod
    def _give_back(run: _Run, accelerators: frozenset[int], now_s: float) -> None:
        run.used_s += len(run.holds) * (now_s - run.since_s)
        run.since_s = now_s
        run.holds -= accelerators


def _listed(accelerators: Collection[int]) -> str:
    return "accelerators " + ", ".join(map(str, sorted(accelerators)))

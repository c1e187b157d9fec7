"""Signs that a run learns nothing: some metrics have told values for several iterations in a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from rlplace.codes import problem
from rlplace.errors import Problem

Name = Literal[
    "all-cut",
    "most-cut",
    "most-refused",
    "equal-groups",
    "no-gradient",
    "narrow-actions",
    "kl-stops",
]
# Iterations in a row with a sign before it is told
IN_A_ROW = 2
# Actions within this part of their bounds hardly differ for a simulator
_NARROW = 0.01


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A sign that nothing is learned.

    `name`: which one; the texts of the code `learns-nothing` have the same names. `key`: key of the config to change.
    `metric`: the metric that shows the sign. `holds`: takes the metrics of an iteration that has this metric, and
    returns whether they have the sign. `from_start`: whether the sign counts only from the first iteration of a run on.
    """

    name: Name
    key: str
    metric: str
    holds: Callable[[Mapping[str, float]], bool]
    from_start: bool = False


# Causes come before their effects: of several signs in an iteration, only the first is told
SIGNS: Sequence[Sign] = (
    Sign(
        name="narrow-actions",
        key="env.wrappers",
        metric="env/action_range",
        holds=lambda numbers: numbers["env/action_range"] < _NARROW,
        from_start=True,
    ),
    Sign(
        name="kl-stops",
        key="algorithm.target_kl",
        metric="actor/kl_stop",
        holds=lambda numbers: (
            numbers["actor/kl_stop"] > 0.0
            and numbers.get("actor/optimizer_steps", 0.0) <= 1.0
        ),
    ),
    Sign(
        name="all-cut",
        key="algorithm.max_new_tokens",
        metric="actor/truncated_share",
        holds=lambda numbers: (
            numbers["actor/truncated_share"] >= 1.0
            and numbers.get("actor/groups_with_signal", 0.0) == 0.0
        ),
    ),
    Sign(
        name="most-cut",
        key="algorithm.max_new_tokens",
        metric="env/cut_answers",
        holds=lambda numbers: numbers["env/cut_answers"] > 0.5,
    ),
    Sign(
        name="most-refused",
        key="env.max_turns",
        metric="env/refused_agents",
        holds=lambda numbers: numbers["env/refused_agents"] > 0.5,
    ),
    Sign(
        name="equal-groups",
        key="env.rewards",
        metric="actor/groups_with_signal",
        holds=lambda numbers: numbers["actor/groups_with_signal"] == 0.0,
    ),
    Sign(
        name="no-gradient",
        key="algorithm",
        metric="actor/grad_norm",
        holds=lambda numbers: numbers["actor/grad_norm"] == 0.0,
    ),
)


class LearningWatch:
    """Looks at the metrics of each iteration, and warns once of each sign that nothing is learned.

    `warnings`: the warnings so far, as in summary.json.
    """

    def __init__(self, names: Sequence[Name]) -> None:
        """Prepare a watch for a new run. `names`: the signs that can be seen in the run's metrics."""
        self._signs = [sign for sign in SIGNS if sign.name in names]
        # Sign -> number of iterations in a row that have it
        self._rows: dict[Name, int] = dict.fromkeys(names, 0)
        self._told: set[Name] = set()
        self.warnings: list[dict[str, object]] = []

    def restore(self, warnings: Sequence[Mapping[str, object]]) -> None:
        """Take over the warnings of earlier commands of a resumed run, so that none is told a second time."""
        self.warnings = [dict(warning) for warning in warnings]
        told = {str(warning["sign"]) for warning in warnings}
        self._told = {sign.name for sign in self._signs if sign.name in told}

    def add(self, numbers: Mapping[str, float], iteration: int) -> Problem | None:
        """Add an iteration, and return the warning that is due; None if there is none.

        `numbers`: metrics of the iteration. `iteration`: counted from 1, over all commands of a resumed run.
        """
        due: Sign | None = None
        for sign in self._signs:
            if sign.metric not in numbers:
                continue
            if not sign.holds(numbers):
                self._rows[sign.name] = 0
                continue
            self._rows[sign.name] += 1
            rows = self._rows[sign.name]
            enough = rows == iteration if sign.from_start else True
            if due is None and enough and rows >= IN_A_ROW:
                due = sign
        if due is None or due.name in self._told:
            return None
        self._told.add(due.name)
        warning = problem(
            "learns-nothing",
            due.key,
            f"{due.metric}: {numbers[due.metric]:.6g}",
            error=due.name,
            rows=self._rows[due.name],
            share=f"{100 * _NARROW:g} %",
        )
        entry = {"iteration": iteration, "sign": due.name, "text": warning.what}
        self.warnings.append({**entry, "why": warning.why, "fix": warning.fix})
        return warning

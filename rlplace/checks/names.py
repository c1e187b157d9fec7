"""Rules for names of components outside of their placement."""

from __future__ import annotations

from collections.abc import Iterator

from rlplace.checks.rule import Found, Rule
from rlplace.config.yaml_text import show
from rlplace.errors import did_you_mean
from rlplace.placement.plan import Placed


def _unknown_residents(case: Placed) -> Iterator[Found]:
    """Yield a finding for each name in `cluster.allow_resident` that is not a component. `case`: the placement of the
    job, with its cluster.
    """
    names = case.cluster.allow_resident
    components = case.components
    # Column of the name in the list as it is shown
    start = len("[")
    for name in names:
        if name not in components:
            near = did_you_mean(name, components)
            error = "resident"
            fixed = ""
            if near:
                error = "misspelt-resident"
                fixed = show([near if n == name else n for n in names])
            yield Found(
                key="cluster.allow_resident",
                got="[" + ", ".join(names) + "]",
                error=error,
                span=(start, start + len(name)),
                facts={
                    "name": name,
                    "near": near,
                    "fixed": fixed,
                    "components": ", ".join(components),
                },
            )
        start += len(name) + len(", ")


RULES = (Rule(code="unknown-component", facts=_unknown_residents),)

"""The places where a component has parallel sizes although its ranks have nothing to divide."""

from __future__ import annotations

from collections.abc import Iterator

from rlplace.checks.rule import Found, Rule
from rlplace.placement.language.spec import ComponentSpec
from rlplace.placement.plan import Plan


def undivided(spec: ComponentSpec, error: str) -> Iterator[Found]:
    """Yield a finding for each parallel size above 1 of a component whose ranks have nothing to divide.

    `error`: name of one of the error texts of the code `parallel-sizes`; the text says why there is nothing to divide.
    """
    sizes = {
        "tensor_parallel_size": spec.parallel.tensor_parallel_size,
        "context_parallel_size": spec.parallel.context_parallel_size,
    }
    for size_key, size in sizes.items():
        if size > 1:
            yield Found(
                key=spec.key,
                got=f"{size_key}: {size}",
                error=error,
                facts={"size_key": size_key},
            )


def _divided_policies(plan: Plan) -> Iterator[Found]:
    """Yield a finding for each component with a parallel size above 1. A policy cannot be divided between ranks."""
    for component in plan.placement.components:
        spec = plan.placement.spec(component)
        yield from undivided(spec, error="whole-policies")


# Rules of jobs with policies of simulators
WHOLE_POLICIES: tuple[Rule[Plan], ...] = (
    Rule(code="parallel-sizes", facts=_divided_policies),
)

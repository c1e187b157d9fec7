"""The places where a component has parallel sizes although its ranks have nothing to divide."""

from __future__ import annotations

from collections.abc import Iterator

from rlplace.checks.rule import Found
from rlplace.placement.language.spec import ComponentSpec


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

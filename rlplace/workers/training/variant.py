"""Make the user's own formulas on a rank that trains."""

from __future__ import annotations

from rlplace.algo.variants import Variant
from rlplace.config.schema import AlgorithmConfig
from rlplace.envs.registry import named


def variant_of(algorithm: AlgorithmConfig) -> Variant | None:
    """Make `Class(algorithm, **kwargs)` of `algorithm.variant`; None where it names none."""
    own = algorithm.variant
    if own.name is None:
        return None
    make = named(
        own.name,
        {},
        key="algorithm.variant.name",
        code="unknown-variant",
        noun="variant of an algorithm",
    )
    return Variant(own.name, make(algorithm, **own.kwargs))

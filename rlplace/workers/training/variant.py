"""Create the user's custom variant of an algorithm on a training rank."""

from __future__ import annotations

from rlplace.algo.variants import Variant
from rlplace.config.blocks.training import AlgorithmConfig
from rlplace.envs.registry import named


def variant_of(algorithm: AlgorithmConfig) -> Variant | None:
    """Return the user's variant of the algorithm, an object of the class that `algorithm.variant` names.

    The class is called with `(algorithm, **kwargs)`. Return None if the config names no variant.
    """
    custom = algorithm.variant
    if custom.name is None:
        return None
    make = named(
        custom.name,
        {},
        key="algorithm.variant.name",
        code="unknown-variant",
        noun="variant of an algorithm",
    )
    return Variant(custom.name, make(algorithm, **custom.kwargs))

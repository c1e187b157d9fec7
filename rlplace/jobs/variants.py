"""The check of an algorithm's variant, which both jobs take."""

from __future__ import annotations

from rlplace.config.schema import Config
from rlplace.envs.registry import check_named
from rlplace.errors import Problem

_METHODS = ("advantages", "policy_loss", "value_loss", "metrics")


def check_variant(config: Config) -> list[Problem]:
    """Return the problems of a custom variant of the algorithm: it cannot be imported, or overrides no method."""
    variant = config.algorithm.variant
    if variant.name is None:
        return []
    return check_named(
        variant.name,
        variant.kwargs,
        given=("the algorithm's config",),
        key="algorithm.variant.name",
        code="unknown-variant",
        noun="variant of an algorithm",
        methods=_METHODS,
    )

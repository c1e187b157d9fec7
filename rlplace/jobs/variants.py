"""The check of a custom variant of the algorithm. The simulator job and the language-model job use it."""

from __future__ import annotations

from rlplace.config.schema import Config
from rlplace.envs.registry import check_named
from rlplace.errors import Problem

_METHODS = ("advantages", "policy_loss", "value_loss", "metrics")


def check_variant(config: Config) -> list[Problem]:
    """Return the problems of the custom class `algorithm.variant` in the config; empty if the config names none.

    Problems: the variant cannot be imported, or it does not override any of the methods that a variant may override.
    """
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

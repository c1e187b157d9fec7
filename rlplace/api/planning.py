"""`rlplace.plan(config, overrides)`: the plan of a job, without starting anything."""

from __future__ import annotations

from rlplace.api.callables import Config, Overrides
from rlplace.api.words import composed_of
from rlplace.runtime.prepare import Prepared, prepare_composed


def plan(config: Config, overrides: Overrides = ()) -> Prepared:
    """Return the prepared job of a config: its plan, its memory proof, and data for displaying both.

    `config`: name of a shipped config or task, path of a YAML file, or a mapping. `overrides`: `key=value`
    words, or a mapping key -> value.
    Raises ConfigError, PlacementError or ClusterError with all problems.
    """
    return prepare_composed(composed_of(config, overrides))

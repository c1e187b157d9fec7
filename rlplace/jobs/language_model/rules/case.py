"""The arguments of rules of the job on language models: a config with its placement, or with its plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from rlplace.checks.placed import PlacedJob
from rlplace.config.blocks.language_model import LanguageModelJobConfig
from rlplace.placement.language.spec import ComponentSpec
from rlplace.placement.plan import Plan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlacedTextJob(PlacedJob):
    """A config of a job on language models with its placement, as rules of placements take them."""

    config: LanguageModelJobConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """A config and its plan: the argument of most rules of language-model jobs."""

    config: LanguageModelJobConfig
    plan: Plan

    @property
    def specs(self) -> Iterator[ComponentSpec]:
        """Yield the placement of each component."""
        placement = self.plan.placement
        for component in placement.components:
            yield placement.spec(component)

    @property
    def model(self) -> Mapping[str, object]:
        """The config.json of the actor's model as keys and values; empty without a model."""
        return self.config.model or {}

"""The argument of most rules of the job on language models: a config with its plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from rlplace.config.schema import Config
from rlplace.placement.language.spec import ComponentSpec
from rlplace.placement.plan import Plan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """A config and its plan: the argument of most rules of language-model jobs."""

    config: Config
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

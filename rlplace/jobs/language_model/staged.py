"""What jobs on language models share whose stages are declared, such as fine-tuning and the training API.

Their plan follows from the stages. Their seconds are predicted from whole calls that were measured.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

from rlplace.checks import machines
from rlplace.checks.rule import Rule, broken
from rlplace.config.blocks.language_model import LanguageModelJobConfig
from rlplace.contract.stages import needs_of_stages
from rlplace.errors import PlacementError, Problem, Source
from rlplace.jobs.language_model.job import LanguageModelJob
from rlplace.jobs.language_model.rules.case import PlacedTextJob
from rlplace.placement.channels import ChannelPlan
from rlplace.placement.flow import Delivery
from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.machines.topology import Topology
from rlplace.placement.plan import Placed, Plan, Rules, plan_components
from rlplace.placement.schedule import Needs
from rlplace.workers.worker import Worker


class StagedTextJob(LanguageModelJob, abc.ABC):
    """Base of jobs on language models with declared stages.

    `config_rules`: on the config, before components are placed. `placed_rules`, `placed_warnings`: on the placement.
    """

    config_rules: ClassVar[Sequence[Rule[LanguageModelJobConfig]]]
    placed_rules: ClassVar[Sequence[Rule[PlacedTextJob]]]
    placed_warnings: ClassVar[Sequence[Rule[PlacedTextJob]]]

    @abc.abstractmethod
    def planned_channels(
        self, config: LanguageModelJobConfig, placement: HybridComponentPlacement
    ) -> Iterable[ChannelPlan]:
        """Return the channels between the placed components."""

    def planned_deliveries(
        self, config: LanguageModelJobConfig, placement: HybridComponentPlacement
    ) -> tuple[Delivery, ...]:
        """Return the syncs of weights between the placed components. By default, there is none."""
        return ()

    def needs(self, config: LanguageModelJobConfig) -> Needs:
        return needs_of_stages(self.stages)

    def plan(
        self,
        config: LanguageModelJobConfig,
        topology: Topology,
        sources: Mapping[str, Source],
    ) -> Plan:
        unfit = list(broken(self.config_rules, config))
        if unfit:
            raise PlacementError(unfit)

        def check(placed: Placed) -> Iterator[Problem]:
            return broken(self.placed_rules, PlacedTextJob.of(config, placed))

        def wasted(placed: Placed) -> Iterator[Problem]:
            yield from broken(self.placed_warnings, PlacedTextJob.of(config, placed))
            yield from broken(machines.WARNINGS, placed.cluster)

        plan = plan_components(
            config.cluster,
            topology,
            needs=self.needs(config),
            offload=[c for c in self.components if config.block_of(c).enable_offload],
            sources=sources,
            rules=Rules(optional=(), check=check, waste=wasted),
        )
        return dataclasses.replace(
            plan,
            channels=tuple(self.planned_channels(config, plan.placement)),
            deliveries=self.planned_deliveries(config, plan.placement),
        )

    def performance_model(self) -> None:
        return None

    def workers(
        self, config: LanguageModelJobConfig, plan_: Plan
    ) -> Mapping[str, type[Worker]]:
        return self.components

"""Methods that both shipped jobs share, such as reading their config and choosing the transport of weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlplace.config.read import try_config
from rlplace.config.schema import Config
from rlplace.contract.job import Job
from rlplace.errors import Problem, Source
from rlplace.jobs.notes import learning_rate_notes
from rlplace.placement.plan import Plan
from rlplace.trained import where
from rlplace.workers.facts import JobFacts


class TrainedJob(Job):
    """A job whose config has the block `actor`, with a model that is trained and sent to rollout."""

    def read(
        self, mapping: Mapping[str, Any], sources: Mapping[str, Source]
    ) -> tuple[Config | None, list[Problem]]:
        return try_config(mapping, sources)

    def key_of(self, config: Config, component: str) -> str:
        return config.key_of(component)

    def facts(self, config: Config, plan_: Plan) -> JobFacts:
        placement = plan_.placement
        return JobFacts(
            ranks={c: placement.world_size(c) for c in placement.components}
        )

    def through_host(self, config: Config, plan_: Plan) -> list[str]:
        if config.actor.sync.through_host == "auto":
            return ["actor.sync.through_host"]
        return []

    def resume_notes(
        self,
        config: Any,
        differences: Mapping[str, tuple[object, object]],
        iteration: int,
    ) -> list[str]:
        return learning_rate_notes(config, differences, iteration)

    def last_line(self, run: Path) -> str:
        return where(run)

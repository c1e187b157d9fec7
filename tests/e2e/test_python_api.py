"""The engine without the command line: the example of docs/python.md, and a sync that is equal to the bit."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from rlplace.config import compose
from rlplace.placement import Plan
from rlplace.placement.schedule import Residency
from rlplace.runtime.prepare import prepare_composed
from rlplace.runtime.run import job_spec, launch
from rlplace.workers.launch.cluster import Cluster
from rlplace.workers.launch.group import wait_all
from tests.e2e.training import SMALL, placed

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


@pytest.mark.ray
def test_the_example_prints_what_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    example, printed = re.findall(
        r"```(?:python|text)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S
    )[:2]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(example, "python.md", "exec"), {"__name__": "__main__"})
    assert out.getvalue() == printed


@pytest.mark.ray
def test_after_a_sync_every_rollout_rank_has_the_actor_s_bits() -> None:
    (composed,) = compose.with_hydra(
        ["--config-name", "hybrid_ppo", *SMALL, *placed("0-1", "0", "1-2")]
    )
    job = prepare_composed(composed)
    config, plan = job.config, job.plan
    assert isinstance(plan, Plan)
    spec = job_spec(config, plan)
    with Cluster.from_config(
        config.cluster, plan.topology, workers=spec.workers.values()
    ) as cluster:
        groups = launch(cluster, spec)
        actor, rollout = groups["actor"], groups["rollout"]
        seen = []
        for version in range(2):
            wait_all(
                [actor.move(Residency.WEIGHTS), rollout.move(Residency.WEIGHTS)], 60.0
            )
            wait_all([actor.push_weights(version), rollout.pull_weights(version)], 60.0)
            (digest,) = set(actor.digest().wait(60.0)) | set(
                rollout.digest().wait(60.0)
            )
            seen.append(digest)
            actor.move(Residency.OFF).wait(60.0)
            wait_all(
                [groups["env"].move(Residency.FULL), rollout.move(Residency.FULL)], 60.0
            )
            wait_all([groups["env"].run(version), rollout.generate(version)], 60.0)
            wait_all(
                [groups["env"].move(Residency.OFF), rollout.move(Residency.OFF)], 60.0
            )
            actor.move(Residency.FULL).wait(60.0)
            actor.learn(version, version).wait(60.0)
        assert seen[0] != seen[1]  # it learned

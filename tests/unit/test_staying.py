"""Which workers stay when the placement changes: whole components that do not move, as far as this is sound."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from rlplace.placement.schedule import Residency
from rlplace.runtime.launched import JobSpec, job_spec
from rlplace.runtime.prepare import Prepared
from rlplace.runtime.staying import highest_residency, staying
from rlplace.workers.roles.actor import PolicyActor
from tests.unit.test_changes import change, job


def specs(places: str, **blocks: Mapping[str, object]) -> tuple[JobSpec, JobSpec]:
    """Return the jobs before and after a change. `places`: those of the change."""
    before = job(change(5, places), **blocks)
    after: Prepared = before.changes[0].job
    return job_spec(before.config, before.plan), job_spec(after.config, after.plan)


@pytest.mark.parametrize(
    ("places", "stay"),
    [
        ("env: 0-7", ("actor", "rollout")),
        ("env: 4-7", ("actor", "rollout")),
        ("rollout: 0-3", ("actor", "env")),
        ("actor: 0-3", ("env", "rollout")),
        # As many ranks, on other accelerators
        ("actor: 0-3, env: 0-1, rollout: 4-5", ()),
    ],
)
def test_components_that_do_not_move_stay(places: str, stay: tuple[str, ...]) -> None:
    assert staying(*specs(places)) == stay


class Own(PolicyActor):
    """A class of the user, which may keep anything from its set-up."""


def test_workers_of_an_own_class_are_replaced() -> None:
    before, after = (
        dataclasses.replace(each, workers={**each.workers, "actor": Own})
        for each in specs("env: 0-7")
    )
    assert staying(before, after) == ("rollout",)


def test_workers_with_other_settings_are_replaced() -> None:
    before, after = specs("env: 0-7")
    arguments = after.arguments["actor"]
    runner = dataclasses.replace(arguments.config.runner, seed=12345)
    config = dataclasses.replace(arguments.config, runner=runner)
    other = dataclasses.replace(arguments, config=config)
    after = dataclasses.replace(after, arguments={**after.arguments, "actor": other})
    assert staying(before, after) == ("rollout",)


def test_what_stays_leaves_the_accelerators_of_what_starts() -> None:
    before, after = specs("env: 0-1")
    stay = ("actor", "rollout")
    # The first stage sends weights to rollout, which shares no accelerator with env
    assert highest_residency(before.plan, after.plan, stay) == {
        "actor": Residency.OFF,
        "rollout": Residency.WEIGHTS,
    }
    before, after = specs("env: 4-7")
    assert highest_residency(before.plan, after.plan, stay) == {
        "actor": Residency.OFF,
        "rollout": Residency.OFF,
    }

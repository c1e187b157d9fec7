"""Continue after machines of a run were lost: wait for other machines, or plan for the remaining machines.

::

    NodeLost ─▶ is there a checkpoint? ─▶ faults.on_node_loss
        wait      wait at most faults.node_wait_s for machines for the same plan ───────────────────────────┬─▶ resume
        replan    if machines for the same plan are missing: plan with a cluster block without the lost     │
                  nodes, and check memory and launch as at the start of any run ────────────────────────────┘
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlplace.checkpoints.find import find
from rlplace.errors import (
    ClusterError,
    ConfigError,
    NodeLost,
    PlacementError,
    ProblemsError,
    RlplaceError,
)
from rlplace.execution.faults import History
from rlplace.placement.language.without_nodes import AGAIN, placed_again, without_nodes
from rlplace.runtime.prepare import Prepared, check_launch, prepare
from rlplace.runtime.resume import Resumed, resumed
from rlplace.workers.launch.machines import await_machines


def go_on(
    job: Prepared,
    lost: NodeLost,
    history: History,
    *,
    tell: Callable[[str], None],
    since: RlplaceError | None = None,
) -> tuple[Prepared, Resumed]:
    """Return the job with which to continue after the loss of nodes, and the checkpoint from which to continue.

    `lost`: the error about the lost nodes. `history`: faults of the run. `tell`: called with lines of text for the
    user. `since`: the error of an attempt with new workers after the loss; None: no attempt was made. Raises `lost` if
    the config or the remaining machines do not allow the run to continue.
    """
    faults = job.config.faults
    if faults.on_node_loss == "fail":
        raise lost
    if not history.admits(faults.restarts):
        raise lost.noted(
            f"after {faults.restarts} recoveries within an hour; faults.restarts: {faults.restarts}"
        )
    try:
        # Check that a checkpoint exists before minutes of waiting.
        find(str(lost.folder), Path())
        tell(str(since or lost))
        same = _resuming(job, lost)
        job = (
            _waited(same, tell)
            if faults.on_node_loss == "wait"
            else _replanned(same, lost)
        )
        found = resumed(job)
    except (ProblemsError, ClusterError) as refused:
        raise lost.noted(
            f"faults.on_node_loss: {faults.on_node_loss} cannot go on\n{refused}"
        ) from refused
    assert found is not None, (
        "resume names a checkpoint, or the folder of a run with one"
    )
    tell(found.text)
    return job, found


def _resuming(job: Prepared, lost: NodeLost) -> Prepared:
    """Return the job with `resume` set to the folder of the run that has lost nodes."""
    folder = str(lost.folder.absolute())
    config = dataclasses.replace(job.config, resume=folder)
    return dataclasses.replace(
        job, config=config, mapping={**job.mapping, "resume": folder}
    )


def _await(job: Prepared, wait_s: float) -> None:
    placement = job.plan.placement
    slots = [
        slot
        for component in placement.components
        for slot in placement.slots(component)
    ]
    await_machines(job.config.cluster.ray, slots, job.plan.topology, wait_s)


def _waited(job: Prepared, tell: Callable[[str], None]) -> Prepared:
    wait_s = job.config.faults.node_wait_s
    tell(f"waiting up to {wait_s:g} s for machines in place of those that were lost")
    _await(job, wait_s)
    return job


def _replanned(job: Prepared, lost: NodeLost) -> Prepared:
    """Return the job, planned for the remaining machines if its present plan no longer fits the machines.

    Raises ProblemsError if no plan for the remaining machines can be run.
    """
    try:
        _await(job, 0.0)
    except (ClusterError, PlacementError):
        placement = job.plan.placement
        refused: ProblemsError | None = None
        for again in AGAIN if placed_again(placement, lost.nodes) else AGAIN[:1]:
            cluster = without_nodes(
                job.mapping["cluster"], placement, lost.nodes, again
            )
            try:
                return _planned(job, {**job.mapping, "cluster": cluster})
            except ProblemsError as error:
                refused = refused or error
        assert refused is not None, "each way was refused"
        raise refused from None
    return job


def _planned(job: Prepared, mapping: Mapping[str, Any]) -> Prepared:
    """Return a job prepared from the config `mapping`, after a check that the job can be launched.

    `job`: the job before; its config differs from `mapping` only in the cluster block. Raises ProblemsError.
    """
    sources = {
        key: source
        for key, source in job.sources.items()
        if not key.startswith("cluster")
    }
    new = prepare(mapping, name=job.view.name, sources=sources)
    if lacking := new.not_run or check_launch(new.config, new.plan, sources):
        raise ConfigError(lacking)
    if new.refused:
        raise PlacementError(new.view.shortages)
    return new

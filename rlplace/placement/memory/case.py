"""Build the memory case of a job from the demands of its components."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rlplace.config.schema import Config
from rlplace.errors import ProblemsError
from rlplace.placement.memory.demands import Demand, ScoringDemand, TrainingDemand
from rlplace.placement.memory.ledger import Measurements, MemoryCase, SharedMemory
from rlplace.placement.memory.policy_demands import PolicyTrainingDemand

if TYPE_CHECKING:
    from rlplace.placement.machines.topology import Topology
    from rlplace.placement.plan import Plan

_NO_COPIES = "the hosts have no room for copies of checkpoints: the next iteration waits until one is written"
_SAVED = (TrainingDemand, ScoringDemand, PolicyTrainingDemand)

_Config = TypeVar("_Config", bound=Config)
# Plans a job with another config and returns its memory case; None for a plan that cannot run.
Replan = Callable[[_Config, "Topology"], MemoryCase | None]


def case_of(
    plan: Plan,
    config: _Config,
    demands: Mapping[str, Demand],
    notes: Sequence[str],
    shared: SharedMemory,
    batches: Mapping[str, int],
    replan: Replan[_Config],
    measured: Measurements | None,
) -> MemoryCase:
    """Return the memory case of a plan, in which hosts hold copies for checkpoints if they have room for them.

    `demands`: component -> what it needs. `notes`: what is not counted, in words. `shared`: what the run takes of each
    node's shared memory. `batches`: component -> number that its micro-batch must divide. `replan`: plans the job with
    another config, to try remedies. `measured`: bytes that an earlier run measured; None: no earlier run.
    """
    case = MemoryCase(
        placement=plan.placement,
        needs=plan.needs,
        offload=plan.offload,
        blocks={c: config.key_of(c) for c in plan.placement.components},
        demands=demands,
        measured=measured or {},
        notes=tuple(notes),
        shared=shared,
        batches=batches,
        reserve=config.memory.reserve,
        job=lambda lines: _with_lines(config, plan.topology, lines, replan),
    )
    return _without_copies(case)


def _without_copies(case: MemoryCase) -> MemoryCase:
    """Return `case` itself if all hosts have room; otherwise a case without copies for checkpoints on the hosts.

    With such a copy, a checkpoint is written while the stages go on.
    """
    saved = {
        c: d for c, d in case.demands.items() if isinstance(d, _SAVED) and d.copied
    }
    if not saved or all(account.fits for account in case.ledger().hosts):
        return case
    demands = {
        c: dataclasses.replace(demand, copied=False) for c, demand in saved.items()
    }
    notes = (*case.notes, _NO_COPIES)
    return dataclasses.replace(
        case, demands={**case.demands, **demands}, notes=notes, copies_checkpoints=False
    )


def _with_lines(
    config: _Config,
    topology: Topology,
    lines: Mapping[str, object],
    replan: Replan[_Config],
) -> MemoryCase | None:
    """Return the memory case of a job with other config values; None if a check rejects the new plan.

    `lines`: key path -> value. `replan`: plans the job with another config.
    """
    for path, value in lines.items():
        config = replaced(config, path.split("."), value)
    try:
        return replan(config, topology)
    except ProblemsError:
        return None


def replaced(block: Any, path: Sequence[str], value: object) -> Any:
    """Return a copy of a config, or of a block of it, in which the key at `path` has a new value.

    `path`: the keys from the outermost to the innermost block.
    """
    name = path[0]
    below = path[1:]
    # Names of components and rewards may contain dots, so the rest of the path may be one key.
    if isinstance(block, Mapping):
        rest = ".".join(path)
        name, below = (name, below) if name in block and below else (rest, ())
        return {**block, name: replaced(block[name], below, value) if below else value}
    return dataclasses.replace(
        block,
        **{name: replaced(getattr(block, name), below, value) if below else value},
    )


def shares_memory(plan: Plan, config: Config) -> bool:
    """Return whether the workers are processes, which need shared memory for their channels; threads do not."""
    return bool(plan.channels) and config.cluster.launcher != "inline"

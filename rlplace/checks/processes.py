"""Rules for the processes of a job that comes with rlplace: ranks on one GPU, ranks as threads of one process."""

from __future__ import annotations

from collections.abc import Iterator

from rlplace.checks.placed import PlacedJob
from rlplace.checks.rule import Found, Rule, at_key, at_line
from rlplace.placement.language.spec import role_of


def _joined(case: PlacedJob) -> list[str]:
    """Return the components of the job whose ranks form a process group of torch.distributed."""
    found = []
    for component in case.placement.components:
        role = role_of(component)
        of_models = role in ("actor", "critic", "reference", "teacher")
        if of_models or (
            role == "reward" and case.config.block_of(component).kind == "model"
        ):
            found.append(component)
    return found


def _ranks_on_one_gpu(case: PlacedJob) -> Iterator[Found]:
    """Yield a finding for each component with a process group in which several ranks share a GPU.

    NCCL allows only one rank of a group on a GPU.
    """
    placement = case.placement
    nodes = placement.topology.nodes
    for component in _joined(case):
        places = placement.locations(component)
        # First GPU of each rank; ranks without accelerators have -1
        gpus = [
            first
            for node, first in zip(places.node, places.first, strict=True)
            if nodes[node].kind == "cuda" and first >= 0
        ]
        if len(set(gpus)) == len(gpus):
            continue
        yield at_line(
            placement.spec(component),
            component=component,
            most=max(map(gpus.count, set(gpus))),
            accelerators=placement.accelerators(component),
        )


def _threads_of_one_process(case: PlacedJob) -> bool:
    return case.config.runs and case.config.cluster.launcher == "inline"


def _ranks_as_threads(case: PlacedJob) -> Iterator[Found]:
    """Yield one finding if, in a job whose ranks are threads of one process, a process group has several ranks."""
    crowded = {c: case.ranks(c) for c in _joined(case) if case.ranks(c) > 1}
    if not crowded:
        return
    groups = [f"{component} ({ranks} ranks)" for component, ranks in crowded.items()]
    yield at_key(
        "cluster.launcher",
        case.config.cluster.launcher,
        groups=" and ".join(groups),
        first=next(iter(crowded)),
    )


RULES = (
    Rule(code="ranks-share-gpu", facts=_ranks_on_one_gpu),
    Rule(
        code="inline-needs-one-rank",
        applies=_threads_of_one_process,
        facts=_ranks_as_threads,
    ),
)

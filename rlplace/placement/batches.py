"""Batch sizes of a job that samples answers to prompts: nothing is dropped, and every rank gets the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from rlplace.errors import Problem, Source
from rlplace.placement.hybrid import HybridComponentPlacement
from rlplace.placement.written import source_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """Numbers of one iteration. `path` is the config block they stand in."""

    prompts: int
    samples_per_prompt: int = 1
    train_batch: int  # samples of one optimizer step, over all ranks
    micro_batch: int = 1  # samples of one forward pass of one copy
    path: str = "algorithm"

    @property
    def samples(self) -> int:
        return self.prompts * self.samples_per_prompt


def check_batches(
    sizes: BatchSizes, placement: HybridComponentPlacement, sources: Mapping[str, Source]
) -> list[Problem]:
    """Samples over engines, optimizer steps over samples, micro-batches over the actor's copies."""
    problems: list[Problem] = []
    if "rollout" in placement.components:
        engines = placement.spec("rollout").num_copies
        if sizes.samples % engines:
            per = sizes.samples_per_prompt
            what = f"{sizes.samples} samples do not divide over {engines} engines"
            why = f"{sizes.prompts} prompts x {per} samples each; every engine gets equally many"
            problems.append(_uneven(sizes, "prompts", what, why, _next(sizes.prompts, engines, per), sources))
    if sizes.samples % sizes.train_batch:
        what = f"{sizes.samples} samples are no whole number of batches of {sizes.train_batch}"
        why = f"an iteration has {sizes.samples} samples, and none is dropped"
        below = next(n for n in range(min(sizes.train_batch, sizes.samples), 0, -1) if sizes.samples % n == 0)
        problems.append(_uneven(sizes, "train_batch", what, why, below, sources))
    for component in ("actor", "critic"):
        if component not in placement.components:
            continue
        copies = placement.spec(component).num_copies
        step = copies * sizes.micro_batch
        if sizes.train_batch % step:
            what = f"{sizes.train_batch} samples do not divide over {copies} {component} copies x {sizes.micro_batch}"
            why = f"each of {copies} copies takes equally many, in passes of micro_batch {sizes.micro_batch}"
            fix = -(-sizes.train_batch // step) * step
            problems.append(_uneven(sizes, "train_batch", what, why, fix, sources))
    return problems


def _next(prompts: int, engines: int, per: int) -> int:
    return next(n for n in range(prompts, prompts + engines + 1) if n * per % engines == 0)


def _uneven(sizes: BatchSizes, field: str, what: str, why: str, fix: int, sources: Mapping[str, Source]) -> Problem:
    key = f"{sizes.path}.{field}"
    return Problem(
        code="uneven-batches",
        key=key,
        what=what,
        got=f"{field}: {getattr(sizes, field)}",
        source=source_of(key, sources),
        why=why,
        fix=f"{field}: {fix}",
    )

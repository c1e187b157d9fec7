"""Batch sizes of a job that samples answers to prompts: nothing is dropped, and every rank gets the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from math import lcm

from rlplace.errors import Problem, Source, source_of
from rlplace.placement.language.hybrid import HybridComponentPlacement


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
    """Samples over engines, optimizer steps over samples, micro-batches over copies that learn.

    Every fix is the nearest with which all of these hold.
    """
    problems: list[Problem] = []
    batch, per = sizes.train_batch, sizes.samples_per_prompt
    learning = {c: placement.spec(c).num_copies for c in ("actor", "critic") if c in placement.components}
    engines = placement.spec("rollout").num_copies if "rollout" in placement.components else 1
    legal, prompts = _nearest(sizes, lcm(*(copies * sizes.micro_batch for copies in learning.values())), engines)
    if sizes.samples % engines:
        what = f"{sizes.samples} samples do not divide over {engines} engines"
        why = f"{sizes.prompts} prompts x {per} sample{'s' * (per > 1)} each; every engine gets equally many"
        problems.append(_uneven(sizes, "prompts", what, why, f"prompts: {prompts}", sources))
    fix = f"train_batch: {legal}" + (f", and prompts: {prompts}" if prompts != sizes.prompts else "")
    if sizes.samples % batch:
        what = f"{sizes.samples} samples are no whole number of batches of {batch}"
        why = f"an iteration has {sizes.samples} samples, and none is dropped"
        problems.append(_uneven(sizes, "train_batch", what, why, fix, sources))
    for component, copies in learning.items():
        if batch % (copies * sizes.micro_batch):
            what = f"{batch} samples do not divide over {copies} {component} copies x {sizes.micro_batch}"
            why = f"each of {copies} copies takes equally many, in passes of micro_batch {sizes.micro_batch}"
            problems.append(_uneven(sizes, "train_batch", what, why, fix, sources))
    return problems


def _nearest(sizes: BatchSizes, step: int, engines: int) -> tuple[int, int]:
    """A batch in multiples of `step`, one that divides the samples if there is any, and prompts that go with it."""
    whole = [n for n in range(step, sizes.samples + 1, step) if sizes.samples % n == 0]
    more = -(-sizes.train_batch // step) * step
    batch = min(whole, key=lambda n: (abs(n - sizes.train_batch), n), default=more)
    return batch, _next(sizes.prompts, lcm(engines, batch), sizes.samples_per_prompt)


def _next(prompts: int, whole: int, per: int) -> int:
    """The first from `prompts` on whose samples are a multiple of `whole`."""
    return next(n for n in range(prompts, prompts + whole + 1) if n * per % whole == 0)


def _uneven(sizes: BatchSizes, field: str, what: str, why: str, fix: str, sources: Mapping[str, Source]) -> Problem:
    key = f"{sizes.path}.{field}"
    return Problem(
        code="uneven-batches",
        key=key,
        what=what,
        got=f"{field}: {getattr(sizes, field)}",
        source=source_of(key, sources),
        why=why,
        fix=fix,
    )

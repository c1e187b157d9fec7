"""Rules for the numbers of prompts and samples.

PLANNED checks the batch sizes of a job that is planned but not run. RUN checks that every rank of a job that runs gets
a prompt or a sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from math import gcd, isqrt, lcm

from rlplace.checks.rule import Found, Rule, at_key
from rlplace.jobs.language_model.rules.case import PlacedTextJob
from rlplace.units import counted

_PROMPTS = "algorithm.prompts"
_TRAIN_BATCH = "algorithm.train_batch"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Batches:
    """The batch sizes of an iteration, and the nearest valid values of prompts and batch.

    `prompts`, `samples`: prompts and samples of an iteration. `batch`: samples of an optimizer step. `engines`: count
    of engines. `micro_batch`: samples of one pass. `copies`: trained component -> number of its data-parallel copies.
    `nearest_prompts`, `nearest_batch`: values with which all rules about batches hold.
    """

    prompts: int
    samples: int
    batch: int
    engines: int
    copies: Mapping[str, int]
    micro_batch: int
    nearest_prompts: int
    nearest_batch: int


def _has_prompts(case: PlacedTextJob) -> bool:
    return case.config.algorithm.prompts is not None


def _batches(case: PlacedTextJob) -> _Batches:
    """Return the batch sizes of a job. The config has to set `algorithm.prompts`."""
    algorithm = case.config.algorithm
    placement = case.placement
    prompts = algorithm.prompts or 0
    each = algorithm.samples_per_prompt
    micro = case.config.actor.micro_batch
    samples = prompts * each
    batch = algorithm.train_batch or samples
    copies: dict[str, int] = {}
    for component in ("actor", "critic"):
        if component in placement.components:
            copies[component] = placement.spec(component).data_parallel
    engines = 1
    if "rollout" in placement.components:
        engines = placement.spec("rollout").num_copies
    # A batch is a whole number of passes of each copy.
    step = lcm(*(number * micro for number in copies.values()))
    nearest = _nearest_batch(samples, batch, step)
    # Smallest number of prompts whose samples are whole batches, and equally many for each engine
    unit = lcm(engines, nearest)
    whole = unit // gcd(unit, each)
    return _Batches(
        prompts=prompts,
        samples=samples,
        batch=batch,
        engines=engines,
        copies=copies,
        micro_batch=micro,
        nearest_prompts=-(-prompts // whole) * whole,
        nearest_batch=nearest,
    )


def _nearest_batch(samples: int, batch: int, step: int) -> int:
    """Return the multiple of `step` that divides `samples` and is nearest to `batch`.

    If `samples` is not a multiple of `step`, return the smallest multiple of `step` that is at least `batch`.
    """
    steps, rest = divmod(samples, step)
    if rest:
        return -(-batch // step) * step
    low = [n for n in range(1, isqrt(steps) + 1) if steps % n == 0]
    whole = [step * n for divisor in low for n in (divisor, steps // divisor)]
    return min(whole, key=lambda n: (abs(n - batch), n))


def _uneven_engines(case: PlacedTextJob) -> Iterator[Found]:
    """Yield a finding if the samples of an iteration cannot be divided evenly over the engines."""
    sizes = _batches(case)
    if sizes.samples % sizes.engines:
        yield at_key(
            _PROMPTS,
            sizes.prompts,
            "engines",
            samples=sizes.samples,
            engines=sizes.engines,
            prompts=sizes.prompts,
            each=counted(case.config.algorithm.samples_per_prompt, "sample"),
            nearest=sizes.nearest_prompts,
        )


def _cut_batches(case: PlacedTextJob) -> Iterator[Found]:
    """Yield a finding if the number of samples of an iteration is not a multiple of the batch size."""
    sizes = _batches(case)
    if sizes.samples % sizes.batch == 0:
        return
    error = "batches"
    if sizes.nearest_prompts != sizes.prompts:
        error = "batches-and-prompts"
    yield at_key(
        _TRAIN_BATCH,
        sizes.batch,
        error,
        samples=sizes.samples,
        batch=sizes.batch,
        nearest=sizes.nearest_batch,
        prompts=sizes.nearest_prompts,
    )


def _uneven_copies(case: PlacedTextJob) -> Iterator[Found]:
    """Yield a finding for each trained component whose copies cannot share a batch in whole micro-batches.

    The batch size has to be a multiple of the data-parallel copies times the micro-batch size.
    """
    sizes = _batches(case)
    error = "copies"
    if sizes.nearest_prompts != sizes.prompts:
        error = "copies-and-prompts"
    for component, copies in sizes.copies.items():
        if sizes.batch % (copies * sizes.micro_batch):
            yield at_key(
                _TRAIN_BATCH,
                sizes.batch,
                error,
                batch=sizes.batch,
                copies=copies,
                component=component,
                micro=sizes.micro_batch,
                nearest=sizes.nearest_batch,
                prompts=sizes.nearest_prompts,
            )


PLANNED = (
    Rule(code="uneven-batches", applies=_has_prompts, facts=_uneven_engines),
    Rule(code="uneven-batches", applies=_has_prompts, facts=_cut_batches),
    Rule(code="uneven-batches", applies=_has_prompts, facts=_uneven_copies),
)


def _env_without_prompts(case: PlacedTextJob) -> Iterator[Found]:
    """Yield a finding if there are more env ranks than prompts, so that a rank would have no prompt."""
    yield from _without_items(case, "env", "prompt", 1)


def _actor_without_samples(case: PlacedTextJob) -> Iterator[Found]:
    """Yield a finding if the actor has more data-parallel copies than an iteration has samples."""
    each = case.config.algorithm.samples_per_prompt
    yield from _without_items(case, "actor", "sample", each)


def _without_items(
    case: PlacedTextJob, component: str, item: str, each: int
) -> Iterator[Found]:
    """Yield a finding if a component has more data-parallel copies than an iteration has prompts or samples (items).

    `item`: the word for an item, "prompt" or "sample". `each`: number of items for one prompt.
    """
    ranks = case.ranks(component)
    if not ranks:
        return
    prompts = case.config.algorithm.prompts or 0
    # Ranks of one copy hold the same samples: they split tensors or tokens between them.
    together = case.placement.spec(component).parallel.ranks
    takers = ranks // together
    if takers <= prompts * each:
        return
    error = "items"
    if together > 1:
        error = "items-of-groups"
    yield at_key(
        _PROMPTS,
        prompts,
        error,
        component=component,
        takers=takers,
        together=together,
        item=item,
        least=-(-takers // each),
    )


RUN = (
    Rule(code="rank-without-rows", facts=_env_without_prompts),
    Rule(code="rank-without-rows", facts=_actor_without_samples),
)

"""Rules for the numbers of prompts and samples.

Samples need not divide over engines, ranks or optimizer steps: an engine takes samples while it has room, and the
samples of a step are packed by their tokens. But every rank has to get a prompt or a sample, in a job that runs as in
one that is only planned.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlplace.checks.rule import Found, Rule, at_key
from rlplace.jobs.language_model.rules.case import PlacedTextJob

_PROMPTS = "algorithm.prompts"


def _has_prompts(case: PlacedTextJob) -> bool:
    return case.config.algorithm.prompts is not None


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


RULES = (
    Rule(code="rank-without-rows", applies=_has_prompts, facts=_env_without_prompts),
    Rule(code="rank-without-rows", applies=_has_prompts, facts=_actor_without_samples),
)

"""The numbers of a language-model job, the reason for each, and their ratio."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from math import gcd
from typing import TYPE_CHECKING

from rlplace.config.schema import FrozenConfig, TrainedConfig
from rlplace.placement.checks import PARTNERS
from rlplace.placement.language.spec import role_of

if TYPE_CHECKING:
    from rlplace.config.schema import Config
    from rlplace.placement.language.hybrid import HybridComponentPlacement

_SHARED = {0: "nothing", 1: "the optimizer", 2: "optimizer and gradients", 3: "optimizer, gradients and weights"}


@dataclasses.dataclass(frozen=True, slots=True)
class Count:
    """One number of a plan, of a component or of an iteration, and what it follows from."""

    subject: str
    count: str
    why: str


def explain_counts(config: Config, placement: HybridComponentPlacement) -> tuple[Count, ...]:
    """In the order in which they follow from each other; none for a job with simulators."""
    if config.kind == "mlp":
        return ()
    return (*_engines(placement), *_ranks(config, placement), *_ratio(placement), *_samples(config, placement))


def _engines(placement: HybridComponentPlacement) -> Iterator[Count]:
    spec, used = placement.spec("rollout"), placement.accelerators("rollout")
    if not used:
        return
    each, engines = spec.accelerators_per_copy, spec.num_copies
    actor = placement.accelerators("actor")
    if used == actor:
        why = "all of the actor's: none of them idles while engines generate"
    elif shared := placement.shared("actor", "rollout"):
        own = len(used) - len(shared)
        why = f"{len(shared)} of the actor's {len(actor)}" + (f", and {own} of their own" if own else "")
    else:
        why = "of their own, none of the actor's"
    text = f"{engines} engine{'s' * (engines != 1)} x {each} = {len(used)} accelerators"
    yield Count("rollout", text, why)


def _ranks(config: Config, placement: HybridComponentPlacement) -> Iterator[Count]:
    """How much of its state a rank holds, of what all ranks of a component share."""
    for component in placement.components:
        copies = placement.spec(component).num_copies
        text = f"{placement.world_size(component)} ranks"
        match config.block_of(component):
            case TrainedConfig(zero_stage=stage) if copies > 1:
                why = f"each holds 1/{copies} of {_SHARED[stage]} (zero_stage: {stage})"
                yield Count(component, text, why)
            case FrozenConfig(sharded=sharded) if copies > 1 and placement.accelerators(component):
                why = f"each holds 1/{copies} of the weights" if sharded else "each holds all weights (sharded: false)"
                yield Count(component, text, why)


def _ratio(placement: HybridComponentPlacement) -> Iterator[Count]:
    names = [c for c in ("rollout", "actor", "critic") if c in placement.components and placement.accelerators(c)]
    sizes = [len(placement.accelerators(c)) for c in names]
    unit = gcd(*sizes)
    partners = [(c, PARTNERS.get(role_of(c), "")) for c in placement.components]
    pairs = [f"{c} with {other}" for c, other in partners if other in names and placement.shared(c, other)]
    ratio = " : ".join(str(size // unit) for size in sizes)
    yield Count(" : ".join(names), ratio, "; ".join(["in accelerators", *pairs]))


def _samples(config: Config, placement: HybridComponentPlacement) -> Iterator[Count]:
    algorithm = config.algorithm
    if algorithm.prompts is None:
        return
    samples = algorithm.prompts * algorithm.samples_per_prompt
    batch, actors = algorithm.train_batch or samples, placement.spec("actor").num_copies
    engines = placement.spec("rollout").num_copies
    why = f"{algorithm.prompts} prompts x {algorithm.samples_per_prompt}; {_each(samples, engines)} for each engine"
    yield Count("samples", f"{samples} in an iteration", why)
    steps = -(-samples // batch) * algorithm.epochs
    why = f"{samples} samples in batches of {batch}, {_each(batch, actors)} for each rank of the actor"
    yield Count("steps", f"{steps} of the optimizer", why)


def _each(items: int, takers: int) -> str:
    return str(items // takers) if items % takers == 0 else f"about {items / takers:.3g}"

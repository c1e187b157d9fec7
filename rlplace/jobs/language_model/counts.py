"""The numbers that the plan of a job on language models shows, with their reasons."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from rlplace.checks.partners import PARTNERS
from rlplace.config.blocks.language_model import FrozenConfig, LanguageModelJobConfig
from rlplace.config.blocks.training import TrainedConfig
from rlplace.placement.counts import Count
from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.language.spec import role_of
from rlplace.units import counted

_SHARED = {
    0: "nothing",
    1: "the optimizer",
    2: "optimizer and gradients",
    3: "optimizer, gradients and weights",
}


def explain_counts(
    config: LanguageModelJobConfig, placement: HybridComponentPlacement
) -> tuple[Count, ...]:
    """Return the main numbers of a job on language models, each with its reason.

    These are the counts of engines, ranks, samples and steps, and the ratio of accelerators. The order is such that
    each number follows from the numbers before it.
    """
    return (
        *_engines(placement),
        *_ranks(config, placement),
        *_ratio(placement),
        *_samples(config, placement),
    )


def _engines(placement: HybridComponentPlacement) -> Iterator[Count]:
    if "rollout" not in placement.components:
        return
    spec = placement.spec("rollout")
    used = placement.accelerators("rollout")
    if not used:
        return
    each = spec.accelerators_per_copy
    engines = spec.num_copies
    actor = placement.accelerators("actor")
    if used == actor:
        why = "all of the actor's: none of them idles while engines generate"
    elif shared := placement.shared("actor", "rollout"):
        own = len(used) - len(shared)
        why = f"{len(shared)} of the actor's {len(actor)}" + (
            f", and {own} of their own" if own else ""
        )
    else:
        why = "of their own, none of the actor's"
    text = f"{counted(engines, 'engine')} x {each} = {len(used)} accelerators"
    yield Count("rollout", text, why)


def _ranks(
    config: LanguageModelJobConfig, placement: HybridComponentPlacement
) -> Iterator[Count]:
    """Yield, for each model on several accelerators, its number of ranks and the share of its state on each rank."""
    for component in placement.components:
        spec = placement.spec(component)
        # Tensor-parallel ranks split one copy of the model.
        cut = spec.parallel.tensor_parallel_size
        parts = spec.num_copies * cut
        text = f"{placement.world_size(component)} ranks"
        match config.block_of(component):
            case TrainedConfig(zero_stage=stage) if parts > 1:
                why = f"each holds 1/{parts} of {_SHARED[stage]} (zero_stage: {stage})"
                yield Count(component, text, why)
            case FrozenConfig(sharded=sharded) if parts > 1 and placement.accelerators(
                component
            ):
                whole = "all weights" if cut == 1 else f"1/{cut} of the weights"
                why = (
                    f"each holds 1/{parts} of the weights"
                    if sharded
                    else f"each holds {whole} (sharded: false)"
                )
                yield Count(component, text, why)


def _ratio(placement: HybridComponentPlacement) -> Iterator[Count]:
    names = [
        c
        for c in ("rollout", "actor", "critic")
        if c in placement.components and placement.accelerators(c)
    ]
    sizes = [len(placement.accelerators(c)) for c in names]
    unit = gcd(*sizes)
    partners = [(c, PARTNERS.get(role_of(c), "")) for c in placement.components]
    pairs = [
        f"{c} with {other}"
        for c, other in partners
        if other in names and placement.shared(c, other)
    ]
    ratio = " : ".join(str(size // unit) for size in sizes)
    yield Count(" : ".join(names), ratio, "; ".join(["in accelerators", *pairs]))


def _samples(
    config: LanguageModelJobConfig, placement: HybridComponentPlacement
) -> Iterator[Count]:
    algorithm = config.algorithm
    if algorithm.prompts is None:
        return
    samples = algorithm.prompts * algorithm.samples_per_prompt
    batch = algorithm.train_batch or samples
    actor = placement.spec("actor")
    # Ranks that process the same samples together.
    together = actor.parallel.ranks
    takers = "each rank" if together == 1 else f"every {together} ranks"
    why = f"{algorithm.prompts} prompts x {algorithm.samples_per_prompt}"
    if "rollout" in placement.components:
        engines = placement.spec("rollout").num_copies
        why += f"; {_each(samples, engines)} for each engine"
    yield Count("samples", f"{samples} in an iteration", why)
    steps = -(-samples // batch) * algorithm.epochs
    why = f"{samples} samples in batches of {batch}, {_each(batch, actor.data_parallel)} for {takers} of the actor"
    yield Count("steps", f"{steps} of the optimizer", why)


def _each(items: int, takers: int) -> str:
    if items % takers == 0:
        return str(items // takers)
    return f"about {items / takers:.3g}"

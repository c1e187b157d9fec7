"""The numbers of a plan: sizes of a job on language models with their reasons, and accelerators saved by sharing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from math import gcd
from typing import TYPE_CHECKING

from rlplace.config.blocks.language_model import FrozenConfig
from rlplace.config.blocks.training import TrainedConfig
from rlplace.placement.language.groups import NodeGroups
from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.language.spec import ComponentSpec, Segment, role_of
from rlplace.placement.machines.pools import WHOLE_CLUSTER
from rlplace.placement.machines.topology import Node, Ranges, Topology
from rlplace.placement.schedule import Needs, Residency
from rlplace.units import counted

if TYPE_CHECKING:
    from rlplace.config.schema import Config

# Role -> the role whose ranks hold the rows that it scores.
PARTNERS = {
    "reference": "actor",
    "reward": "critic",
}

_SHARED = {
    0: "nothing",
    1: "the optimizer",
    2: "optimizer and gradients",
    3: "optimizer, gradients and weights",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Count:
    """One number of a plan: what is counted (`subject`), the number as text (`count`), and its reason (`why`)."""

    subject: str
    count: str
    why: str


def explain_counts(
    config: Config, placement: HybridComponentPlacement
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


def _ranks(config: Config, placement: HybridComponentPlacement) -> Iterator[Count]:
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


def _samples(config: Config, placement: HybridComponentPlacement) -> Iterator[Count]:
    algorithm = config.algorithm
    if algorithm.prompts is None:
        return
    samples = algorithm.prompts * algorithm.samples_per_prompt
    batch = algorithm.train_batch or samples
    actor = placement.spec("actor")
    # Ranks that process the same samples together.
    together = actor.parallel.ranks
    takers = "each rank" if together == 1 else f"every {together} ranks"
    engines = placement.spec("rollout").num_copies
    why = f"{algorithm.prompts} prompts x {algorithm.samples_per_prompt}; {_each(samples, engines)} for each engine"
    yield Count("samples", f"{samples} in an iteration", why)
    steps = -(-samples // batch) * algorithm.epochs
    why = f"{samples} samples in batches of {batch}, {_each(batch, actor.data_parallel)} for {takers} of the actor"
    yield Count("steps", f"{steps} of the optimizer", why)


def _each(items: int, takers: int) -> str:
    if items % takers == 0:
        return str(items // takers)
    return f"about {items / takers:.3g}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """The numbers of accelerators that a placement uses, and that it would use if no component shared accelerators.

    `by_component`: component -> number of accelerators that it uses. `used`: number of accelerators that any component
    uses.
    """

    by_component: Mapping[str, int]  # component -> accelerators that it uses
    used: int

    @property
    def dedicated(self) -> int:
        return sum(self.by_component.values())

    @property
    def saved(self) -> int:
        return self.dedicated - self.used

    @property
    def sizes(self) -> str:
        return " + ".join(
            f"{component} {size}"
            for component, size in self.by_component.items()
            if size
        )

    @property
    def text(self) -> str:
        one = self.used == 1
        return f"{self.used} accelerator{'' if one else 's'} {'does' if one else 'do'} the work of {self.dedicated}"

    def __str__(self) -> str:
        return f"{self.used} accelerators instead of {self.dedicated} ({self.sizes})"


def count_active(placement: HybridComponentPlacement, needs: Needs) -> dict[str, int]:
    """Return stage -> number of accelerators on which at least one component works in that stage.

    A component works in a stage if `needs` gives it a residency above off there.
    """
    at_work = {}
    for stage in needs.stages:
        needed = [c for c in placement.components if needs.of(stage, c) > Residency.OFF]
        at_work[stage] = len(
            Ranges.of(
                piece for c in needed for piece in placement.accelerators(c).pieces
            )
        )
    return at_work


def dedicate(placement: HybridComponentPlacement) -> HybridComponentPlacement | None:
    """Return a placement in which no accelerator is shared; each component has as many ranks and accelerators as now.

    Return None if no component has accelerators. Components without accelerators are left out. The segments (groups of
    ranks) of a component are placed next to each other, node after node, so that each rank stays on one node. The new
    placement has as many nodes as that takes.
    """
    here = placement.topology
    nodes: list[Node] = []
    # Accelerators in use on the last node. Earlier nodes are not filled further.
    taken = 0
    moved: dict[str, list[Segment]] = {}
    for component in placement.components:
        for segment in placement.spec(component).segments:
            for like, part in here.parts(segment.accelerators):
                size = len(part)
                # On a node with mixed accelerators, a segment keeps its local numbers, so that it stays on the same
                # hardware.
                local = part.start - like.first if like.runs else taken
                fits = local >= taken and local + size <= like.accelerators
                if not nodes or not fits or _kind(nodes[-1]) != _kind(like):
                    first = nodes[-1].numbers.stop if nodes else 0
                    nodes.append(
                        dataclasses.replace(like, rank=len(nodes), first=first)
                    )
                    local = part.start - like.first if like.runs else 0
                taken = local + size
                begin = nodes[-1].first + local
                ranks = segment.cut_to(part).ranks
                moved.setdefault(component, []).append(
                    Segment(accelerators=range(begin, begin + size), ranks=ranks)
                )
    if not moved:
        return None
    groups = NodeGroups(Topology(tuple(nodes), "as needed"))
    specs = {
        c: ComponentSpec(
            name=c,
            pool=groups[WHOLE_CLUSTER],
            written=tuple(found),
            parallel=placement.spec(c).parallel,
        )
        for c, found in moved.items()
    }
    return HybridComponentPlacement.of(specs, groups)


def _kind(node: Node) -> Node:
    return dataclasses.replace(node, rank=0, first=0)

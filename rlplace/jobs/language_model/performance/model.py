"""The performance model of the language-model job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from rlplace.config.blocks.language_model import (
    FrozenConfig,
    LanguageModelJobConfig,
    RewardConfig,
)
from rlplace.config.blocks.training import TrainedConfig
from rlplace.config.model_folder import text_keys
from rlplace.foresight.costs import Costs
from rlplace.foresight.known import PUBLISHED
from rlplace.foresight.loads import Mode, Size, Stages
from rlplace.foresight.model import (
    PerformanceModel,
    StageBound,
    counted_iterations,
)
from rlplace.foresight.profile import Profile
from rlplace.foresight.ranks import Rank, Site
from rlplace.foresight.space import Space
from rlplace.jobs.language_model.performance.generation import PAIR, Generation
from rlplace.jobs.language_model.performance.learners import (
    CriticRank,
    LmActorRank,
    ScorerRank,
)
from rlplace.jobs.language_model.performance.loads import TextStages
from rlplace.jobs.language_model.performance.published import published_profile
from rlplace.jobs.language_model.performance.ranks import (
    TextEnvRank,
    TextRolloutRank,
    TextSite,
)
from rlplace.placement.language.spec import role_of
from rlplace.placement.memory.ledger import MemoryCase
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import FROZEN
from rlplace.report.calls import RankCall
from rlplace.units import counted
from rlplace.workers.arguments import SCORERS

STALENESS = "algorithm.max_staleness"
_AHEAD = (0, 1, 2)
_TIMES = (1, 2, 4)  # factors by which a search makes a token budget smaller or larger
_SLICES = (1, 2, 4, 8)  # accelerators of an engine that a search tries
# Rank classes by role
_RANKS: Mapping[str, type[Rank]] = {
    "actor": LmActorRank,
    "critic": CriticRank,
    "env": TextEnvRank,
    "reference": ScorerRank,
    "reward": ScorerRank,
    "rollout": TextRolloutRank,
    "teacher": ScorerRank,
}


class LanguageModelPerformance(PerformanceModel):
    """The performance model of GRPO, PPO and related algorithms on language models.

    Engines generate, scorers score whole groups, and learners pack samples by tokens.
    """

    generating = PAIR

    # ── what a run measures ──────────────────────────────────────────────────────────────────────────────────────────

    def subject(self, config: LanguageModelJobConfig, component: str) -> str:
        if component == "env":
            rewards = ", ".join(map(str, config.env.rewards))
            return f"{config.env.task}, {rewards}"
        block = config.actor if component == "rollout" else config.block_of(component)
        model = getattr(block, "model", None)
        if isinstance(model, Mapping):
            sizes = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
            return " ".join(str(model.get(size, "?")) for size in sizes)
        return type(block).__name__

    def rest_size(self, plan: Plan, call: RankCall) -> float:
        if call.name == "learn":
            return plan.placement.world_size(call.slot.component)
        return 0.0

    # ── how ranks spend seconds ──────────────────────────────────────────────────────────────────────────────────────

    def can_predict(self, config: LanguageModelJobConfig) -> bool:
        return not config.missing

    def ranks(
        self, config: LanguageModelJobConfig, plan: Plan
    ) -> Mapping[str, type[Rank]]:
        return {c: _RANKS[role_of(c)] for c in plan.placement.components}

    def site(
        self, config: LanguageModelJobConfig, plan: Plan, costs: Costs, cores: int
    ) -> Site:
        return TextSite(config, plan, costs, cores)

    def kinds_of_iterations(self, config: LanguageModelJobConfig) -> int:
        return 1 + config.algorithm.short_rounds

    def published_profile(
        self, config: LanguageModelJobConfig, plan: Plan, case: MemoryCase
    ) -> Profile:
        return published_profile(config, plan, case)

    # ── the plans that a search chooses among ────────────────────────────────────────────────────────────────────────

    def sizes(self, space: Space, mode: Mode) -> dict[str, tuple[Size, ...]]:
        return {c: _sizes(space, c) for c in space.plan.placement.components}

    def stages(
        self, config: LanguageModelJobConfig, plan: Plan, costs: Costs
    ) -> Stages:
        placement = plan.placement
        together = {c: placement.spec(c).parallel.ranks for c in placement.components}
        return TextStages(
            config,
            costs,
            together,
            counted_iterations(config, plan.needs.ahead),
            lent=bool(plan.needs.lent),
            undisturbed=_undisturbed(config, plan, costs),
        )

    def stage_bound(self, space: Space, profile: Profile) -> StageBound | None:
        bound = Generation(space, profile)
        return bound if bound.holds else None

    def scored_in(
        self, config: LanguageModelJobConfig, stages: Collection[str]
    ) -> str | None:
        if "infer" in stages:
            return "infer"
        if any(role_of(component) in SCORERS for component in config.placed):
            return "rollout"
        # Without scores, the actor computes advantages in the stage learn.
        return None

    def ordered(
        self,
        config: LanguageModelJobConfig,
        stage: str,
        ranks: Mapping[str, int],
        begun: bool,
    ) -> bool:
        if stage == "infer":
            return any(_shares_out(config, c) and ranks[c] > 1 for c in ranks)
        steps = config.algorithm.train_batch is not None
        return stage == "learn" and (begun or steps)

    def values(self, config: LanguageModelJobConfig) -> Mapping[str, Sequence[int]]:
        """Return config key -> values that a search may choose, for token budgets and `max_staleness`.

        Each token budget has its present value, and values that are at least as large as the longest sample.
        """
        found: dict[str, Sequence[int]] = {}
        for component in config.placed:
            block = config.block_of(component)
            if not isinstance(block, TrainedConfig | FrozenConfig):
                continue
            if isinstance(block, RewardConfig) and block.kind != "model":
                continue
            now = block.token_budget
            found[f"{config.key_of(component)}.token_budget"] = _budgets(config, now)
        now = config.algorithm.max_staleness
        return {**found, STALENESS: sorted({now, *_AHEAD})}

    def learning_changes(self, varied: Mapping[str, Any]) -> Iterator[str]:
        ahead = varied.get(STALENESS)
        if ahead is None:
            return
        samples = "of the version that learns from them"
        if ahead:
            versions = counted(ahead, "version")
            samples = f"up to {versions} older than what learns from them"
        yield f"{STALENESS} {ahead} changes what is learned: samples are {samples}"


def _undisturbed(
    config: LanguageModelJobConfig, plan: Plan, costs: Costs
) -> int | None:
    """Return the most ranks that a plan of a search can have, if each has a processor of its own in all these plans.

    Return None if ranks may have to share processors. `plan`: any plan of the search.
    """
    if config.cluster.launcher == "inline":
        return None
    topology = plan.topology
    each = max(node.accelerators for node in topology.nodes)
    # One more for the driver
    on_node = 1
    ranks = 0
    for component in plan.placement.components:
        now = Counter(plan.placement.locations(component).node)
        most = max(now.values())
        every = sum(now.values())
        if plan.placement.accelerators(component):
            most = max(most, each)
            every = max(every, topology.num_accelerators)
        on_node += most
        ranks += every
    if on_node > int(costs.profile.machine.get("cores", 1)):
        return None
    return ranks


def _budgets(config: LanguageModelJobConfig, now: int) -> list[int]:
    """Return the token budgets that a search tries: the present one, and multiples and fractions of it.

    `now`: the present budget. Budgets below the longest sample are left out, except the present one.
    """
    larger = [now * times for times in _TIMES]
    smaller = [now // times for times in _TIMES if now % times == 0]
    enough = [n for n in (*larger, *smaller) if n >= config.algorithm.longest]
    return sorted({now, *enough})


def _sizes(space: Space, component: str) -> tuple[Size, ...]:
    """Return the sizes that a search tries for a component: numbers of accelerators and ranks.

    The accelerators divide a node evenly, or are whole nodes that divide all nodes evenly. The present size is always
    included. Each rank has one accelerator; vLLM engines are tried with several, too. A component that the search may
    not change has its present size only.
    """
    now = space.size_now(component)
    if component not in space.free:
        return (now,)
    config: LanguageModelJobConfig = space.config
    algorithm = config.algorithm
    node = max(node.accelerators for node in space.nodes)
    nodes = len(space.nodes)
    even = [
        n
        for n in space.lengths
        if node % n == 0 or (n % node == 0 and nodes % (n // node) == 0)
    ]
    samples = (algorithm.prompts or 1) * algorithm.samples_per_prompt
    slices: tuple[int, ...] = (1,)
    if component == "rollout" and config.rollout.engine == "vllm":
        heads = text_keys(config.model or {}).get("num_attention_heads")
        slices = tuple(
            n
            for n in _SLICES
            if n <= node and not (isinstance(heads, int) and heads % n)
        )
        # Published rates give the steps of engines of the present size only.
        if config.profile == PUBLISHED:
            slices = (now.each,)
    found = {
        Size(n, n // each)
        for n in even
        for each in slices
        if n % each == 0 and n // each <= samples
    }
    if now.accelerators <= space.most:
        found.add(now)
    return tuple(sorted(found))


def _shares_out(config: LanguageModelJobConfig, component: str) -> bool:
    """Return whether each rank of a component scores its own groups, without help of the other ranks.

    True for a reference, teacher or reward whose model is not sharded, and for a reward without a model.
    """
    if role_of(component) not in FROZEN:
        return False
    block = config.block_of(component)
    if not isinstance(block, FrozenConfig):
        return False
    model = not isinstance(block, RewardConfig) or block.kind == "model"
    return not (block.sharded and model)

"""Rules for generation that overlaps other work.

They concern rollout ahead of learning, gradients during generation, and rounds that end before their longest answers.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlplace.checks.rule import Found, Rule, at_key
from rlplace.jobs.language_model.rules.case import PlacedTextJob
from rlplace.placement.language.spec import role_of
from rlplace.placement.schedule import Residency
from rlplace.workers.arguments import SCORERS

_ACCUMULATE_EARLY = "algorithm.accumulate_early"


def _goes_on(case: PlacedTextJob) -> bool:
    """Return whether rollout continues while the actor learns."""
    return case.active.ahead > 0


def _takes_turns(case: PlacedTextJob) -> Iterator[Found]:
    """Yield a finding for each component with `enable_offload` on accelerators of an asynchronous rollout.

    An asynchronous rollout never pauses, so it cannot release accelerators for other components. Components without
    `enable_offload` are allowed: they stay on the shared accelerators, and the memory ledger shows whether all fit.
    """
    placement = case.placement.residents
    # Ranks on lent accelerators leave them while others work there.
    generating = [
        c
        for c in placement.components
        if case.active.of("rollout", c) > Residency.OFF and c not in case.active.lent
    ]
    for component in case.placement.components:
        leaves = case.config.block_of(component).enable_offload
        others = [c for c in generating if placement.shared(component, c)]
        if component in generating or not leaves or not others:
            continue
        places = [f"{placement.shared(component, c)} with {c}" for c in others]
        yield at_key(
            "algorithm.max_staleness",
            case.active.ahead,
            component=component,
            others=" and ".join(others),
            places=", ".join(places),
        )


def _accumulates_early(case: PlacedTextJob) -> bool:
    return case.config.algorithm.accumulate_early and case.ranks("actor") > 0


def _learns_late(case: PlacedTextJob) -> Iterator[Found]:
    """Yield a finding with all reasons why the actor cannot compute gradients during generation.

    Examples: another component uses the actor's accelerators during rollout, or the advantages of a group depend on
    groups that are not generated yet.
    """
    config = case.config
    algorithm = config.algorithm
    placement = case.placement
    reasons = []
    # Components on the actor's accelerators
    sharing = [
        component
        for component in case.active.residency["rollout"]
        if component != "actor"
        and component in placement.components
        and placement.shared("actor", component)
    ]
    if sharing:
        reasons.append("shared")
    if algorithm.max_staleness > 0:
        reasons.append("ahead")
    # Optimizer steps
    samples = (algorithm.prompts or 0) * algorithm.samples_per_prompt
    batch = algorithm.train_batch or samples
    if algorithm.epochs > 1 or batch < samples:
        reasons.append("steps")
    # What is known of a sample once all are generated
    scorers = [c for c in config.placed if role_of(c) in SCORERS]
    if config.actor_infers or scorers:
        reasons.append("scored")
    normalized = algorithm.advantages_normalized or algorithm.normalize_rewards
    compared = algorithm.name in ("reinforce_pp", "reinforce_pp_baseline")
    if normalized or compared or algorithm.variant.name is not None:
        reasons.append("compared")
    if config.leaves_out:
        reasons.append("left-out")
    if reasons:
        yield at_key(
            _ACCUMULATE_EARLY, True, reasons=reasons, sharing=", ".join(sharing)
        )


def _lends_and_goes_on(case: PlacedTextJob) -> bool:
    return case.active.ahead > 0 and bool(case.placement.residents.borrowers)


def _too_far_ahead(case: PlacedTextJob) -> Iterator[Found]:
    """Yield a finding if generation may be more than one version ahead while accelerators are lent to it.

    Engines on lent accelerators take part in each iteration, and are there only once in each. So generation cannot be
    further ahead.
    """
    if case.active.ahead > 1:
        yield at_key("algorithm.max_staleness", case.active.ahead)


def _has_short_rounds(case: PlacedTextJob) -> bool:
    return bool(case.config.algorithm.short_rounds)


def _rounds_to_their_end(case: PlacedTextJob) -> Iterator[Found]:
    """Yield a finding with all reasons why the job cannot have short rounds.

    A short round is an iteration that ends before its longest answers. An asynchronous rollout and tasks that
    programs lead do not allow short rounds.
    """
    algorithm = case.config.algorithm
    reasons = []
    if algorithm.max_staleness > 0:
        reasons.append("ahead")
    if case.config.env.is_led:
        reasons.append("agent")
    if reasons:
        yield at_key("algorithm.short_rounds", algorithm.short_rounds, reasons=reasons)


RULES = (
    Rule(code="overlap-takes-turns", applies=_goes_on, facts=_takes_turns),
    Rule(code="lends-ahead", applies=_lends_and_goes_on, facts=_too_far_ahead),
    Rule(code="learns-late", applies=_accumulates_early, facts=_learns_late),
    Rule(code="short-rounds", applies=_has_short_rounds, facts=_rounds_to_their_end),
)

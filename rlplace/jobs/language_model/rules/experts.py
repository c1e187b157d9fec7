"""Rules of mixtures of experts: which models have them, and where their routes are recorded and replayed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlplace.checks.rule import Found, Rule, at_key
from rlplace.jobs.language_model.rules.case import PlannedJob

_REPLAY = "actor.router_replay"
_LOSS = "actor.router_loss_coef"
# What to write to switch a key off
_OFF = {_REPLAY: "router_replay: false", _LOSS: "router_loss_coef: 0"}
# Keys of config.json that have the number of experts of a layer
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def has_experts(model: Mapping[str, object]) -> bool:
    """Return whether a model is a mixture of experts. `model`: the content of its config.json."""
    return any(model.get(key) for key in _EXPERTS)


def _set_keys(case: PlannedJob) -> dict[str, object]:
    """Return config key -> value of those keys of mixtures of experts that are set."""
    actor = case.config.actor
    keys: dict[str, object] = {}
    if actor.router_replay:
        keys[_REPLAY] = actor.router_replay
    if actor.router_loss_coef:
        keys[_LOSS] = actor.router_loss_coef
    return keys


def _dense(case: PlannedJob) -> Iterator[Found]:
    """Yield a finding for each key of mixtures of experts that is set for a model without experts."""
    if has_experts(case.model):
        return
    family = case.model.get("model_type")
    for key, value in _set_keys(case).items():
        yield at_key(key, value, family=family, off=_OFF[key])


def _no_recorded_routes(case: PlannedJob) -> Iterator[Found]:
    """Yield a finding if routes shall be replayed that nothing records."""
    config = case.config
    if not config.actor.router_replay or not has_experts(case.model):
        return
    if "rollout" not in case.plan.placement.components:
        yield at_key(
            _REPLAY, True, "replay-without-rollout", name=config.algorithm.name
        )
    elif config.rollout.engine == "vllm":
        yield at_key(_REPLAY, True, "replay-engine")


def _balanced_parts(case: PlannedJob) -> Iterator[Found]:
    """Yield a finding for the auxiliary loss if ranks have parts of the tokens of a micro-batch."""
    coefficient = case.config.actor.router_loss_coef
    spec = case.plan.placement.spec("actor")
    if coefficient and spec.parallel.context_parallel_size > 1:
        yield at_key(_LOSS, coefficient, "balanced-parts")


RULES: tuple[Rule[PlannedJob], ...] = (
    Rule(code="no-experts", facts=_dense),
    Rule(code="plan-only", facts=_no_recorded_routes),
    Rule(code="plan-only", facts=_balanced_parts),
)

"""Rules of the training API: components and keys that only make sense where the job itself asks for answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from rlplace.checks.rule import Found, Rule, at_key
from rlplace.config.blocks.language_model import LanguageModelJobConfig
from rlplace.config.blocks.training import AlgorithmConfig, VariantConfig
from rlplace.config.fields import default_of, fields_of
from rlplace.config.keys import PLACEMENT
from rlplace.config.yaml_text import show
from rlplace.jobs.language_model.rules.case import PlacedTextJob

# Components of the job
USED = ("actor", "env", "rollout")
# Keys of `algorithm` that say how much a client may ask at a time
_KEYS = (
    "name",
    "sequence_length",
    "max_prompt_length",
    "max_new_tokens",
    "prompts",
)
# Keys of other blocks that have one value here -> this value
_FIXED = {
    "actor.sync.mode": "all",
    "actor.sync.verify": "checksum",
    "critic.on_actor": False,
    "reference.share_actor": False,
    "runner.eval_every": 0,
    "actor.ema_decay": None,
    "actor.router_replay": False,
    "actor.router_loss_coef": 0.0,
}


def _idle_components(config: LanguageModelJobConfig) -> Iterator[Found]:
    """Yield a finding for each placed component that would never work."""
    for component in config.placed:
        if component not in USED:
            key = f"{PLACEMENT}.{component}"
            yield at_key(key, None, "component", component=component)


def _unused_keys(config: LanguageModelJobConfig) -> Iterator[Found]:
    """Yield a finding for each key of `algorithm` that has no effect, and another value than by default."""
    fields = fields_of(AlgorithmConfig, "language_model")
    for name, (field, _) in fields.items():
        if name in _KEYS:
            continue
        usual = default_of(field, "language_model")
        value = getattr(config.algorithm, name)
        if isinstance(value, VariantConfig):
            value = dataclasses.asdict(value)
        if value == usual:
            continue
        key = f"algorithm.{name}"
        yield at_key(key, value, "key", name=key, usual=show(usual))


def _fixed_keys(config: LanguageModelJobConfig) -> Iterator[Found]:
    """Yield a finding for each key of other blocks that has another value than the one that works here."""
    for key, usual in _FIXED.items():
        value: object = config
        for name in key.split("."):
            value = getattr(value, name)
        if value != usual:
            yield at_key(key, value, "key", name=key, usual=show(usual))


def _several_servers(case: PlacedTextJob) -> Iterator[Found]:
    """Yield a finding if env has several ranks, since one address has one server."""
    ranks = case.ranks("env")
    if ranks > 1:
        yield at_key(f"{PLACEMENT}.env", f"{ranks} ranks", "ranks", ranks=ranks)


def _long_turns(config: LanguageModelJobConfig) -> Iterator[Found]:
    """Yield a finding if a stage may exceed its deadline while it waits for clients."""
    turn_s = config.serve.turn_s
    limit_s = min(config.runner.stage_timeout_s, config.runner.channel_timeout_s)
    if 2 * turn_s > limit_s:
        yield at_key("serve.turn_s", turn_s, "turn", limit_s=limit_s, most=limit_s / 2)


CONFIG: tuple[Rule[LanguageModelJobConfig], ...] = (
    Rule(code="serve-asks-nothing", facts=_idle_components),
)
PLACED: tuple[Rule[PlacedTextJob], ...] = (
    Rule(code="serve-asks-nothing", facts=_several_servers),
)
RULES: tuple[Rule[LanguageModelJobConfig], ...] = (
    Rule(code="serve-asks-nothing", facts=_unused_keys),
    Rule(code="serve-asks-nothing", facts=_fixed_keys),
    Rule(code="serve-asks-nothing", facts=_long_turns),
)

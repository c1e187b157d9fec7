"""Rules of supervised fine-tuning: components and keys that only make sense where answers are generated."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from rlplace.checks.rule import Found, Rule, at_key
from rlplace.config.blocks.language_model import LanguageModelJobConfig
from rlplace.config.blocks.training import AlgorithmConfig, VariantConfig
from rlplace.config.fields import default_of, fields_of
from rlplace.config.keys import PLACEMENT
from rlplace.config.yaml_text import show

# Components of the job
USED = ("actor", "env")
# Keys of `algorithm` that say which rows are learned, and how
_KEYS = (
    "name",
    "sequence_length",
    "max_prompt_length",
    "max_new_tokens",
    "prompts",
    "train_batch",
    "epochs",
    "loss",
    "truncated",
)
# Keys that make the actor compute something for an algorithm with rewards -> their values without effect
_OF_ACTOR = {"critic.on_actor": False, "reference.share_actor": False}


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


def _of_actor(config: LanguageModelJobConfig) -> Iterator[Found]:
    """Yield a finding for each key of other blocks that would make the actor compute more than it learns."""
    for key, usual in _OF_ACTOR.items():
        block, _, name = key.partition(".")
        value = getattr(getattr(config, block), name)
        if value != usual:
            yield at_key(key, value, "key", name=key, usual=show(usual))


PLACED: tuple[Rule[LanguageModelJobConfig], ...] = (
    Rule(code="sft-generates-nothing", facts=_idle_components),
)
RULES: tuple[Rule[LanguageModelJobConfig], ...] = (
    Rule(code="sft-generates-nothing", facts=_unused_keys),
    Rule(code="sft-generates-nothing", facts=_of_actor),
)

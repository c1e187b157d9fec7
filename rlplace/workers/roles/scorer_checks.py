"""What judges need that a plan cannot see, checked before launch: heads, templates, functions, addresses, tokens."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlplace.config import Config, CriticConfig, ReferenceConfig, RewardConfig
from rlplace.envs.text import Message
from rlplace.envs.text.list_rewards import reward_of_config
from rlplace.errors import ConfigError, Problem
from rlplace.models.reward_head import reward_head_problem
from rlplace.models.tokenizer import Tokenizer
from rlplace.placement.language.spec import role_of
from rlplace.workers.reward_client import endpoint_of
from rlplace.workers.roles.scored_text import same_tokens

_READS_TOKENS = {
    "reference": "it says how likely it finds each token that the policy drew",
    "critic": "it values the state before each token that the policy drew",
}


def check_judges(config: Config, components: Sequence[str]) -> list[Problem]:
    """Of the placed components; folders that are not there are the matter of whoever checks the job's models."""
    problems: list[Problem] = []
    for component in components:
        if role_of(component) == "reward":
            problems += _check_reward(config, config.reward_of(component), config.key_of(component))
        elif component in _READS_TOKENS:
            problems += _check_tokens(config, component)
    return list(dict.fromkeys(problems))  # components may share a block


def _check_reward(config: Config, block: RewardConfig, key: str) -> list[Problem]:
    try:
        if block.function is not None:
            reward_of_config(block.function, block.kwargs, key=key)
        elif block.url is not None:
            endpoint_of(
                block.url,
                key=key,
                timeout_s=block.timeout_s,
                retries=block.retries,
                api_key_env=block.api_key_env,
                environ=os.environ,
            )
        else:
            return _check_model(config, block, key)
    except ConfigError as error:
        return list(error.problems)
    return []


def _check_model(config: Config, block: RewardConfig, key: str) -> list[Problem]:
    """Its head, and how it is shown episodes in tokens of its own."""
    policy = _folder(config.model)
    folder = policy if block.model is None else _folder(block.model)
    if policy is None or folder is None:
        return []
    head = reward_head_problem(folder, key, block.head)
    problems = [] if head is None else [head]
    if config.text_env.chat and not same_tokens(policy, folder):
        try:
            Tokenizer.load(folder).render([Message("user", "-"), Message("assistant", "-")], answered=True)
        except ConfigError as error:
            problems += [replace(p, key=f"{key}.model.path") for p in error.problems]
    return problems


def _folder(model: Mapping[str, object] | None) -> Path | None:
    """None where there is none, or not on this machine."""
    path = (model or {}).get("path")
    return Path(str(path)) if path is not None and Path(str(path)).is_dir() else None


def _check_tokens(config: Config, component: str) -> list[Problem]:
    """An id must mean the same to it and to the policy."""
    block = config.block_of(component)
    assert isinstance(block, (CriticConfig, ReferenceConfig)), component
    policy, folder = _folder(config.model), _folder(block.model)
    if policy is None or folder is None or same_tokens(policy, folder):
        return []
    return [
        Problem(
            code="other-tokenizer",
            key=f"{component}.model.path",
            what=f"the {component} has another tokenizer than the policy",
            got=str(folder),
            why=f"{_READS_TOKENS[component]}, so ids must mean the same to both",
            fix=f"a model with the tokenizer of {policy}, such as the one it was trained from",
        )
    ]

"""Rules of the scorers: references, critics and rewards. Missing model folders are reported by other rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rlplace.checks.rule import Found, Rule, broken
from rlplace.config.blocks.language_model import (
    CriticConfig,
    LanguageModelJobConfig,
    ReferenceConfig,
    RewardConfig,
    TeacherConfig,
)
from rlplace.envs.registry import missing_library
from rlplace.envs.text.rewards import named_reward
from rlplace.errors import ConfigError, Problem
from rlplace.models.folders import (
    TRIED_CHAT,
    existing_folder,
    reads_tokens,
    same_tokens,
)
from rlplace.models.heads import reward_head_problem
from rlplace.placement.language.spec import role_of
from rlplace.workers.roles.endpoint import endpoint_problems

# Components that read the tokens of the policy as they are; each is the name of an error, too.
_READS_TOKENS = ("reference", "teacher", "critic")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenReader:
    """A component that reads the token ids of the policy: the reference, the teacher or the critic."""

    config: LanguageModelJobConfig
    component: str


def problems(
    config: LanguageModelJobConfig, components: Sequence[str]
) -> Iterator[Problem]:
    """Yield the problems of the placed scorers. If a library is missing that a check needs, yield a problem about it.

    `components`: the names of all placed components.
    """
    try:
        yield from scorer_problems(config, components)
    # e.g. tokenizers, which are loaded to compare them
    except ModuleNotFoundError as error:
        why = f"there is no module {error.name}"
        yield from missing_library(
            why, got="tokenizer.json", extra="text", key="reward", of="the models"
        ).problems


def scorer_problems(
    config: LanguageModelJobConfig, components: Sequence[str]
) -> Iterator[Problem]:
    """Yield the problems of the placed scorers. Raises ModuleNotFoundError if tokenizers cannot be compared.

    `components`: the names of all placed components.
    """
    for component in components:
        if role_of(component) == "reward":
            block = config.reward_of(component)
            yield from _reward_problems(config, block, config.key_of(component))
        elif component in _READS_TOKENS:
            reader = TokenReader(config=config, component=component)
            yield from broken(TOKENS, reader)


def _reward_problems(
    config: LanguageModelJobConfig, block: RewardConfig, key: str
) -> Iterator[Problem]:
    """Yield the problems of a reward's function, endpoint or model.

    `block`: the reward's config block. `key`: the config key of the block. A reward model needs a reward head. If its
    tokenizer differs from the policy's and the task is a chat, the reward model also needs a chat template.
    """
    if block.function is not None:
        try:
            named_reward(block.function, block.kwargs, key=key)
        except ConfigError as error:
            yield from error.problems
        return
    if block.url is not None:
        yield from endpoint_problems(block, key)
        return
    policy = existing_folder(config.model)
    folder = policy
    if block.model is not None:
        folder = existing_folder(block.model)
    if policy is None or folder is None:
        return
    head = reward_head_problem(folder, key, block.head)
    if head is not None:
        yield head
    # A model with other tokens, or another template, reads the texts of a chat by its own template
    if config.env.chat and not reads_tokens(policy, folder, chat=True):
        from rlplace.models.tokenizer import Tokenizer

        try:
            Tokenizer.load(folder).render(TRIED_CHAT, answered=True)
        except ConfigError as error:
            for problem in error.problems:
                yield replace(problem, key=f"{key}.model.path")


def _other_tokenizer(case: TokenReader) -> Iterator[Found]:
    """Yield a finding if the component's tokenizer differs from the policy's: token ids would mean other tokens."""
    block = case.config.block_of(case.component)
    assert isinstance(block, (CriticConfig, ReferenceConfig, TeacherConfig))
    policy = existing_folder(case.config.model)
    folder = existing_folder(block.model)
    if policy is None or folder is None or same_tokens(policy, folder):
        return
    yield Found(
        key=f"{case.component}.model.path",
        got=str(folder),
        error=case.component,
        facts={"policy": policy},
    )


TOKENS: tuple[Rule[TokenReader], ...] = (
    Rule(code="other-tokenizer", facts=_other_tokenizer),
)

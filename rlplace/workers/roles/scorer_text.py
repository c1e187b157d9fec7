"""What scorers read of a sample, and checks before launch of what a plan cannot see: heads, templates, addresses.

::

    tokens of the policy ──▶ a reward model with the same tokenizer
    transcript           ──▶ a reward model with another: its chat template, its tokens     the only text that becomes
    transcript, tokens   ──▶ a function: prompts, answers   an endpoint: query, prompts     tokens again; nothing of it
                                                                                            is ever trained on
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlplace.config import Config, CriticConfig, ReferenceConfig, RewardConfig
from rlplace.envs.text import Message, Transcript
from rlplace.envs.text.rewards import reward_of_config
from rlplace.errors import ConfigError, Problem
from rlplace.models.heads import reward_head_problem
from rlplace.placement.language.spec import role_of
from rlplace.workers.arguments import WorkerArguments
from rlplace.workers.roles.reward_client import endpoint_of

if TYPE_CHECKING:  # a plan checks scorers too, without numpy
    from rlplace.models.tokenizer import Tokenizer, Tokens
    from rlplace.tokens import Sample

_READS_TOKENS = {
    "reference": "it computes the log-probability of each token that the policy drew",
    "critic": "it values the state before each token that the policy drew",
}
_TURNS = [Message("user", "-"), Message("assistant", "-")]  # the shortest chat, to try a template


def reads_text(job: WorkerArguments, component: str) -> bool:
    """Return whether a component's samples need their transcripts, which an env rank then adds."""
    if role_of(component) != "reward":
        return False
    block = job.config.reward_of(component)
    own = (block.model or {}).get("path")
    return block.kind != "model" or (own is not None and not same_tokens(job.model, Path(str(own))))


def same_tokens(one: Path, other: Path) -> bool:
    """Return whether an id means the same token in both model folders."""
    files = [folder / "tokenizer.json" for folder in (one, other)]
    if one == other or not files[1].is_file() or files[0].read_bytes() == files[1].read_bytes():
        return True  # a folder without a tokenizer was trained with the policy's
    from rlplace.models.tokenizer import Tokenizer

    return Tokenizer.load(one).ids == Tokenizer.load(other).ids


def retokenized(job: WorkerArguments, folder: Path) -> Callable[[Sample], Tokens]:
    """Return the function that turns a sample into tokens of the reward model in `folder`.

    Raises ConfigError when the model has no chat template for a chat.
    """
    if same_tokens(job.model, folder):
        return lambda sample: sample.tokens
    from rlplace.models.tokenizer import Tokenizer

    tokenizer, env = Tokenizer.load(folder), job.config.text_env
    if not env.chat:
        return lambda sample: tokenizer.encode(plain(transcript_of(sample), env.system), special=True)
    tokenizer.render(_TURNS, answered=True)  # a template that refuses is found here
    return lambda sample: tokenizer.chat(conversation(transcript_of(sample), env.system), answered=True)


def transcript_of(sample: Sample) -> Transcript:
    transcript = sample.transcript
    assert isinstance(transcript, Transcript), "env ranks add it for scorers that read text"
    return transcript


def conversation(transcript: Transcript, system: str | None = None) -> list[Message]:
    """Return all messages of an episode, in order."""
    prompt = transcript.prompt
    messages = [] if system is None else [Message("system", system)]
    messages += [Message("user", prompt)] if isinstance(prompt, str) else prompt
    for answer, reply in itertools.zip_longest(transcript.answers, transcript.replies):
        messages.append(Message("assistant", answer))
        messages += [] if reply is None else [Message("user", reply)]
    return messages


def plain(transcript: Transcript, system: str | None = None) -> str:
    """Return the text of all messages, without roles."""
    return "\n".join(message.content for message in conversation(transcript, system))


def queries(samples: Sequence[Sample], tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    """Return the texts of whole episodes and of their prompts, as the policy saw them: with special tokens."""
    whole = [tokenizer.decode(sample.tokens, special=True) for sample in samples]
    firsts = [int(sample.mask.argmax()) if sample.response_tokens else len(sample.tokens) for sample in samples]
    prompts = [tokenizer.decode(s.tokens[:first], special=True) for s, first in zip(samples, firsts, strict=True)]
    return whole, prompts


# ── checks before launch ─────────────────────────────────────────────────────────────────────────────────────────────


def check_scorers(config: Config, components: Sequence[str]) -> list[Problem]:
    """Report what the placed scorers cannot work with. Folders that do not exist are reported elsewhere."""
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
    """Report a missing head, and a missing chat template where the model has its own tokens."""
    policy = _folder(config.model)
    folder = policy if block.model is None else _folder(block.model)
    if policy is None or folder is None:
        return []
    head = reward_head_problem(folder, key, block.head)
    problems = [] if head is None else [head]
    if config.text_env.chat and not same_tokens(policy, folder):
        from rlplace.models.tokenizer import Tokenizer

        try:
            Tokenizer.load(folder).render(_TURNS, answered=True)
        except ConfigError as error:
            problems += [replace(p, key=f"{key}.model.path") for p in error.problems]
    return problems


def _folder(model: Mapping[str, object] | None) -> Path | None:
    """Return the model's folder; None where there is none on this machine."""
    path = (model or {}).get("path")
    return Path(str(path)) if path is not None and Path(str(path)).is_dir() else None


def _check_tokens(config: Config, component: str) -> list[Problem]:
    """Report a tokenizer other than the policy's: an id must mean the same to both."""
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

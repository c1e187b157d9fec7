"""Checks that this machine has what a run needs: engine libraries, weights and a tokenizer."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlplace.checks.rule import Found, Rule, broken
from rlplace.codes import problem
from rlplace.config.blocks.language_model import (
    FrozenConfig,
    LanguageModelJobConfig,
    RewardConfig,
)
from rlplace.config.blocks.training import TrainedConfig
from rlplace.config.model_folder import GET, no_folder, text_keys, to_get
from rlplace.envs.registry import missing_library
from rlplace.errors import ConfigError, Problem
from rlplace.models.heads import unread_weights
from rlplace.placement.plan import Plan

if TYPE_CHECKING:
    from rlplace.models.tokenizer import Tokenizer

_ACTOR_PATH = "actor.model.path"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """An existing folder of a model. `key`: the config key that names the folder."""

    folder: Path
    key: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedJob:
    """A config, and the tokenizer in the folder of the actor's model.

    `written`: the folder's path as it stands in the config.
    """

    config: LanguageModelJobConfig
    tokenizer: Tokenizer
    written: str


def launch_problems(
    config: LanguageModelJobConfig, plan: Plan, *, reads_prompts: bool = True
) -> Iterator[Problem]:
    """Yield a problem for each library or file that is missing or unfit on this machine for a run of the plan.

    `reads_prompts`: whether the run has prompts of its own, which are checked too.
    """
    if config.rollout.engine == "vllm":
        yield from _vllm_problems(config, plan)
    data = _prompt_problems if reads_prompts else _no_problems
    yield from actor_problems(config, data)
    for component in plan.placement.components:
        block = config.block_of(component)
        key = config.key_of(component)
        if isinstance(block, RewardConfig) and block.url is not None:
            yield from _endpoint_problems(block.url, key)
        if component == "actor" or not isinstance(block, (TrainedConfig, FrozenConfig)):
            continue
        path = None
        if isinstance(block.model, Mapping):
            path = block.model.get("path")
        if path is not None:
            yield from weights_problems(Path(str(path)), f"{key}.model.path")


def _no_problems(config: LanguageModelJobConfig, folder: Path) -> Iterable[Problem]:
    return ()


def _prompt_problems(config: LanguageModelJobConfig, folder: Path) -> Iterable[Problem]:
    """Return the problems of the prompts that can be checked before a run. `folder`: of the model."""
    # Imported here: it needs NumPy
    from rlplace.workers.roles.prompts import check_prompts

    return check_prompts(config, folder)


def _vllm_problems(config: LanguageModelJobConfig, plan: Plan) -> Iterator[Problem]:
    """Yield a problem if vLLM is not installed, or if `rollout.engine_args` has arguments that vLLM does not know."""
    from rlplace.workers.engines.contract import (
        engine_args_problems,
        vllm_problem,
        vllm_without_adapters,
    )

    kind = "gpu"
    if plan.topology.nodes[0].kind == "emulated":
        kind = "emulated"
    missing = vllm_problem(kind)
    if missing is not None:
        yield missing
        return
    too_old = vllm_without_adapters()
    if too_old is not None and config.actor.sync.mode == "adapter":
        yield problem(
            "plan-only",
            "actor.sync.mode",
            "mode: adapter",
            error="adapter-of-older-vllm",
            version=too_old,
        )
    yield from engine_args_problems(config.rollout.engine_args)


def _endpoint_problems(url: str, key: str) -> Iterator[Problem]:
    """Yield a problem if urllib3 is not installed, which is needed to call a reward's endpoint.

    `url`: the address of the endpoint. `key`: the config key of the reward's block.
    """
    if importlib.util.find_spec("urllib3") is None:
        why = "there is no module urllib3"
        yield from missing_library(
            why, got=url, extra="text", key=f"{key}.url", of="the endpoint"
        ).problems


def actor_problems(
    config: LanguageModelJobConfig,
    check_data: Callable[[LanguageModelJobConfig, Path], Iterable[Problem]],
) -> Iterator[Problem]:
    """Yield the problems of the actor's weights and tokenizer, and those of the data that the run reads.

    `check_data`: returns the problems of the data. It gets the config and the folder of the model.
    """
    written = (config.model or {}).get("path")
    if not isinstance(written, str):
        yield problem("missing-key", _ACTOR_PATH, error="model-path")
        return
    folder = Path(written)
    yield from weights_problems(folder, _ACTOR_PATH)
    if not os.path.isdir(folder):
        return
    from rlplace.models.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer.load(folder)
    except ConfigError as error:
        yield from error.problems
        return
    case = TokenizedJob(config=config, tokenizer=tokenizer, written=written)
    yield from broken(TOKENIZER, case)
    yield from check_data(config, folder)


def weights_problems(folder: Path, key: str) -> Iterator[Problem]:
    """Yield a problem if a model's folder does not exist, or if its weights cannot be read.

    `key`: the config key that names the folder.
    """
    if os.path.isdir(folder):
        yield from broken(WEIGHTS, ModelFolder(folder=folder, key=key))
        return
    # Show the path as it was written; a hub id is not a local folder.
    here = Path.cwd()
    shown = folder
    if folder.is_relative_to(here):
        shown = folder.relative_to(here)
    yield no_folder(str(shown), key)


# ── the tokenizer of the actor ───────────────────────────────────────────────────────────────────────────────────────


def _nothing_ends_turns(case: TokenizedJob) -> Iterator[Found]:
    """Yield a finding if episodes have several turns, but neither tokenizer nor `rollout.stop` can end an answer."""
    turns = case.config.env.max_turns
    chat = case.config.env.chat
    ends = case.tokenizer.stops(case.config.rollout.stop, chat=chat)
    if turns > 1 and not any(ends):
        yield Found(key="env.max_turns", got=f"max_turns: {turns}")


def _stop_of_special_token(case: TokenizedJob) -> Iterator[Found]:
    """Yield a finding for each text of `rollout.stop` with a special token: answers never contain special tokens."""
    for text in case.config.rollout.stop:
        special = case.tokenizer.special_within(text)
        if special is not None:
            yield Found(
                key="rollout.stop",
                got=repr(text),
                error="special",
                facts={"special": special},
            )


def _more_tokens_than_model(case: TokenizedJob) -> Iterator[Found]:
    """Yield a finding if the tokenizer has more tokens than the vocabulary of the actor's model."""
    vocabulary = text_keys(case.config.model or {}).get("vocab_size")
    size = case.tokenizer.size
    if isinstance(vocabulary, int) and size > vocabulary:
        yield Found(
            key=_ACTOR_PATH,
            got=case.written,
            error="tokenizer",
            facts={
                "size": size,
                "vocabulary": vocabulary,
                "file": Path(case.written) / "config.json",
            },
        )


TOKENIZER: tuple[Rule[TokenizedJob], ...] = (
    Rule(code="nothing-ends", facts=_nothing_ends_turns),
    Rule(code="stop-text", facts=_stop_of_special_token),
    Rule(code="not-a-model", facts=_more_tokens_than_model),
)

# ── the files of a model ─────────────────────────────────────────────────────────────────────────────────────────────


def _has_weights(case: ModelFolder) -> bool:
    return any(case.folder.glob("*.safetensors"))


def _no_weights(case: ModelFolder) -> Iterator[Found]:
    """Yield findings about a folder without weights, for example after an interrupted download."""
    if _has_weights(case):
        return
    download = to_get(case.folder)
    error = "without-weights"
    if download != GET:
        error = "interrupted"
    yield Found(
        key=case.key,
        got=str(case.folder),
        error=error,
        facts={"folder": case.folder, "download": download},
    )


def _unread_weights(case: ModelFolder) -> Iterator[Found]:
    """Yield findings about files of weights that are missing or damaged."""
    unread = unread_weights(case.folder)
    if unread is not None:
        yield Found(
            key=case.key,
            got=str(case.folder),
            error="unread",
            facts={"unread": unread},
        )


WEIGHTS: tuple[Rule[ModelFolder], ...] = (
    Rule(code="not-a-model", facts=_no_weights),
    Rule(code="model-weights", applies=_has_weights, facts=_unread_weights),
)

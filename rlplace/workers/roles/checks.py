"""Checks of placed scorers and trained models before launch.

A plan makes them too, so this module has no heavy imports.
"""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlplace.config.schema import (
    Config,
    CriticConfig,
    FrozenConfig,
    ReferenceConfig,
    RewardConfig,
    TextRolloutConfig,
    TrainedConfig,
)
from rlplace.envs.registry import check_named, named, unknown_arguments
from rlplace.envs.text import Message
from rlplace.envs.text.rewards import named_reward
from rlplace.errors import ConfigError, Problem, one_of
from rlplace.models.families import VISION_FAMILIES
from rlplace.models.heads import reward_head_problem, value_head_problem
from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.language.spec import ComponentSpec, role_of

# The shortest conversation, to test a chat template
TRIED_CHAT = [
    Message("user", "-"),
    Message("assistant", "-"),
]
_READS_TOKENS = {
    "reference": "it computes the log-probability of each token that the policy drew",
    "critic": "it values the state before each token that the policy drew",
}


def check_variant(config: Config) -> list[Problem]:
    """Report a custom variant of the algorithm that cannot be imported or overrides nothing."""
    variant = config.algorithm.variant
    methods = ("advantages", "policy_loss", "value_loss", "metrics")
    key = "algorithm.variant.name"
    given = ("the algorithm's config",)
    if variant.name is None:
        return []
    code = "unknown-variant"
    noun = "variant of an algorithm"
    return check_named(
        variant.name,
        variant.kwargs,
        given=given,
        key=key,
        code=code,
        noun=noun,
        methods=methods,
    )


# Required methods of `engines.contract.TextEngine`; a custom engine must have them.
_OF_AN_ENGINE = ("move", "load", "close", "submit", "step", "drop", "logprobs")


def check_engine(rollout: TextRolloutConfig) -> list[Problem]:
    """Report a custom engine that cannot be imported or called, or that lacks methods of the contract."""
    key = "rollout.engine"
    code = "unknown-engine"
    name = rollout.engine
    try:
        found = named(name, {}, key=key, code=code, noun="engine")
    except ConfigError as error:
        return list(error.problems)
    why = "docs/own_engine.md has the contract"
    if not isinstance(found, type):
        what = f"is no class: {type(found).__name__}"
        fix = "engine: <package.module:Class>"
        return list(ConfigError.of(code, key, what, name, why, fix).problems)
    problems = unknown_arguments(
        found,
        rollout.engine_args,
        given=("settings", "device", "owner"),
        key="rollout.engine_args",
        code="engine-args",
    )
    if lacking := [
        method for method in _OF_AN_ENGINE if not callable(getattr(found, method, None))
    ]:
        what = f"lacks {', '.join(lacking)}"
        fix = f"def {lacking[0]}(self, ...)"
        problems += ConfigError.of(code, key, what, name, why, fix).problems
    return problems


def check_scorers(config: Config, components: Sequence[str]) -> Iterator[Problem]:
    """Report problems of the placed scorers. Missing folders are reported elsewhere."""
    for component in components:
        if role_of(component) == "reward":
            yield from _check_reward(
                config, config.reward_of(component), config.key_of(component)
            )
        elif component in _READS_TOKENS:
            yield from _check_tokens(config, component)


def _check_reward(config: Config, block: RewardConfig, key: str) -> Iterator[Problem]:
    """Report a wrong reward function or address, a missing head, or a missing chat template for a model with other
    tokens.
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
    policy = _existing(config.model)
    folder = policy if block.model is None else _existing(block.model)
    if policy is None or folder is None:
        return
    head = reward_head_problem(folder, key, block.head)
    if head is not None:
        yield head
    if config.text_env.chat and not same_tokens(policy, folder):
        from rlplace.models.tokenizer import Tokenizer

        try:
            Tokenizer.load(folder).render(TRIED_CHAT, answered=True)
        except ConfigError as error:
            yield from (replace(p, key=f"{key}.model.path") for p in error.problems)


def folder_of(model: Mapping[str, object] | None) -> Path | None:
    """Return the folder that `model` of a block names; None if it names none."""
    path = (model or {}).get("path")
    if path is None:
        return None
    return Path(str(path))


def _existing(model: Mapping[str, object] | None) -> Path | None:
    folder = folder_of(model)
    if folder is not None and os.path.isdir(folder):
        return folder
    return None


def _check_tokens(config: Config, component: str) -> Iterator[Problem]:
    """Report a tokenizer that differs from the policy's: token ids must mean the same in both."""
    block = config.block_of(component)
    assert isinstance(block, (CriticConfig, ReferenceConfig)), component
    policy = _existing(config.model)
    folder = _existing(block.model)
    if policy is not None and folder is not None and not same_tokens(policy, folder):
        yield Problem(
            code="other-tokenizer",
            key=f"{component}.model.path",
            what=f"the {component} has another tokenizer than the policy",
            got=str(folder),
            why=f"{_READS_TOKENS[component]}, so ids must mean the same to both",
            fix=f"a model with the tokenizer of {policy}, such as the one it was trained from",
        )


def same_tokens(one: Path, other: Path) -> bool:
    """Return whether two model folders have the same meaning of token ids."""
    files = [folder / "tokenizer.json" for folder in (one, other)]
    if (
        one == other
        or not files[1].is_file()
        or files[0].read_bytes() == files[1].read_bytes()
    ):
        # A folder without a tokenizer is taken as one that uses the policy's.
        return True
    from rlplace.models.tokenizer import Tokenizer

    return Tokenizer.load(one).ids == Tokenizer.load(other).ids


def endpoint_problems(block: RewardConfig, key: str) -> Iterator[Problem]:
    """Report a malformed address, and an environment variable that does not exist."""
    try:
        parts = urllib.parse.urlsplit(str(block.url))
        well_formed = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
        )
    except ValueError:  # the port is not a number
        well_formed = False
    if not well_formed:
        what = "this is no address of an HTTP endpoint"
        why = "batches are posted there"
        fix = "url: http://<host>:<port>/get_reward"
        yield Problem(
            code="bad-reward-url",
            key=f"{key}.url",
            what=what,
            got=block.url,
            why=why,
            fix=fix,
        )
    name = block.api_key_env
    if name is not None and not os.environ.get(name):
        what = "there is no such environment variable, or it is empty"
        why = "its value is sent with every request as a bearer token"
        fix = f"export {name}=<token>        (before the run, which gives it to the workers)"
        yield Problem(
            code="no-api-key",
            key=f"{key}.api_key_env",
            what=what,
            got=name,
            why=why,
            fix=fix,
        )


def not_run(component: str, trained: TrainedConfig) -> list[Problem]:
    """Report features of a trained model that can be planned but not run. To be called before launch."""
    fp16 = "float16 needs its losses scaled, which a run does not do"
    wanted: Sequence[tuple[str, object, tuple[object, ...], str]] = (
        ("weights", trained.weights, ("fp32", "bf16"), fp16),
        ("compute", trained.compute, ("fp32", "bf16"), fp16),
        (
            "zero_stage",
            trained.zero_stage,
            (2, 3),
            "a run shards gradients and optimizer over all ranks",
        ),
    )
    kind = trained.optimizer.kind
    rounded = (
        trained.weights == "bf16"
        and kind != "adamw_master"
        and not trained.optimizer.on_host
    )
    lost = Problem(
        code="rounded-away",
        key=f"{component}.weights",
        what="Adam's steps would be lost in rounding",
        got=f"weights: {trained.weights}, optimizer.kind: {kind}",
        why="a 16-bit weight keeps 8 bits: a step below 1/256 of it, as nearly all are, leaves it where it is",
        fix=f"{component}.optimizer.kind=adamw_master"
        if kind == "adamw"
        else f"{component}.weights=fp32",
    )
    nothing = Problem(
        code="nothing-to-offload",
        key=f"{component}.activation_offload",
        what="there is nothing to keep on the host",
        got="activation_offload: true, checkpointing: false",
        why="inputs of layers go to the host, from which the rest is recomputed; here all of a layer is kept",
        fix=f"{component}.checkpointing=true",
    )
    return (
        [lost] * rounded
        + [nothing] * (trained.activation_offload and not trained.checkpointing)
        + [
            Problem(
                code="plan-only",
                key=f"{component}.{field}",
                what="is planned, not run",
                got=f"{field}: {value}",
                why=why,
                fix=" or ".join(f"{field}: {choice}" for choice in choices),
            )
            for field, value, choices, why in wanted
            if value not in choices
        ]
    )


# Model families that transformers can split by heads and columns (tensor parallel), without a bias on the summed
# outputs.
CUT_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_CUT_EVENLY = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)


def cut_problems(config: Config, spec: ComponentSpec) -> Iterator[Problem]:
    """Report why a trained model or scorer cannot use the configured tensor or context parallelism."""
    block = config.block_of(spec.name)
    own = (
        block.language_model
        if isinstance(block, TrainedConfig)
        else getattr(block, "model", None)
    )
    model = own or config.model or {}
    if spec.parallel.tensor_parallel_size > 1:
        yield from _model_problems(config, spec, model)
    yield from _token_problems(spec, model)


def _token_problems(
    spec: ComponentSpec, model: Mapping[str, object]
) -> Iterator[Problem]:
    """Report a number of heads that does not allow context parallelism.

    Ranks exchange heads for tokens: each needs the same number of query heads; key heads are copied if there are too
    few.
    """
    tensor = spec.parallel.tensor_parallel_size
    size = spec.parallel.context_parallel_size
    heads = model.get("num_attention_heads")
    keys = model.get("num_key_value_heads") or heads
    if size == 1 or not isinstance(heads, int) or not isinstance(keys, int):
        return
    ours = max(1, heads // tensor)
    theirs = max(1, keys // tensor)

    def goes(ranks: int) -> bool:
        return ours % ranks == 0 and (theirs % ranks == 0 or ranks % theirs == 0)

    if not goes(size):
        near = max(n for n in range(1, size) if spec.num_copies % n == 0 and goes(n))
        what = f"{ours} heads of queries and {theirs} of keys are not exchanged between {size} ranks"
        why = "within attention each rank has all tokens of as many heads as any other"
        yield _uncut(
            "context-parallel-heads", spec, what, why, f"context_parallel_size: {near}"
        )


def _model_problems(
    config: Config, spec: ComponentSpec, model: Mapping[str, object]
) -> Iterator[Problem]:
    size = spec.parallel.tensor_parallel_size
    block = config.block_of(spec.name)
    whole = "no tensor_parallel_size        (ranks then share the state by FSDP)"
    family = model.get("model_type")
    biases = [key for key in ("attention_bias", "mlp_bias") if model.get(key)]
    if family not in CUT_FAMILIES and family is not None:
        what = f"a {family} model is not cut between ranks"
        why = f"it may be one of {', '.join(sorted(CUT_FAMILIES))}"
        yield _uncut("tensor-parallel-family", spec, what, why, whole)
    elif biases and family != "qwen2":
        what = "its layers end in biases, which every rank of a copy would add"
        why = f"{biases[0]} in its config.json"
        yield _uncut("tensor-parallel-family", spec, what, why, whole)
    parts = {
        key: number
        for key in _CUT_EVENLY
        if isinstance(number := model.get(key), int) and number > 0
    }
    if uneven := [f"{key}: {number}" for key, number in parts.items() if number % size]:
        total = len(spec.accelerators)
        fitting = [
            n
            for n in range(1, total + 1)
            if total % n == 0 and not any(of % n for of in parts.values())
        ]
        near = [
            max(n for n in fitting if n < size),
            *[n for n in fitting if n > size][:1],
        ]
        lines = [f"tensor_parallel_size: {n}" if n > 1 else whole for n in near]
        fix = one_of(lines) if len(lines) > 1 else lines[0]
        what = f"its layers cannot be shared by {size} ranks of a copy"
        why = f"each has as many heads and columns, and {', '.join(uneven)} in its config.json"
        yield _uncut("tensor-parallel-heads", spec, what, why, fix)
    if (
        isinstance(block, FrozenConfig)
        and block.on_host
        and not block.sharded
        and spec.num_copies > 1
    ):
        what = "weights on the host of a model that is cut between ranks are shared by its copies"
        why = "blocks come to the accelerators by FSDP, over all copies"
        yield _uncut(
            "plan-only", spec, what, why, f"{config.key_of(spec.name)}.sharded: true"
        )


def sight_problems(
    config: Config, placement: HybridComponentPlacement
) -> Iterator[Problem]:
    """Report vision features that a run does not support. All are reported as plan-only."""
    family = (config.model or {}).get("model_type")
    if family not in VISION_FAMILIES:
        return
    got = f"model_type: {family}"
    if (engine := config.text_rollout.engine) != "transformers":
        what = f"{engine} is not shown images in a run"
        why = "it has not been compared with the actor on them"
        why += "; its processors want torchvision" * (engine == "vllm")
        fix = "rollout.engine: transformers"
        key = "rollout.engine"
        yield Problem(code="plan-only", key=key, what=what, got=got, why=why, fix=fix)
    if config.actor.sync.mode == "delta":
        why = (
            "what changed has not been compared with all weights for a model that sees"
        )
        key = "actor.sync.mode"
        yield Problem(
            code="plan-only",
            key=key,
            what="is planned, not run",
            got="mode: delta",
            why=why,
            fix="mode: all",
        )
    if config.critic.on_actor or "critic" in placement.components:
        key = "critic.on_actor" if config.critic.on_actor else "critic"
        what = "no critic sees images in a run"
        why = "values are by models of text, to which image tokens say nothing"
        fix = "algorithm.name: grpo        (which needs no critic)"
        yield Problem(code="plan-only", key=key, what=what, got=got, why=why, fix=fix)
    for component in placement.components:
        spec = placement.spec(component)
        block = config.block_of(component)
        if spec.parallel.ranks > 1:
            what = "a model that sees is not divided between ranks"
            why = "each goes through its tower and layers whole"
            yield _uncut(
                "plan-only",
                spec,
                what,
                why,
                "no tensor_parallel_size, no context_parallel_size",
            )
        own = (
            block.model
            if isinstance(block, FrozenConfig) and not isinstance(block, RewardConfig)
            else None
        )
        if own is not None and own.get("model_type") != family:
            what = f"the {component} sees no images as the actor does"
            why = f"it is a {own.get('model_type')}"
            fix = f"a {family}        (or {component}.model: null, the actor's own)"
            yield Problem(
                code="plan-only",
                key=f"{component}.model",
                what=what,
                got=got,
                why=why,
                fix=fix,
            )
        if isinstance(block, RewardConfig) and block.kind == "model":
            what = "reward models are shown no images"
            why = "it would score answers to questions it cannot see"
            key = config.key_of(component)
            fix = "a reward function, in env.rewards"
            yield Problem(
                code="plan-only", key=key, what=what, got=got, why=why, fix=fix
            )


def _uncut(code: str, spec: ComponentSpec, what: str, why: str, fix: str) -> Problem:
    return Problem(code=code, key=spec.key, what=what, got=spec.text, why=why, fix=fix)


def critic_problems(config: Config) -> Iterator[Problem]:
    """Report what would stop a placed critic after its launch. `config` holds the keys of the model folders."""
    yield from not_run("critic", config.critic)
    actor, critic = (
        (model or {}).get("vocab_size") for model in (config.model, config.critic.model)
    )
    if isinstance(actor, int) and isinstance(critic, int) and critic < actor:
        yield Problem(
            code="critic-vocabulary",
            key="critic.model",
            what="it does not know all tokens of the actor",
            got=f"vocab_size: {critic}, and the actor's is {actor}",
            why="a critic is given the very tokens that were sampled; it needs the actor's vocabulary",
            fix="critic.model: null        (the actor's own, with a new head; or another model with its tokenizer)",
        )
    folder = _existing(config.critic.model)
    head = None if folder is None else value_head_problem(folder, "critic.model.path")
    if head is not None:
        yield head

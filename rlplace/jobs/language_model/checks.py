"""Checks of a language-model job beyond its placement: sampling, models, parallel sizes and weights."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlplace.config.model_folder import GET, no_folder, text_keys, to_get
from rlplace.config.schema import (
    AlgorithmConfig,
    Config,
    FrozenConfig,
    RewardConfig,
    TrainedConfig,
)
from rlplace.contract.checks import undivided_problems
from rlplace.envs.registry import (
    missing_library,
)
from rlplace.errors import (
    ConfigError,
    Problem,
)
from rlplace.jobs.notes import missing_problems
from rlplace.models.families import why_not_trained
from rlplace.models.heads import unread_weights
from rlplace.placement.language.spec import role_of
from rlplace.placement.plan import Plan
from rlplace.workers.roles.checks import (
    check_scorers,
    critic_problems,
    cut_problems,
    not_run,
    sight_problems,
)


def plan_problems(config: Config, plan: Plan) -> Iterator[Problem]:
    """Report what would stop a run of the planned job on any machine."""
    if not config.runs:
        yield from missing_problems(config)
        return
    yield from undivided_problems(plan, ("env",), "it has no model")
    rollout = config.text_rollout
    algorithm = config.algorithm
    actor = config.actor
    yield from not_run("actor", actor)
    if "critic" in config.placed:
        yield from critic_problems(config)
    try:
        yield from check_scorers(config, plan.placement.components)
    # e.g. tokenizers, which are loaded to compare them
    except ModuleNotFoundError as error:
        why = f"there is no module {error.name}"
        yield from missing_library(
            why, got="tokenizer.json", extra="text", key="reward", of="the models"
        ).problems
    each = max(
        (s.accelerators_per_rank for s in plan.placement.spec("rollout").segments),
        default=1,
    )
    yield from model_problems(
        text_keys(config.model or {}), rollout.engine, algorithm, tensor_parallel=each
    )
    if actor.sync.mode == "lora" and actor.lora_rank is None:
        what = "factors alone cannot be sent: there are none"
        why = "actor.lora_rank is null, so all weights are trained, and engines would never see it"
        yield _wrong(
            "no-factors",
            "actor.sync.mode",
            what,
            "mode: lora",
            why,
            "mode: all        (or actor.lora_rank: 16)",
        )
    yield from _parallel_problems(config, plan)
    yield from _family_problems(config, plan)
    yield from sight_problems(config, plan.placement)
    if (
        not rollout.own
        and rollout.cache != rollout.dtype
        and (rollout.cache, rollout.engine) != ("fp8", "vllm")
    ):
        what = f"{rollout.engine} keeps no {rollout.cache} keys and values of a {rollout.dtype} model"
        why = "attention reads them as they are computed, or as fp8 in vllm; answers would be wrong without an error"
        if rollout.cache == "fp8":
            why = "fp8 needs vllm; answers would be wrong without an error"
        got = f"cache_dtype: {rollout.cache}"
        fix = f"cache_dtype: {rollout.dtype}        (or null: as dtype)"
        yield _wrong("cache-dtype", "rollout.cache_dtype", what, got, why, fix)
    if rollout.workspace_memory is not None and not rollout.own:
        what = "is said by engines of your own"
        got = f"workspace_memory: {rollout.workspace_memory}"
        why = f"the plan counts what a step of {rollout.engine} takes"
        fix = "workspace_memory: null"
        yield _wrong("wrong-kind", "rollout.workspace_memory", what, got, why, fix)
    yield from _sampling_problems(config)
    if rollout.engine_args and rollout.engine == "transformers":
        got = ", ".join(rollout.engine_args)
        why = f"{rollout.engine} takes none of them"
        fix = "engine_args: {}        (or rollout.engine: vllm)"
        yield _wrong(
            "engine-args",
            "rollout.engine_args",
            "are arguments of vLLM's engine",
            got,
            why,
            fix,
        )
    limits = algorithm.max_prompt_length + algorithm.max_new_tokens
    if algorithm.longest < limits:
        what = f"shorter than the longest prompt and answer, {limits} tokens together"
        got = f"sequence_length: {algorithm.longest}"
        why = "it is below max_prompt_length + max_new_tokens"
        fix = f"sequence_length: {limits}"
        yield _wrong(
            "context-too-short", "algorithm.sequence_length", what, got, why, fix
        )


def _sampling_problems(config: Config) -> Iterator[Problem]:
    """Report sampling settings with which the actor cannot learn, or with which answers cannot end."""
    rollout = config.text_rollout
    algorithm = config.algorithm
    for name, cut in (("top_p", rollout.top_p < 1), ("top_k", rollout.top_k > 0)):
        if cut and rollout.temperature > 0:
            what = "answers drawn from a part of the vocabulary cannot be learned from"
            why = "the engine's probabilities are of what is left, the actor's of all: every ratio of the two is wrong"
            fix = f"{name}: {1.0 if name == 'top_p' else 0}        (a lower temperature narrows the draw as well)"
            got = f"{name}: {getattr(rollout, name)}"
            yield _wrong("cut-distribution", f"rollout.{name}", what, got, why, fix)
    if algorithm.tis_cap is None:
        # Penalties change greedy answers too.
        for name, value in rollout.penalties.items():
            what = "penalised answers cannot be learned from without algorithm.tis_cap"
            why = "the engine's probabilities are penalised, the actor's are not: every ratio of the two is wrong\n"
            why += "with it, ratios are of the actor's own, and weights correct for what the engine drew"
            off = 1.0 if name == "repetition_penalty" else 0
            fix = f"algorithm.tis_cap: 2.0        (or {name}: {off})"
            yield _wrong(
                "cut-distribution",
                f"rollout.{name}",
                what,
                f"{name}: {value}",
                why,
                fix,
            )
    yield from _correction_problems(algorithm)
    if rollout.min_tokens > algorithm.max_new_tokens:
        got = f"min_tokens: {rollout.min_tokens}"
        why = "an answer may not end before it, and has to end there"
        what = "longer than the longest answer"
        fix = f"min_tokens: {algorithm.max_new_tokens}"
        yield _wrong("context-too-short", "rollout.min_tokens", what, got, why, fix)
    if "" in rollout.stop:
        what = "a text that ends answers has no characters"
        got = "''"
        why = "it would end each answer at once"
        yield _wrong(
            "stop-text", "rollout.stop", what, got, why, "stop: []        (or a text)"
        )


def _correction_problems(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    cap = algorithm.tis_cap
    floor = algorithm.tis_floor
    usual = {"tis_level": "token", "tis_above": "cap", "tis_floor": None}
    set_here = [
        name for name, value in usual.items() if getattr(algorithm, name) != value
    ]
    if cap is None and set_here:
        what = "corrects nothing where there is no cap"
        got = f"{set_here[0]}: {getattr(algorithm, set_here[0])}"
        why = "tis_cap is null: tokens are not weighed"
        yield _wrong(
            "roles-contradict",
            f"algorithm.{set_here[0]}",
            what,
            got,
            why,
            "algorithm.tis_cap: 2.0",
        )
    if cap is not None and floor is not None and floor >= cap:
        what = "leaves no weight to learn from"
        why = f"weights are above tis_floor and at most tis_cap, {cap:g}"
        yield _wrong(
            "roles-contradict",
            "algorithm.tis_floor",
            what,
            f"{floor:g}",
            why,
            f"tis_floor: {cap / 4:g}",
        )
    if algorithm.surrogate == "cispo" and algorithm.dual_clip is not None:
        what = "bounds nothing of this loss"
        got = f"dual_clip: {algorithm.dual_clip:g}"
        why = "it bounds the loss of clipped ratios; with cispo weights are clipped on both sides"
        yield _wrong(
            "roles-contradict", "algorithm.dual_clip", what, got, why, "dual_clip: null"
        )


def _wrong(
    code: str, key: str, what: str, got: str | None, why: str, fix: str
) -> Problem:
    return Problem(code=code, key=key, what=what, got=got, why=why, fix=fix)


def model_problems(
    model: Mapping[str, object],
    engine: str,
    algorithm: AlgorithmConfig,
    *,
    tensor_parallel: int,
) -> Iterator[Problem]:
    """Report what an engine does not support. `model`: the content of its config.json."""
    context = algorithm.longest
    window = (
        model.get("sliding_window") if model.get("use_sliding_window", True) else None
    )
    if engine == "transformers" and isinstance(window, int) and window < context:
        what = f"its layers see {window} tokens, of {context} of prompt and answer together"
        got = engine
        why = "this engine keeps every token of an answer in the cache of every layer"
        yield _wrong(
            "attention-not-full",
            "rollout.engine",
            what,
            got,
            why,
            "rollout.engine: vllm",
        )
    heads = model.get("num_attention_heads")
    if isinstance(heads, int) and heads % tensor_parallel:
        fitting = max(
            size for size in range(1, tensor_parallel + 1) if heads % size == 0
        )
        what = f"{heads} attention heads cannot be shared by {tensor_parallel} accelerators of an engine"
        got = f"{tensor_parallel} accelerators for each rank"
        why = "each accelerator of an engine computes the same number of heads"
        fix = f"{fitting} for each rank, as in {{placement: 0-{fitting - 1}, accelerators_per_rank: {fitting}}}"
        yield _wrong(
            "tensor-parallel-heads",
            "cluster.component_placement.rollout",
            what,
            got,
            why,
            fix,
        )
    longest = model.get("max_position_embeddings")
    if isinstance(longest, int) and context > longest:
        what = f"the model reads at most {longest} tokens"
        got = f"{context} tokens of prompt and answer together"
        why = "max_position_embeddings in the model's config.json"
        left = longest - algorithm.max_prompt_length
        fix = f"algorithm.sequence_length={longest}        (and max_prompt_length + max_new_tokens no more than that)"
        if algorithm.sequence_length is not None:
            fix = f"algorithm.sequence_length={longest}"
        elif left > 0:
            fix = f"algorithm.max_new_tokens={left}        (prompts may have {algorithm.max_prompt_length})"
        yield _wrong("context-too-long", "rollout", what, got, why, fix)


def _parallel_problems(config: Config, plan: Plan) -> Iterator[Problem]:
    """Report parallel sizes that a run does not support.

    An engine has one rank; every other rank has one accelerator.
    """
    engine = config.text_rollout.engine
    for component in plan.placement.components:
        spec = plan.placement.spec(component)
        each = {segment.accelerators_per_rank for segment in spec.segments}
        declared = spec.parallel.tensor_parallel_size
        most = max(each, default=1)
        if component == "rollout" and spec.parallel.context_parallel_size > 1:
            what = "engines do not have the tokens of a prompt between them"
            why = "each computes all of its prompts"
            fix = f"no context_parallel_size        (or accelerators_per_rank: {spec.parallel.context_parallel_size})"
        elif component == "rollout" and declared > 1 and each != {declared}:
            what = f"{declared} ranks for one engine are planned, not run"
            why = "in a run one rank drives each engine, on all of its accelerators"
            fix = f"accelerators_per_rank: {declared}        (instead of tensor_parallel_size)"
        elif component == "rollout" and engine != "vllm" and most > 1:
            what = (
                f"{most} accelerators for one engine are planned, not run, by {engine}"
            )
            why = "this engine computes on one accelerator; vllm shares a model over several"
            fix = "rollout.engine: vllm        (or one accelerator for each rank)"
        elif role_of(component) not in ("rollout", "env", "agent") and most > 1:
            what = (
                f"{most} accelerators for one rank of this model are planned, not run"
            )
            why = "in a run each rank of it computes on one accelerator; several ranks can have a copy between them"
            fix = f"tensor_parallel_size: {most}        (instead of accelerators_per_rank)"
        elif (
            role_of(component) not in ("rollout", "env", "agent")
            and spec.parallel.ranks > 1
        ):
            yield from cut_problems(config, spec)
            continue
        else:
            continue
        yield _wrong("plan-only", spec.key, what, spec.text, why, fix)


def _family_problems(config: Config, plan: Plan) -> Iterator[Problem]:
    """Report model families that no worker supports, and quantized files, whose codes would be read as weights."""
    for component in plan.placement.components:
        block = config.block_of(component)
        model = (
            block.model if isinstance(block, (TrainedConfig, FrozenConfig)) else None
        )
        if not isinstance(model, Mapping):
            continue
        key = f"{config.key_of(component)}.model"
        family = str(model.get("model_type"))
        if (why := why_not_trained(model, config.algorithm.longest)) is not None:
            what = f"a {family} is planned, not run"
            fix = "path: <the folder of another model, such as a qwen3 or llama>"
            yield _wrong("plan-only", key, what, f"model_type: {family}", why, fix)
        if isinstance(quantised := model.get("quantization_config"), Mapping):
            method = quantised.get("quant_method")
            fix = "path: <the folder of the same model, not quantised>"
            what = "quantised weights are planned, not run"
            why = f"its config.json says quant_method: {method}"
            yield _wrong("plan-only", key, what, str(method), why, fix)


def launch_problems(config: Config, plan: Plan) -> Iterator[Problem]:
    """Report what this machine lacks for a run: engine libraries, weights or a tokenizer."""
    if config.text_rollout.engine == "vllm":
        from rlplace.workers.engines.contract import engine_args_problems, vllm_problem

        problem = vllm_problem(
            "emulated" if plan.topology.nodes[0].kind == "emulated" else "gpu"
        )
        if problem is not None:
            yield problem
        else:
            yield from engine_args_problems(config.text_rollout.engine_args)
    yield from _actor_problems(config)
    for component in plan.placement.components:
        block = config.block_of(component)
        if (
            isinstance(block, RewardConfig)
            and block.url is not None
            and importlib.util.find_spec("urllib3") is None
        ):
            key = f"{config.key_of(component)}.url"
            why = "there is no module urllib3"
            yield from missing_library(
                why, got=block.url, extra="text", key=key, of="the endpoint"
            ).problems
        if component != "actor" and isinstance(block, (TrainedConfig, FrozenConfig)):
            path = block.model.get("path") if isinstance(block.model, Mapping) else None
            if path is not None:
                yield from _weights_problems(
                    Path(str(path)), f"{config.key_of(component)}.model.path"
                )


def _actor_problems(config: Config) -> Iterator[Problem]:
    """Check the actor's weights, and tokenize every prompt that is known in advance with the model's own tokenizer."""
    model = config.model or {}
    written = model.get("path")
    vocabulary = text_keys(model).get("vocab_size")
    key = "actor.model.path"
    if not isinstance(written, str):
        why = "weights, tokenizer and chat template are read from there; keys of its config.json can only be planned"
        fix = "path: models/smollm2        (any Hugging Face folder; scripts/get_model smollm2 makes this one)"
        yield _wrong("missing-key", key, "is required in a run", None, why, fix)
        return
    folder = Path(written)
    yield from _weights_problems(folder, key)
    if not os.path.isdir(folder):
        return
    from rlplace.models.tokenizer import Tokenizer
    from rlplace.workers.roles.prompts import check_prompts

    try:
        tokenizer = Tokenizer.load(folder)
    except ConfigError as error:
        yield from error.problems
        return
    if config.text_env.max_turns > 1 and not any(
        tokenizer.stops(config.text_rollout.stop)
    ):
        what = "no answer is followed by another turn"
        got = f"max_turns: {config.text_env.max_turns}"
        why = "answers end at an eos_token, which no file of the model names; one that is cut ends its episode"
        fix = "rollout.stop=['<a text>']        (or name the eos_token in tokenizer_config.json; or env.max_turns=1)"
        yield _wrong("nothing-ends", "env.max_turns", what, got, why, fix)
    for text in config.text_rollout.stop:
        if (special := tokenizer.special_within(text)) is not None:
            what = "never ends an answer"
            why = f"{special} is a token by itself, which the text of an answer leaves out"
            yield _wrong(
                "stop-text",
                "rollout.stop",
                what,
                repr(text),
                why,
                f"stop: ['{special}']",
            )
    size = tokenizer.size
    if isinstance(vocabulary, int) and size > vocabulary:
        what = f"the tokenizer knows {size} tokens, the model {vocabulary}"
        why = f"a prompt may hold ids that the model of {folder / 'config.json'} has no weights for"
        yield _wrong(
            "not-a-model",
            key,
            what,
            written,
            why,
            "the tokenizer that the model was trained with",
        )
    yield from check_prompts(config, folder)


def _weights_problems(folder: Path, key: str) -> Iterator[Problem]:
    if not os.path.isdir(folder):
        # Show the path as it was written; a hub id is not a local folder.
        here = Path.cwd()
        yield no_folder(
            str(folder.relative_to(here) if folder.is_relative_to(here) else folder),
            key,
        )
    elif not any(folder.glob("*.safetensors")):
        what = "the model has no weights"
        fix = 'model.save_pretrained("<folder>") in transformers writes them'
        if (download := to_get(folder)) != GET:
            fix = download
        why = f"{folder} has no *.safetensors, from which its weights are read"
        yield _wrong("not-a-model", key, what, str(folder), why, fix)
    elif (unread := unread_weights(folder)) is not None:
        what = "the model cannot be read from its folder"
        fix = "save or download it anew, all of its files"
        yield _wrong("model-weights", key, what, str(folder), unread, fix)

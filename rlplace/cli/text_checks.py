"""What a job with a language model needs beside a placement: a task, engines that can do it, whole models."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from rlplace.config import Config, FrozenConfig, TrainedConfig
from rlplace.config.model_folder import no_folder, not_a_model
from rlplace.envs.registry import check_task
from rlplace.errors import ConfigError, Problem, Source, source_of
from rlplace.models.tokenizer import Tokenizer
from rlplace.placement.language.spec import role_of
from rlplace.placement.plan import Plan
from rlplace.workers.engines import vllm_support
from rlplace.workers.roles.critic import critic_problems
from rlplace.workers.roles.prompts import check_prompts
from rlplace.workers.roles.scorer_text import check_scorers
from rlplace.workers.training.worker import not_run

_SIMULATORS = ("env", "agent")  # roles without a model


def check_launch(config: Config, layout: Plan, sources: Mapping[str, Source]) -> list[Problem]:
    """What a machine must have to run this plan: the engine's library, weights, a tokenizer that takes the prompts."""
    problems: list[Problem] = []
    if config.text_rollout.engine == "vllm":
        kind = "emulated" if layout.topology.nodes[0].kind == "emulated" else "gpu"
        problem = vllm_support.installation_problem(vllm_support.installed(), kind)
        problems += [problem] if problem is not None else []
    problems += _check_folder(config, sources)
    problems += _check_own_models(config, layout, sources)
    return [_placed(p, sources) for p in problems]


def missing_in_a_run(config: Config, sources: Mapping[str, Source]) -> list[Problem]:
    """The keys that a run of this job needs beside those of a plan."""
    return [
        Problem(
            code="plan-only",
            key=key,
            what="is required in a run",
            source=sources.get(key),
            why=f"{why}; without it the job is planned only",
            fix=f"{fix}        (or only plan: dry_run: true)",
        )
        for key, (why, fix) in config.missing.items()
    ]


def check_text_job(config: Config, layout: Plan, sources: Mapping[str, Source]) -> list[Problem]:
    """What is wrong without regard to a machine: task and rewards, context, the engines' shares of the model."""
    runner, engines = config.runner, layout.placement.spec("rollout")
    problems = list(check_task(config.text_env, seed=runner.seed, evaluated=runner.eval_every > 0))
    problems += not_run("actor", config.actor)
    problems += critic_problems(config) if "critic" in config.placed else []
    problems += check_scorers(config, layout.placement.components)
    each = max((s.accelerators_per_rank for s in engines.segments), default=1)
    model, context = config.model or {}, config.algorithm.longest
    problems += vllm_support.model_problems(model, context=context, tensor_parallel=each)
    problems += _check_factors(config)
    problems += _check_parallel(layout)
    cache = vllm_support.cache_problem(config.text_rollout.engine, config.text_rollout.dtype, config.text_rollout.cache)
    problems += [cache] if cache is not None else []
    if config.text_rollout.engine == "transformers" and each > 1:
        problems.append(_one_each(engines.render(), each))
    limits = config.algorithm.max_prompt_length + config.algorithm.max_new_tokens
    if config.algorithm.longest < limits:
        problems.append(
            Problem(
                code="context-too-short",
                key="algorithm.sequence_length",
                what=f"shorter than the longest prompt and answer, {limits} tokens together",
                got=f"sequence_length: {config.algorithm.longest}",
                why=f"max_prompt_length {config.algorithm.max_prompt_length} + "
                f"max_new_tokens {config.algorithm.max_new_tokens} = {limits}",
                fix=f"sequence_length: {limits}",
            )
        )
    return [_placed(p, sources) for p in problems]


def _check_own_models(config: Config, layout: Plan, sources: Mapping[str, Source]) -> list[Problem]:
    """Folders with weights, of the models that components have of their own."""
    problems: list[Problem] = []
    for component in layout.placement.components:
        block = config.block_of(component)
        if component != "actor" and isinstance(block, (TrainedConfig, FrozenConfig)):
            path = ((block.model if isinstance(block.model, Mapping) else None) or {}).get("path")
            key = f"{config.key_of(component)}.model.path"
            problems += [] if path is None else _without_weights(Path(str(path)), key, sources)
    return list(dict.fromkeys(problems))  # components may share a block


def _without_weights(folder: Path, key: str, sources: Mapping[str, Source]) -> list[Problem]:
    if not folder.is_dir():
        return [no_folder(folder, str(folder), sources, key)]
    if any(folder.glob("*.safetensors")):
        return []
    what, fix = "the model has no weights", 'model.save_pretrained("<folder>") in transformers writes them'
    why = f"{folder} has no *.safetensors, from which its weights are read"
    return [not_a_model(what, str(folder), why, fix, sources, key)]


def _check_folder(config: Config, sources: Mapping[str, Source]) -> list[Problem]:
    """Weights for the actor, and every prompt that can be known, as the model's own tokenizer and template have it."""
    written = (config.model or {}).get("path")
    if not isinstance(written, str):
        return [_no_path()]
    folder = Path(written)
    if not folder.is_dir():
        return [no_folder(folder, written, sources)]
    problems = _without_weights(folder, "actor.model.path", sources)
    try:
        size = Tokenizer.load(folder).size
    except ConfigError as error:
        return [*problems, *error.problems]
    vocabulary = (config.model or {}).get("vocab_size")
    if isinstance(vocabulary, int) and size > vocabulary:
        what = f"the tokenizer knows {size} tokens, the model {vocabulary}"
        why = f"a prompt may hold ids that the model of {folder / 'config.json'} has no weights for"
        problems.append(not_a_model(what, written, why, "the tokenizer that the model was trained with", sources))
    return [*problems, *check_prompts(config, folder)]


def _check_factors(config: Config) -> list[Problem]:
    actor = config.actor
    if actor.sync.mode != "lora" or actor.lora_rank is not None:
        return []
    return [
        Problem(
            code="no-factors",
            key="actor.sync.mode",
            what="factors alone cannot be sent: there are none",
            got="mode: lora",
            why="actor.lora_rank is null, so all weights are trained, and engines would never see it",
            fix="mode: all        (or actor.lora_rank: 16)",
        )
    ]


def _check_parallel(layout: Plan) -> list[Problem]:
    """One rank drives an engine, on all of its accelerators; of other models each rank has one accelerator."""
    problems: list[Problem] = []
    for component in layout.placement.components:
        spec = layout.placement.spec(component)
        declared, each = spec.parallel.tensor_parallel_size, {s.accelerators_per_rank for s in spec.segments}
        if component == "rollout" and declared > 1 and each != {declared}:
            what = f"{declared} ranks for one engine are planned, not run"
            why = "in a run one rank drives each engine, on all of its accelerators"
            fix = f"accelerators_per_rank: {declared}        (instead of tensor_parallel_size)"
        elif component != "rollout" and role_of(component) not in _SIMULATORS and max(declared, *each, 1) > 1:
            what = f"{max(declared, *each)} accelerators for one slice of a model are planned, not run"
            why = "a run shards this model over its ranks, of which each computes on one accelerator"
            fix = "one accelerator for each rank: no tensor_parallel_size, no accelerators_per_rank"
        else:
            continue
        problems.append(Problem(code="plan-only", key=spec.key, what=what, got=spec.text, why=why, fix=fix))
    return problems


def _no_path() -> Problem:
    return Problem(
        code="missing-key",
        key="actor.model.path",
        what="is required in a run",
        why="weights, tokenizer and chat template are read from there; keys of its config.json alone can be planned",
        fix="path: models/smollm2        (any Hugging Face folder; scripts/get_model smollm2 makes this one)",
    )


def _one_each(placed: str, each: int) -> Problem:
    return Problem(
        code="plan-only",
        key="cluster.component_placement.rollout",
        what=f"{each} accelerators for one engine are planned, not run, by transformers",
        got=placed,
        why="this engine computes on one accelerator; vllm shares a model over several",
        fix="rollout.engine: vllm        (or one accelerator for each rank)",
    )


def _placed(problem: Problem, sources: Mapping[str, Source]) -> Problem:
    """With the place in the config, where the check did not know it."""
    if problem.source is not None:
        return problem
    return dataclasses.replace(problem, source=source_of(problem.key, sources))

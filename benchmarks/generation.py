"""Generated tokens per second of the vLLM engine as a rollout rank steps it, against vLLM's own `LLM.generate`.

    python benchmarks/generation.py [folder of a model] [prompts] [new tokens] [repetitions]

Same model, prompts, sampling and log-probabilities, in interleaved pairs within one process, the order of a pair
alternating. Both clocks are reported: seconds of the wall, and CPU seconds of this process, in which a busy machine
counts less. Without a folder a small model with random weights is made. Goal: a median ratio of at least 0.97 of vLLM
alone, by the wall with a GPU and by CPU seconds without. Neither schedules a step while the one before is computed
(vLLM's async_scheduling, which it has with a GPU unless it is told otherwise): each token is to have the version of the
weights that it was drawn by. What that costs is not in the ratio.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlplace.config.blocks.language_model import TextRolloutConfig
from rlplace.placement.schedule import Residency
from rlplace.tokens import Request
from rlplace.workers.engines.contract import TORCH_NAMES, EngineSettings
from rlplace.workers.engines.vllm import VllmEngine
from rlplace.workers.launch.devices import CudaDevice, Device

PROMPT_TOKENS = 32
SEQUENCES = 32
CACHE_BYTES = 256 << 20


def small_model(folder: Path) -> Path:
    """Qwen3, 34 million weights."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def stored_weights(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {
        name: weight
        for file in sorted(folder.glob("*.safetensors"))
        for name, weight in load_file(file).items()
    }


def stepped(engine: VllmEngine, prompts: list[list[int]], new: int) -> int:
    """Generated tokens."""
    for number, prompt in enumerate(prompts):
        engine.submit(
            Request(
                env_rank=0,
                iteration=0,
                group=number,
                first_sample=0,
                samples=1,
                turn=0,
                tokens=np.array(prompt, np.int32),
                max_new_tokens=new,
            )
        )
    tokens = 0
    while engine.in_flight:
        tokens += sum(len(completion.tokens) for completion in engine.step())
    return tokens


def alone(llm: Any, prompts: list[list[int]], new: int) -> int:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    sampling = SamplingParams(max_tokens=new, logprobs=0, ignore_eos=True)
    answers = llm.generate(
        [TokensPrompt(prompt_token_ids=p) for p in prompts], sampling, use_tqdm=False
    )
    return sum(len(answer.outputs[0].token_ids) for answer in answers)


class Rates(NamedTuple):
    """Generated tokens per second of the wall, and per CPU second of this process."""

    wall: float
    cpu: float


def rates(generate: Callable[[], int]) -> Rates:
    wall = time.perf_counter()
    cpu = time.process_time()
    tokens = generate()
    return Rates(
        tokens / (time.perf_counter() - wall), tokens / (time.process_time() - cpu)
    )


def compare(
    folder: Path,
    prompts: list[list[int]],
    new: int,
    repetitions: int,
    dtype: Literal["fp32", "bf16"] = "fp32",
) -> dict[str, float]:
    """Return the median ratio by clock."""
    device: Device = CudaDevice() if torch.cuda.is_available() else Device()
    context = PROMPT_TOKENS + new
    rollout = TextRolloutConfig(
        dtype=dtype,
        kv_cache_memory=CACHE_BYTES,
        step_tokens=2048,
        step_sequences=SEQUENCES,
        enforce_eager=True,
    )
    settings = EngineSettings(rollout=rollout, model=folder, context=context)
    engine = VllmEngine(settings, device=device, owner="rollout rank 0")
    engine.move(Residency.FULL)
    engine.load(stored_weights(folder), 0)
    from vllm import LLM

    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype=TORCH_NAMES[dtype],
        enforce_eager=True,
        max_model_len=context,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=CACHE_BYTES,
        async_scheduling=False,
    )
    ours: list[Rates] = []
    theirs: list[Rates] = []
    for pair in range(repetitions + 1):  # the first one warms up
        turns = [
            (ours, lambda: stepped(engine, prompts, new)),
            (theirs, lambda: alone(llm, prompts, new)),
        ]
        for found, generate in turns if pair % 2 else reversed(turns):
            found.append(rates(generate))
    print(f"{len(prompts)} prompts x {new} new tokens, {repetitions} pairs:")
    engine.close()
    return {
        clock: print_pairs(
            clock,
            [getattr(r, clock) for r in ours[1:]],
            [getattr(r, clock) for r in theirs[1:]],
        )
        for clock in Rates._fields
    }


def print_pairs(clock: str, ours: list[float], theirs: list[float]) -> float:
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    print(
        f"  {clock}: VllmEngine {statistics.median(ours):,.0f}, LLM.generate {statistics.median(theirs):,.0f} tokens/s"
    )
    print(
        f"    ratio {middle:.3f}, quartiles {low:.3f}-{high:.3f}, all {ratios[0]:.3f}-{ratios[-1]:.3f}     goal: 0.97"
    )
    return middle


def main(arguments: list[str]) -> None:
    folder = Path(arguments[0]) if arguments else None
    numbers = [int(a) for a in arguments[1:]]
    count, new, repetitions = [*numbers, *(16, 64, 9)[len(numbers) :]]
    draws = np.random.default_rng(0)
    prompts = [draws.integers(3, 300, PROMPT_TOKENS).tolist() for _ in range(count)]
    with tempfile.TemporaryDirectory() as temporary:
        compare(folder or small_model(Path(temporary)), prompts, new, repetitions)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Generated tokens per second of the vLLM engine as a rollout rank steps it, against vLLM's own `LLM.generate`.

    python benchmarks/generation.py [folder of a model] [prompts] [new tokens] [repetitions]

Same model, prompts, sampling and log-probabilities, in turns within one process. Without a GPU the seconds are those of
this process's processor, so that a busy machine does not count. Without a folder a small model with random weights is
made. Goal: at least 0.9 of vLLM alone.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlplace.config.schema import TextRolloutConfig
from rlplace.placement.schedule import Residency
from rlplace.tokens import Request
from rlplace.workers.engines.contract import EngineSettings
from rlplace.workers.engines.vllm import VllmEngine
from rlplace.workers.launch.devices import CudaDevice, Device

PROMPT_TOKENS, SEQUENCES, CACHE_BYTES = 32, 32, 256 << 20


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

    return {name: weight for file in sorted(folder.glob("*.safetensors")) for name, weight in load_file(file).items()}


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
    answers = llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], sampling, use_tqdm=False)
    return sum(len(answer.outputs[0].token_ids) for answer in answers)


def rate(generate: Callable[[], int]) -> float:
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    began = clock()
    tokens = generate()
    return tokens / (clock() - began)


def compare(folder: Path, prompts: list[list[int]], new: int, repetitions: int) -> None:
    device: Device = CudaDevice() if torch.cuda.is_available() else Device()
    context = PROMPT_TOKENS + new
    rollout = TextRolloutConfig(
        dtype="fp32", kv_cache_memory=CACHE_BYTES, step_tokens=2048, step_sequences=SEQUENCES, enforce_eager=True
    )
    settings = EngineSettings(rollout=rollout, model=folder, context=context)
    engine = VllmEngine(settings, device=device, owner="rollout rank 0")
    engine.move(Residency.FULL)
    engine.load(stored_weights(folder), 0)
    from vllm import LLM

    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=context,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=CACHE_BYTES,
    )
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(repetitions + 1):  # the first one warms up
        ours.append(rate(lambda: stepped(engine, prompts, new)))
        theirs.append(rate(lambda: alone(llm, prompts, new)))
    ratio = statistics.median(a / b for a, b in zip(ours[1:], theirs[1:], strict=True))
    print(f"{len(prompts)} prompts x {new} new tokens, best and median of {repetitions}:")
    for name, rates in (("VllmEngine", ours[1:]), ("LLM.generate", theirs[1:])):
        print(f"    {name:<14} {max(rates):>9,.0f} {statistics.median(rates):>9,.0f} tokens/s")
    print(f"    ratio          {max(ours[1:]) / max(theirs[1:]):>9.2f} {ratio:>9.2f}     goal: at least 0.90")
    engine.close()


def main(arguments: list[str]) -> None:
    folder = Path(arguments[0]) if arguments else None
    numbers = [int(a) for a in arguments[1:]]
    count, new, repetitions = [*numbers, *(16, 64, 5)[len(numbers) :]]
    draws = np.random.default_rng(0)
    prompts = [draws.integers(3, 300, PROMPT_TOKENS).tolist() for _ in range(count)]
    with tempfile.TemporaryDirectory() as temporary:
        compare(folder or small_model(Path(temporary)), prompts, new, repetitions)


if __name__ == "__main__":
    main(sys.argv[1:])

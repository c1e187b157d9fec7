"""Language models of real sizes with random weights, written in seconds: for measurements that no weight changes.

The file is made of one block of random numbers, over and over: to draw 8 billion of them would take longer than the
measurement. Norms are ones. Real: every shape, and so every byte and every operation.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.placement.memory.model import read_model

_BLOCK_ELEMENTS = 1 << 24
_DEVIATION = 0.02  # of random weights, as models are initialised
_COMMON: Mapping[str, object] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151_936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40_960,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
# Source: config.json of these models at huggingface.co/Qwen.
SIZES: Mapping[str, Mapping[str, object]] = {
    "Qwen3-0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen3-1.7B": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen3-4B": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "emulated": {  # for a CPU that stands in
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "vocab_size": 8192,
        "tie_word_embeddings": True,
    },
}


def model_config(size: str) -> dict[str, Any]:
    """Return the keys of config.json. `size`: a key of SIZES."""
    return {**_COMMON, **SIZES[size]}


def random_model(folder: Path, size: str) -> Path:
    """Write config.json and model.safetensors (bfloat16) into `folder`, without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model_config(size)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shapes = _weight_shapes(config)
    draws = np.random.default_rng(0)
    block = _as_bfloat16(
        draws.normal(0.0, _DEVIATION, _BLOCK_ELEMENTS).astype(np.float32)
    )
    with (folder / "model.safetensors").open("wb") as file:
        file.write(_header(shapes))
        for shape in shapes.values():
            _write_weight(
                file.write, math.prod(shape), None if len(shape) == 1 else block
            )
    return folder


def parameters(size: str) -> int:
    """Return how many numbers the model has; a tied head counts once."""
    return read_model(model_config(size)).parameters


def _weight_shapes(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Return names and shapes as transformers' Qwen3ForCausalLM has them, without allocating any."""
    import torch
    import transformers

    with torch.device("meta"):
        keys: dict[str, Any] = {**config, "dtype": "bfloat16"}
        settings = transformers.AutoConfig.for_model(**keys)
        model = transformers.AutoModelForCausalLM.from_config(settings)
    return {name: tuple(weight.shape) for name, weight in model.named_parameters()}


def _header(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """Return the head of a safetensors file: its length, then JSON."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, shape in shapes.items():
        end = begin + 2 * math.prod(shape)
        described[name] = {
            "dtype": "BF16",
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write_weight(
    write: Callable[[bytes], object], elements: int, block: bytes | None
) -> None:
    if block is None:
        write(_as_bfloat16(np.ones(elements, np.float32)))
        return
    for start in range(0, elements, _BLOCK_ELEMENTS):
        write(block[: 2 * min(_BLOCK_ELEMENTS, elements - start)])


def _as_bfloat16(values: NDArray[np.float32]) -> bytes:
    """Return the upper halves of float32 numbers."""
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()

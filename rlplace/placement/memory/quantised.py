"""Read a `quantization_config`: bits per number, and which weights are not quantised."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any


def excepted(name: str, kept: Sequence[str]) -> bool:
    """Return whether the weight `name` is excluded from quantisation.

    `kept`: the exclusions. Each is a name of a weight or module, a part of a name, or a pattern that begins with "re:".
    """
    layers = (
        re.sub(r"\.\d+(?=\.|$)", ".*", entry)
        for entry in kept
        if not entry.startswith("re:")
    )
    patterns = (entry.removeprefix("re:") for entry in kept if entry.startswith("re:"))
    return any(f".{layer}." in f".{name}" for layer in layers) or any(
        re.search(p, name) for p in patterns
    )


def bits_of(quantised: Mapping[str, Any]) -> float:
    """Return the bits per number of quantised weights, scales and zero points included; 0 if not known.

    `quantised`: the `quantization_config` of a config.json. Sources: the documentation of each format that transformers
    5 reads.
    """
    group = quantised.get("group_size")
    match str(quantised.get("quant_method")).replace("-", "_"):
        case "fp8":
            rows, columns = quantised.get("weight_block_size") or (1, math.inf)
            return float(8 + 32 / (rows * columns))
        case "mxfp4":
            return 4 + 8 / 32
        case "bitsandbytes" if quantised.get("load_in_4bit"):
            return 4 + (
                8 / 64 + 32 / (64 * 256)
                if quantised.get("bnb_4bit_use_double_quant")
                else 32 / 64
            )
        case "bitsandbytes":
            return 8
        case "gptq" | "awq" if isinstance(bits := quantised.get("bits"), int):
            return bits + (
                (16 + bits) / group if isinstance(group, int) and group > 0 else 0
            )
        case "compressed_tensors" if groups := quantised.get("config_groups"):
            weights = next(iter(groups.values())).get("weights") or {}
            size = weights.get("group_size")
            return float(weights.get("num_bits") or 0) + (
                16 / size if isinstance(size, int) and size > 0 else 0
            )
        case _:
            return 0

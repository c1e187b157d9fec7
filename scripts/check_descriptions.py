"""`python scripts/check_descriptions.py [MODEL_TYPE ...]`: compare shipped descriptions of families with transformers.

Small models of each family, with widths that are all different, are described twice: by the shipped description and
by transformers. Every weight, what a layer saves for the backward pass, and the KV cache of a token must agree.
Prints what does not. Exit codes: 0 all agree, 1 some do not, 2 wrong usage.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rlplace.models.describe import describe
from rlplace.placement.memory.families import SHIPPED, shipped
from rlplace.placement.memory.layers import Block
from rlplace.placement.memory.letters import Letters
from rlplace.placement.memory.model import ModelShape, read_model, shape_of

# Of no release of transformers
NOT_COMPARED = {"openvla"}
# Kernels for experts want widths that are multiples of 8
_DECODER: dict[str, Any] = {
    "vocab_size": 331,
    "hidden_size": 72,
    "intermediate_size": 88,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
_WINDOWS = {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 3}
_FEWER_KEYS = {"num_key_value_heads": None, "head_dim": None}
_ALTERNATING = [
    "sliding_attention",
    "full_attention",
    "full_attention",
    "sliding_attention",
    "sliding_attention",
]
# Models of each family: keys beside those above. They have windows where transformers lists the layers that have one.
# Mixtures of Qwen are compared without: no published one has windows
MODELS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "llama": (
        {},
        _FEWER_KEYS,
        {"attention_bias": True, "tie_word_embeddings": True},
        {"mlp_bias": True},
    ),
    "mistral": (
        {"sliding_window": None},
        {"sliding_window": None, "tie_word_embeddings": True},
    ),
    "qwen2": (
        {},
        _WINDOWS,
        {"tie_word_embeddings": True, "layer_types": _ALTERNATING, **_WINDOWS},
    ),
    "qwen3": ({}, _WINDOWS, {"attention_bias": True, "tie_word_embeddings": True}),
    "gemma": ({}, {"attention_bias": True, "tie_word_embeddings": False}),
    "gemma2": (
        {},
        {"attention_bias": True, "tie_word_embeddings": False, "sliding_window": 33},
        {"layer_types": _ALTERNATING},
    ),
    "gemma3_text": (
        {"num_hidden_layers": 7},
        {"attention_bias": True, "tie_word_embeddings": False, "sliding_window": 33},
        {"sliding_window_pattern": 2},
    ),
    "phi3": ({}, {"tie_word_embeddings": True, "num_key_value_heads": None}),
    "mixtral": ({"num_local_experts": 7, "num_experts_per_tok": 2},),
    "qwen2_moe": tuple(
        {
            "num_experts": 7,
            "shared_expert_intermediate_size": 56,
            **_EXPERTS,
            **more,
        }
        for more in (
            {},
            {"decoder_sparse_step": 2, "qkv_bias": False},
            {"mlp_only_layers": [3]},
        )
    ),
    "qwen3_moe": tuple(
        {"num_experts": 7, **_EXPERTS, **more}
        for more in (
            {},
            {"decoder_sparse_step": 2, "mlp_only_layers": [3], "attention_bias": True},
        )
    ),
    "gpt2": (
        {
            "vocab_size": 331,
            "n_embd": 72,
            "n_head": 6,
            "n_layer": 3,
            "n_positions": 77,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
        {
            "vocab_size": 331,
            "n_embd": 72,
            "n_head": 6,
            "n_layer": 3,
            "n_positions": 77,
            "n_inner": 88,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
    ),
}
# Numbers of a token that a trace has beside those described: values that are a view keep the whole projection of Phi-3,
# which the measured layer did not hold
_BESIDE = {"phi3": "q + k - h"}


def models_of(family: str) -> Iterator[dict[str, Any]]:
    """Yield the keys of the models that a family is compared by."""
    for more in MODELS[family]:
        common = {} if family == "gpt2" else _DECODER
        yield {"model_type": family, **common, **more}


def differences(keys: Mapping[str, Any]) -> list[str]:
    """Return a line for everything in which the shipped description of a model and that by transformers differ."""
    counted = read_model(keys)
    traced = shape_of(describe(keys), keys)
    found = [f"transformers: {note}" for note in traced.notes]
    for part in ("hidden", "vocabulary", "attention", "layers"):
        ours, theirs = getattr(counted, part), getattr(traced, part)
        if ours != theirs:
            found.append(f"{part}: {ours}, by transformers {theirs}")
    found += _different(_weights(counted), _weights(traced))
    found += _different(_kept(counted), _kept(traced))
    # Kinds of layers are known by the names of their weights
    blocks = {_names(block): block for block in traced.blocks}
    for block in counted.blocks:
        other = blocks.get(_names(block))
        if other is not None:
            found += _saved(block, other, keys)
    return found


def _weights(model: ModelShape) -> dict[str, object]:
    """Return name and number of layers -> shape."""
    return {f"{w.name} of {copies}": w.shape for w, copies in model.weights()}


def _kept(model: ModelShape) -> dict[str, object]:
    kept: dict[str, object] = {}
    for kv in model.kv:
        kept[f"cache of window {kv.window}"] = (kv.layers, kv.heads, kv.numbers)
    return kept


def _names(block: Block) -> frozenset[str]:
    return frozenset(weight.name for weight in block.weights)


def _different(ours: dict[str, object], theirs: dict[str, object]) -> Iterator[str]:
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if ours.get(name) != theirs.get(name):
            yield f"{name}: {ours.get(name)}, by transformers {theirs.get(name)}"


def _saved(block: Block, other: Block, keys: Mapping[str, Any]) -> Iterator[str]:
    """Yield differences of what a layer saves. A trace does not say which of it tensor parallelism cuts."""
    family = str(keys["model_type"])
    letters = Letters(shipped(family)["letters"], keys, "model")
    ours = (
        block.saved.compute + block.saved.compute_cut,
        block.saved.float32 + block.saved.float32_cut,
    )
    theirs = (
        other.saved.compute
        + other.saved.compute_cut
        - letters.value(_BESIDE.get(family, 0)),
        other.saved.float32 + other.saved.float32_cut,
    )
    if ours == theirs:
        return
    # Routers keep some numbers of each expert, and which of them in float32 depends on the family
    experts = [weight.shape[0] for weight in block.weights if weight.met < 1]
    ours_bytes = 2 * ours[0] + 4 * ours[1]
    theirs_bytes = 2 * theirs[0] + 4 * theirs[1]
    if not experts or abs(ours_bytes - theirs_bytes) > 4 * experts[0]:
        yield f"saved numbers, and those in float32: {ours}, by transformers {theirs}"


def main(families: list[str]) -> int:
    compared = [family for family in SHIPPED if family not in NOT_COMPARED]
    unknown = [family for family in families if family not in compared]
    if unknown:
        sys.stderr.write(f"{__doc__}\nMODEL_TYPE is one of {', '.join(compared)}\n")
        return 2
    failed = False
    for family in families or compared:
        for keys in models_of(family):
            for line in differences(keys):
                failed = True
                sys.stdout.write(f"{family}: {line}        {keys}\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

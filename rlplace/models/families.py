"""The families of language models that a run trains and scores with. Needs no torch: a plan asks before the start.

`tests/unit/models/test_families.py` compares a tiny model of each with transformers.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlplace.config.model_folder import text_keys

TRAINED = frozenset(
    [
        "arcee",
        "cohere",
        "cohere2",
        "ernie4_5",
        "exaone4",
        "gemma",
        "gemma3_text",
        "glm",
        "glm4",
        "granite",
        "helium",
        "hunyuan_v1_dense",
        "jais2",
        "llama",
        "ministral",
        "ministral3",
        "mistral",
        "mixtral",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "starcoder2",
    ]
)
# Vision-language models: they read images and write text
VISION_FAMILIES = frozenset(["qwen2_5_vl", "qwen2_vl", "qwen3_vl"])
# Softcapping of scores
_CAPPED = "it caps its scores by a tanh, which attention over packed sequences and the chunks of the head do not"
# Rotary embeddings that depend on the longest sequence of a batch
_LONG = ("dynamic", "longrope")


def why_not_trained(model: Mapping[str, object], context: int) -> str | None:
    """Return why the `model`, given by its config.json, cannot be trained on `context` tokens; None if it can."""
    family = model.get("model_type")
    # Attention to later tokens, as in models for embeddings (EmbeddingGemma)
    if model.get("use_bidirectional_attention") or model.get("is_causal") is False:
        return (
            "its tokens see those behind them, as of a model that embeds texts: it "
            "cannot write one token after another"
        )
    softcaps = ("attn_logit_softcapping", "final_logit_softcapping")
    if family == "gemma2" or any(model.get(key) for key in softcaps):
        return _CAPPED
    if family not in TRAINED | VISION_FAMILIES:
        return (
            "no run has been compared with transformers on this family; it has been on\n"
            + ", ".join(sorted(TRAINED | VISION_FAMILIES))
        )
    # A rotary embedding that follows the batch: right only up to the original length
    model = text_keys(model)
    rope = model.get("rope_parameters") or model.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return None
    if (rope.get("rope_type") or rope.get("type")) in _LONG:
        known = rope.get("original_max_position_embeddings") or model.get(
            "original_max_position_embeddings"
        )
        known = known or model.get("max_position_embeddings")
        if isinstance(known, int) and context > known:
            return (
                f"above {known} tokens its rotary embedding follows the longest "
                f"sequence of a batch, whatever is packed"
            )
    return None

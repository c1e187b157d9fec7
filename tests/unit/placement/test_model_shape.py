"""Parameters counted to the last one, what a layer saves, and configs that cannot be counted."""

from __future__ import annotations

from typing import Any

import pytest

from rlplace.errors import ConfigError
from rlplace.placement.memory.families import SHIPPED
from rlplace.placement.memory.layers import Saved, Weight
from rlplace.placement.memory.model import Head, read_model


def decoder(
    family: str,
    vocabulary: int,
    hidden: int,
    width: int,
    layers: int,
    heads: int,
    keys: int,
    **more: object,
) -> dict[str, Any]:
    return {
        "model_type": family,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        **more,
    }


LLAMA_3_8B = decoder("llama", 128256, 4096, 14336, 32, 32, 8)
MIXED = {
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 2,
}

# Parameters of the language model, and of the backbone with one score, as transformers 5.19.0 makes them on the meta
# device (accelerate 1.15.0); weight by weight, names and shapes agree too. The published totals of the checkpoints are
# the same numbers.
COUNTED: dict[str, tuple[dict[str, Any], int, int]] = {
    "Llama-3-8B": (LLAMA_3_8B, 8_030_261_248, 7_504_928_768),
    "SmolLM2-135M": (
        decoder("llama", 49152, 576, 1536, 30, 9, 3, tie_word_embeddings=True),
        134_515_008,
        134_515_584,
    ),
    "Llama with biases": (
        decoder("llama", 1000, 64, 96, 3, 4, 2)
        | {"attention_bias": True, "mlp_bias": True},
        221_952,
        158_016,
    ),
    "Mistral-7B-v0.1": (
        decoder("mistral", 32000, 4096, 14336, 32, 32, 8),
        7_241_732_096,
        7_110_664_192,
    ),
    "Qwen2.5-0.5B": (
        decoder("qwen2", 151936, 896, 4864, 24, 14, 2) | {"tie_word_embeddings": True},
        494_032_768,
        494_033_664,
    ),
    "Qwen3-0.6B": (
        decoder("qwen3", 151936, 1024, 3072, 28, 16, 8)
        | {"head_dim": 128, "tie_word_embeddings": True},
        596_049_920,
        596_050_944,
    ),
    "Gemma-2B": (
        decoder("gemma", 256000, 2048, 16384, 18, 8, 1) | {"head_dim": 256},
        2_506_172_416,
        2_506_174_464,
    ),
    "Gemma-2-2B": (
        decoder("gemma2", 256000, 2304, 9216, 26, 8, 4) | {"head_dim": 256},
        2_614_341_888,
        2_614_344_192,
    ),
    "Gemma-3-1B": (
        decoder("gemma3_text", 262144, 1152, 6912, 26, 4, 1) | {"head_dim": 256},
        999_885_952,
        999_887_104,
    ),
    "Phi-3-mini": (
        decoder("phi3", 32064, 3072, 8192, 32, 32, 32),
        3_821_079_552,
        3_722_582_016,
    ),
    "Mixtral-8x7B": (
        decoder("mixtral", 32000, 4096, 14336, 32, 32, 8)
        | {"num_local_experts": 8, "num_experts_per_tok": 2},
        46_702_792_704,
        46_571_724_800,
    ),
    "Qwen1.5-MoE-A2.7B": (
        decoder("qwen2_moe", 151936, 2048, 5632, 24, 16, 16)
        | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
        | {"num_experts": 60, "num_experts_per_tok": 4},
        14_315_784_192,
        14_004_621_312,
    ),
    "Qwen3-30B-A3B": (
        decoder("qwen3_moe", 151936, 2048, 6144, 48, 32, 4)
        | {
            "head_dim": 128,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        30_532_122_624,
        30_220_959_744,
    ),
    "dense and sparse layers": (
        decoder("qwen3_moe", 1000, 64, 96, 6, 4, 2)
        | {"head_dim": 32, "attention_bias": True, "mlp_only_layers": [3]}
        | MIXED,
        389_696,
        325_760,
    ),
    "GPT-2": (
        {
            "model_type": "gpt2",
            "vocab_size": 50257,
            "n_positions": 1024,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
        },
        124_439_808,
        124_440_576,
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_parameters_are_counted_exactly(name: str) -> None:
    config, language, score = COUNTED[name]
    assert read_model(config).parameters == language
    assert read_model(config, head=Head.SCORE).parameters == score


def test_a_token_meets_its_experts_alone() -> None:
    name = next(n for n in COUNTED if COUNTED[n][1] == 30_532_122_624)
    model = read_model(COUNTED[name][0])
    assert (
        model.met == 30_532_122_624 - 48 * 120 * 3 * 768 * 2048
    )  # 3.3 thousand millions: Qwen3-30B-A3B
    dense = read_model(LLAMA_3_8B)
    assert dense.met == dense.parameters


def test_every_family_is_counted() -> None:
    counted = {config["model_type"] for config, _, _ in COUNTED.values()}
    assert counted == {*SHIPPED} - {"openvla"}  # which test_model_families counts


def test_a_value_head_beside_the_language_model() -> None:
    both = read_model(LLAMA_3_8B, head=Head.LANGUAGE_AND_VALUE)
    assert both.parameters == 8_030_261_248 + 4096
    assert both.vocabulary == 128256
    assert read_model(LLAMA_3_8B, head=Head.SCORE).vocabulary == 0


def test_labels_widen_the_score_and_untied_embeddings_are_a_head_of_their_own() -> None:
    one, five = (
        read_model(LLAMA_3_8B | {"num_labels": n}, head=Head.SCORE).parameters
        for n in (1, 5)
    )
    assert five - one == 4 * 4096
    config, tied, _ = COUNTED["GPT-2"]
    assert (
        read_model(config | {"tie_word_embeddings": False}).parameters
        == tied + 50257 * 768
    )


def test_shards_are_padded_and_norms_are_not_cut() -> None:
    weight = Weight(name="w", shape=(10, 6), ways=6)
    assert weight.part(tensor_parallel=1, shards=4) == 3 * 6
    assert weight.part(tensor_parallel=2, shards=4) == 9
    assert weight.part(tensor_parallel=8) == 10  # no finer than its ways
    assert Weight(name="norm", shape=(10,)).part(tensor_parallel=8) == 10
    assert Weight(name="scalar", shape=()).part(1) == 1


def test_keys_are_copied_where_tensor_parallelism_has_more_ranks_than_heads() -> None:
    model = read_model(LLAMA_3_8B)
    sizes = {w.name: w for w, _ in model.weights()}
    assert sizes["model.layers.*.self_attn.k_proj.weight"].part(16) == 1024 * 4096 // 8
    assert sizes["model.layers.*.self_attn.q_proj.weight"].part(16) == 4096 * 4096 // 16


def test_a_bias_is_whole_where_the_inputs_are_cut() -> None:
    sizes = {
        w.name: w for w, _ in read_model(COUNTED["Llama with biases"][0]).weights()
    }
    assert sizes["model.layers.*.self_attn.q_proj.bias"].part(2) == 32
    assert sizes["model.layers.*.self_attn.o_proj.bias"].part(2) == 64


# Bytes per token and layer that autograd kept beside parameters: transformers 5.19.0 on the CPU with sdpa attention,
# (3 layers - 1 layer) / 2, in bfloat16 and in float32.
SAVED: dict[str, tuple[dict[str, Any], float, float]] = {
    "llama": (decoder("llama", 512, 256, 896, 2, 8, 2), 12584.0, 23080.0),
    "mistral": (decoder("mistral", 512, 256, 896, 2, 8, 2), 12584.0, 23080.0),
    "qwen2": (decoder("qwen2", 512, 256, 1280, 2, 8, 2), 15656.0, 29224.0),
    "qwen3": (
        decoder("qwen3", 512, 256, 768, 2, 8, 4) | {"head_dim": 64},
        18008.0,
        30808.0,
    ),
    "gemma": (
        decoder("gemma", 512, 256, 2048, 2, 4, 1) | {"head_dim": 64},
        22812.0,
        41500.0,
    ),
    "gemma2": (
        decoder("gemma2", 512, 256, 1024, 2, 4, 2) | {"head_dim": 64},
        18984.0,
        29736.0,
    ),
    "gemma3": (
        decoder("gemma3_text", 512, 256, 1536, 2, 4, 1) | {"head_dim": 64},
        25405.0,
        39997.0,
    ),
    "phi3": (decoder("phi3", 512, 256, 680, 2, 8, 8), 12136.0, 22184.0),
    "gpt2": (
        {
            "model_type": "gpt2",
            "vocab_size": 512,
            "n_embd": 256,
            "n_head": 8,
            "n_positions": 256,
            "n_layer": 2,
        },
        15400.0,
        30768.0,
    ),
    "mixtral": (
        decoder("mixtral", 512, 256, 896, 2, 8, 2)
        | {"num_local_experts": 8, "num_experts_per_tok": 2},
        21916.1,
        41628.1,
    ),
    "qwen3_moe": (
        decoder("qwen3_moe", 512, 256, 768, 2, 8, 4)
        | {
            "head_dim": 64,
            "moe_intermediate_size": 96,
            "num_experts": 16,
            "num_experts_per_tok": 8,
        },
        26536.1,
        47544.1,
    ),
    "qwen2_moe": (
        decoder("qwen2_moe", 512, 256, 704, 2, 8, 8)
        | {"moe_intermediate_size": 176, "shared_expert_intermediate_size": 704}
        | {"num_experts": 16, "num_experts_per_tok": 4},
        22258.1,
        42236.1,
    ),
}


@pytest.mark.parametrize("name", SAVED)
def test_what_a_layer_saves_is_what_was_measured(name: str) -> None:
    config, bfloat16, float32 = SAVED[name]
    saved = read_model(config).blocks[-1].saved
    assert saved.bytes_per_token(2, 1) == pytest.approx(bfloat16, rel=0.001)
    assert saved.bytes_per_token(4, 1) == pytest.approx(float32, rel=0.001)


@pytest.mark.parametrize("name", SAVED)
def test_a_prompt_costs_each_answer_what_attention_keeps_of_a_layer(name: str) -> None:
    """Queries, keys, values, what was attended, and a number of each softmax, as if every query head had its keys."""
    config, bfloat16, float32 = SAVED[name]
    heads = config.get("num_attention_heads", config.get("n_head"))
    keys = config.get("num_key_value_heads", heads)
    width = config.get(
        "head_dim", config.get("hidden_size", config.get("n_embd")) // heads
    )
    model = read_model(config)
    all_keys = [
        (2, bfloat16 + 2 * 2 * (heads - keys) * width),
        (4, float32 + 4 * 2 * (heads - keys) * width),
    ]
    expected = max(
        heads * (4 * compute * width + 4) / saved for compute, saved in all_keys
    )
    assert model.read_again == pytest.approx(expected, rel=0.001)
    for ranks in (
        1,
        2,
        8,
    ):  # that exchange tokens for heads, and copy key heads where there are fewer
        copied = (max(keys, ranks) - keys) * width * 2
        again = 2 * heads * width + 2 * max(keys, ranks) * width
        for compute, saved in ((2, bfloat16), (4, float32)):
            if ranks <= heads:
                assert compute * again + 4 * heads <= 1.001 * model.read_again * (
                    saved + compute * copied
                )


def test_wide_heads_make_a_prompt_dear() -> None:
    wide = decoder("llama", 512, 256, 512, 2, 8, 8) | {
        "head_dim": 128
    }  # queries of four times the hidden width
    shares = [
        read_model(wide | {"head_dim": width}).read_again
        for width in (32, 64, 128, 256)
    ]
    assert shares == sorted(shares)
    assert shares[0] < 0.25 < 0.5 < shares[-1] < 1.0


def test_tensor_parallelism_divides_what_it_cuts() -> None:
    saved = Saved(compute=10, compute_cut=6, float32=3, float32_cut=2)
    assert saved.bytes_per_token(2, 1) == 20 + 12 + 12 + 8
    assert saved.bytes_per_token(2, 4) == 20 + 12 + 5


def wrong(config: dict[str, Any]) -> list[tuple[str, str]]:
    with pytest.raises(ConfigError) as caught:
        read_model(config, key="actor.model")
    assert all(problem.why and problem.fix for problem in caught.value.problems)
    return [(problem.code, problem.key) for problem in caught.value.problems]


def test_all_missing_and_wrong_numbers_come_together() -> None:
    assert wrong({}) == [
        ("unknown-model-family", "actor.model.model_type")
    ]  # others: test_model_families
    assert wrong(
        {
            "model_type": "llama",
            "hidden_size": "4096",
            "num_attention_heads": 0,
            "vocab_size": True,
        }
    ) == [
        ("wrong-type", "actor.model.hidden_size"),
        ("wrong-type", "actor.model.num_attention_heads"),
        ("wrong-type", "actor.model.vocab_size"),
        ("missing-key", "actor.model.num_hidden_layers"),
        ("missing-key", "actor.model.intermediate_size"),
    ]

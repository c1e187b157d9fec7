"""Models of any family: described by transformers on the meta device, or measured; never planned as another one."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlplace.config.blocks.language_model import ReferenceConfig
from rlplace.config.blocks.training import ActorConfig
from rlplace.errors import ConfigError
from rlplace.placement.memory import families, formulas
from rlplace.placement.memory.demands import Part, Placed, ScoringDemand, TrainingDemand
from rlplace.placement.memory.model import Head, ModelShape, read_model
from rlplace.placement.schedule import Residency
from tests.unit.placement.test_model_shape import LLAMA_3_8B, SAVED

pytest.importorskip("transformers")
from rlplace import models
from rlplace.models.describe import describe

DEEPSEEK = {  # the keys of DeepSeek-V3 that its config.json has
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
    },
}
QWEN_VL = {  # Qwen2.5-VL-7B
    "model_type": "qwen2_5_vl",
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "out_hidden_size": 3584,
        "intermediate_size": 3420,
    },
}
GEMMA_3 = {  # Gemma-3-4B
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 1024,
        "vocab_size": 262208,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 896,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
# Totals that the makers of these checkpoints publish; without weights for multi-token prediction, which no policy uses.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "DeepSeek-V3": (DEEPSEEK, 671_026_404_352),
    "gpt-oss-120b": (
        {"model_type": "gpt_oss", "num_hidden_layers": 36, "num_local_experts": 128},
        116_829_156_672,
    ),
    "Qwen2.5-VL-7B": (QWEN_VL, 8_292_166_656),
    "Qwen3-Next-80B-A3B": (
        {"model_type": "qwen3_next", "num_hidden_layers": 48},
        79_674_391_296,
    ),
    "GLM-4-9B-0414": (
        {"model_type": "glm4", "num_hidden_layers": 40, "vocab_size": 151552},
        9_400_279_040,
    ),
    "Gemma-3-4B": (GEMMA_3, 4_300_079_472),
    "Llama-4-Scout-17B-16E": (
        {
            "model_type": "llama4",
            "architectures": ["Llama4ForConditionalGeneration"],
            "text_config": {
                "model_type": "llama4_text",
                "num_local_experts": 16,
                "vocab_size": 202048,
            },
            "vision_config": {
                "hidden_size": 1408,
                "image_size": 336,
                "vision_output_dim": 4096,
            }
            | {"projector_input_dim": 4096, "projector_output_dim": 4096},
        },
        108_641_793_536,
    ),
    # Counted here; its config.json leaves out what is Llama 2's.
    "OpenVLA-7B": (
        {
            "model_type": "openvla",
            "text_config": {"model_type": "llama", "vocab_size": 32064},
            "image_sizes": [224, 224],
        },
        7_541_237_184,
    ),
    "pi0": ({"model_type": "pi0", "chunk_size": 50}, 3_501_372_176),
}


def shape(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, head: Head = Head.LANGUAGE
) -> ModelShape:
    """The model by a description made in this process, without activations: large models take seconds."""
    monkeypatch.setattr(models.describe, "_saved", lambda *_: {})
    monkeypatch.setattr(
        families,
        "_kept",
        lambda keys: json.loads(json.dumps(describe(json.loads(keys)))),
    )
    return read_model(config, head=head)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_weight_of_a_published_model_is_counted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, parameters = PUBLISHED[name]
    assert shape(config, monkeypatch).parameters == parameters


def test_heads_of_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    language, score, both = (shape(DEEPSEEK, monkeypatch, head) for head in Head)
    assert score.parameters == language.parameters - 129280 * 7168 + 7168
    assert both.parameters == language.parameters + 7168
    assert (language.vocabulary, score.vocabulary) == (129280, 0)


def test_a_latent_is_kept_once_and_windows_end_what_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DeepSeek-V3: 70.272 KB of a token, as its report says, however many ranks there are."""
    latent = shape(DEEPSEEK, monkeypatch)
    assert (
        formulas.kv_sequence(latent, 1, 8192, 2)
        == formulas.kv_sequence(latent, 1, 8192, 2, parallel=16)
        == 70_272
    )
    gemma = shape(GEMMA_3, monkeypatch)
    whole, windowed = 5, 29  # of 34 layers, each sixth sees all tokens
    each = 2 * 2 * 4 * 256
    assert formulas.kv_sequence(gemma, 32768, 2048, 2) == each * (
        whole * 32768 + windowed * (1023 + 2048)
    )


def test_windows_of_the_families_that_are_counted_here() -> None:
    mistral = SAVED["mistral"][0]
    each = 2 * 2 * 2 * 32 * 2
    for config, kept in (
        (mistral | {"sliding_window": None}, 10_000),
        (mistral | {"sliding_window": 100}, 100 - 1 + 64),
        (
            mistral | {"sliding_window": 100, "layer_types": ["full_attention"] * 2},
            10_000,
        ),
        (SAVED["qwen2"][0] | {"sliding_window": 100}, 10_000),
        (
            SAVED["qwen2"][0]
            | {
                "sliding_window": 100,
                "use_sliding_window": True,
                "max_window_layers": 0,
            },
            163,
        ),
    ):
        assert formulas.kv_sequence(read_model(config), 10_000, 64, 2) == each * kept


def stored_gb(model: ModelShape) -> float:
    return sum(size * copies for size, copies in model.stored(2)) / 1e9


def test_quantised_weights_have_the_bits_of_their_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The files of gpt-oss-120b have 65.2 GB, those of Llama-3-8B in 4 bits by AWQ 5.7 GB."""
    spared = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    mxfp4 = {"quant_method": "mxfp4", "modules_to_not_convert": spared}
    assert stored_gb(
        shape(
            PUBLISHED["gpt-oss-120b"][0] | {"quantization_config": mxfp4}, monkeypatch
        )
    ) == pytest.approx(65.2, abs=0.1)
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128}
    assert stored_gb(
        read_model(LLAMA_3_8B | {"quantization_config": awq})
    ) == pytest.approx(5.7, abs=0.05)
    whole = read_model(LLAMA_3_8B)
    assert stored_gb(whole) == 2 * whole.parameters / 1e9
    unknown = read_model(LLAMA_3_8B | {"quantization_config": {"quant_method": "new"}})
    assert (stored_gb(unknown), "quantised by new" in unknown.notes[0]) == (
        stored_gb(whole),
        True,
    )


def test_a_quantised_model_is_counted_where_it_is_frozen_and_trained_whole() -> None:
    keys = LLAMA_3_8B | {
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}
    }
    model = read_model(keys)
    placed = Placed(
        ranks=1, accelerators_per_rank=1, memory_bytes=80 << 30, kind="emulated"
    )
    frozen = ScoringDemand(
        model=model, block=ReferenceConfig(sharded=False), sequence_length=8
    ).footprint(placed)
    trained = TrainingDemand(
        model=model, block=ActorConfig(), sequence_length=8
    ).footprint(placed)
    whole = 2 * (
        128256 * 4096 * 2 + 65 * 4096
    )  # embeddings, head and norms stay in bf16
    assert frozen.held[Residency.FULL][Part.PARAMETERS] == whole + (
        model.parameters - whole // 2
    )
    assert trained.held[Residency.FULL][Part.PARAMETERS] == 4 * model.parameters


def test_experts_under_the_name_that_transformers_5_writes() -> None:
    config, _, _ = SAVED["qwen3_moe"]
    renamed = {
        k if k != "num_experts" else "num_local_experts": v for k, v in config.items()
    }
    assert read_model(renamed) == read_model(config)


def test_a_model_is_described_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[str] = []
    run = subprocess.run

    def count(*words: Any, **named: Any) -> Any:
        asked.append(named["input"])
        return run(*words, **named)

    monkeypatch.setattr(subprocess, "run", count)
    config = {
        **DEEPSEEK,
        "num_hidden_layers": 4,
        "n_routed_experts": 8,
        "path": "/a/folder",
    }
    families._kept.cache_clear()
    first = read_model(config)
    families._kept.cache_clear()
    assert dataclasses.replace(first) == read_model(config)
    assert len(asked) == 1, "the second time from the file"
    assert (
        capsys.readouterr().err.count("counting a deepseek_v3 by transformers, once")
        == 1
    )
    assert "path" not in json.loads(asked[0])


@pytest.mark.parametrize("name", ["qwen2_5_vl_2", "gemma5", "llama9", "lama"])
def test_another_family_is_never_proposed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        families,
        "_kept",
        lambda keys: {"error": "ValueError: Unrecognized model identifier"},
    )
    with pytest.raises(ConfigError) as caught:
        read_model({"model_type": name, "hidden_size": 64})
    (problem,) = caught.value.problems
    assert problem.code == "unknown-model-family"
    assert "did you mean" not in problem.what
    assert "model_type: " not in (problem.fix or "")
    assert "--measured" in (problem.fix or "")

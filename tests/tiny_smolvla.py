"""A tiny checkpoint of SmolVLA with random weights, in the layout that lerobot writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.tiny_vlm import tiny_smolvlm

# Sizes of the tiny checkpoint: state, action, chunk
STATE = 6
ACTION = 5
CHUNK = 4
LAYERS = 2
MEANS = {"observation.state": [0.5, 0.4], "action": [0.1, -0.1]}
DEVIATIONS = {"observation.state": [0.2, 0.3], "action": [0.5, 0.25]}


def tiny_smolvla(folder: Path, **settings: Any) -> tuple[Path, Path]:
    """Write a checkpoint and the folder of its vision-language model, and return both.

    `settings`: keys of its config.json that differ.
    """
    import torch
    from safetensors.torch import load_file, save_file

    vlm = tiny_smolvlm(folder / "vlm", side=16, layers=LAYERS + 1)
    own = folder / "smolvla"
    own.mkdir()
    shape = json.loads((vlm / "config.json").read_text())
    text = shape["text_config"]
    width = text["hidden_size"]
    heads = text["num_attention_heads"]
    inner = width // heads * text["num_key_value_heads"]
    narrow = int(0.75 * width)
    generator = torch.Generator().manual_seed(0)

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator) / sizes[-1] ** 0.5

    weights = {}
    for name, tensor in load_file(vlm / "model.safetensors").items():
        # The last layer of the model is not used
        if f"text_model.layers.{LAYERS}." in name:
            continue
        weights[f"model.vlm_with_expert.vlm.{name}"] = tensor.float()
    for layer in range(LAYERS):
        sizes = {
            "self_attn.q_proj": (width, narrow),
            "self_attn.k_proj": (inner, inner if layer % 2 else narrow),
            "self_attn.v_proj": (inner, inner if layer % 2 else narrow),
            "self_attn.o_proj": (narrow, width),
            "mlp.gate_proj": (256, narrow),
            "mlp.up_proj": (256, narrow),
            "mlp.down_proj": (narrow, 256),
        }
        first = f"model.vlm_with_expert.lm_expert.layers.{layer}."
        for name, size in sizes.items():
            weights[f"{first}{name}.weight"] = drawn(*size)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{first}{name}.weight"] = 1 + drawn(narrow)
    weights["model.vlm_with_expert.lm_expert.norm.weight"] = 1 + drawn(narrow)
    linears = {
        "state_proj": (width, STATE),
        "action_in_proj": (narrow, ACTION),
        "action_out_proj": (ACTION, narrow),
        "action_time_mlp_in": (narrow, 2 * narrow),
        "action_time_mlp_out": (narrow, narrow),
    }
    for name, size in linears.items():
        weights[f"model.{name}.weight"] = drawn(*size)
        weights[f"model.{name}.bias"] = drawn(size[0])
    save_file(weights, own / "model.safetensors")
    config = {
        "type": "smolvla",
        "vlm_model_name": "HuggingFaceTB/SmolVLM2-500M-Video-Instruct",
        "max_state_dim": STATE,
        "max_action_dim": ACTION,
        "chunk_size": CHUNK,
        "num_vlm_layers": LAYERS,
        "num_expert_layers": -1,
        "resize_imgs_with_padding": [16, 16],
        "normalization_mapping": {
            "VISUAL": "IDENTITY",
            "STATE": "MEAN_STD",
            "ACTION": "MEAN_STD",
        },
    }
    (own / "config.json").write_text(json.dumps({**config, **settings}))
    for file, step, name in (
        ("policy_preprocessor", "normalizer_processor", "observation.state"),
        ("policy_postprocessor", "unnormalizer_processor", "action"),
    ):
        stored = f"{file}_step_0_{step}.safetensors"
        save_file(
            {
                f"{name}.mean": torch.tensor(MEANS[name]),
                f"{name}.std": torch.tensor(DEVIATIONS[name]),
            },
            own / stored,
        )
        steps = [{"registry_name": step, "config": {}, "state_file": stored}]
        (own / f"{file}.json").write_text(json.dumps({"name": file, "steps": steps}))
    return own, vlm

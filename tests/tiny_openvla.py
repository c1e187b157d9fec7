"""A checkpoint of OpenVLA with random weights, in the published layout.

The names of weights are written down from prismatic/extern/hf/modeling_prismatic.py of openvla/openvla and from
timm/models/vision_transformer.py, not from the code that reads them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS = ["go", "to", "reach", "the", "red", "green", "blue", "square"]
PROMPT = ["In", ":", "What", "action", "should", "robot", "take", "?", "Out"]
BLANK = 29871
SIDE = 28
PATCH = 14
# Width of DINOv2, of SigLIP, of Llama
WIDTHS = (32, 48, 32)
# Blocks of the towers, layers of Llama
LAYERS = (3, 2, 2)
VOCABULARY = 32_064
STATISTICS: dict[str, Any] = {
    "squares": {
        "action": {
            "q01": [-0.5, -0.8],
            "q99": [0.6, 0.9],
            "min": [-1.0, -1.0],
            "max": [1.0, 1.0],
            "mask": [True, True],
        }
    }
}


def shapes() -> dict[str, tuple[int, ...]]:
    """Name -> shape of each weight."""
    dino, siglip, llama = WIDTHS
    found: dict[str, tuple[int, ...]] = {}
    for name, width, layers in (
        ("featurizer", dino, LAYERS[0]),
        ("fused_featurizer", siglip, LAYERS[1]),
    ):
        first = name == "featurizer"
        tower = f"vision_backbone.{name}"
        hidden = 4 * width
        if first:
            found[f"{tower}.cls_token"] = (1, 1, width)
            found[f"{tower}.reg_token"] = (1, 4, width)
        found[f"{tower}.pos_embed"] = (1, (SIDE // PATCH) ** 2, width)
        found[f"{tower}.patch_embed.proj.weight"] = (width, 3, PATCH, PATCH)
        found[f"{tower}.patch_embed.proj.bias"] = (width,)
        for layer in range(layers):
            block = f"{tower}.blocks.{layer}"
            found |= linear(f"{block}.attn.qkv", width, 3 * width)
            found |= linear(f"{block}.attn.proj", width, width)
            found |= linear(f"{block}.mlp.fc1", width, hidden)
            found |= linear(f"{block}.mlp.fc2", hidden, width)
            for norm in ("norm1", "norm2"):
                found |= norm_of(f"{block}.{norm}", width)
            if first:
                for scale in ("ls1", "ls2"):
                    found[f"{block}.{scale}.scale_factor"] = (width,)
        found |= norm_of(f"{tower}.norm", width)
        if not first:
            pool = f"{tower}.attn_pool"
            found[f"{pool}.latent"] = (1, 1, width)
            found |= linear(f"{pool}.q", width, width)
            found |= linear(f"{pool}.kv", width, 2 * width)
            found |= linear(f"{pool}.proj", width, width)
            found |= norm_of(f"{pool}.norm", width)
            found |= linear(f"{pool}.mlp.fc1", width, hidden)
            found |= linear(f"{pool}.mlp.fc2", hidden, width)
    seen = dino + siglip
    found |= linear("projector.fc1", seen, 4 * seen)
    found |= linear("projector.fc2", 4 * seen, llama)
    found |= linear("projector.fc3", llama, llama)
    decoder = "language_model.model"
    found[f"{decoder}.embed_tokens.weight"] = (VOCABULARY, llama)
    for layer in range(LAYERS[2]):
        block = f"{decoder}.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            found[f"{block}.self_attn.{name}.weight"] = (llama, llama)
        found[f"{block}.mlp.gate_proj.weight"] = (2 * llama, llama)
        found[f"{block}.mlp.up_proj.weight"] = (2 * llama, llama)
        found[f"{block}.mlp.down_proj.weight"] = (llama, 2 * llama)
        found[f"{block}.input_layernorm.weight"] = (llama,)
        found[f"{block}.post_attention_layernorm.weight"] = (llama,)
    found[f"{decoder}.norm.weight"] = (llama,)
    found["language_model.lm_head.weight"] = (VOCABULARY, llama)
    return found


def linear(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def norm_of(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def tiny_openvla(folder: Path, statistics: dict[str, Any] | None = None) -> Path:
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in shapes().items():
        weight = torch.randn(shape, generator=generator)
        if len(shape) == 1 and ("norm" in name or "scale" in name):
            weight = 1 + 0.2 * weight
        elif name.endswith("weight"):
            weight = weight * shape[-1] ** -0.5
        weights[name] = weight.to(torch.bfloat16)
    # In two files, as a checkpoint of 7 billion weights
    names = sorted(weights)
    files = {
        name: f"model-0000{1 + at % 2}-of-00002.safetensors"
        for at, name in enumerate(names)
    }
    for file in set(files.values()):
        part = {name: weights[name] for name in names if files[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["OpenVLAForActionPrediction"],
        # Code that a hub would run; it is not read
        "auto_map": {"AutoConfig": "configuration_prismatic.OpenVLAConfig"},
        "model_type": "openvla",
        "hf_llm_id": "meta-llama/Llama-2-7b-hf",
        "image_resize_strategy": "resize-naive",
        "image_sizes": [SIDE, SIDE],
        "llm_backbone_id": "llama2-7b-pure",
        "n_action_bins": 256,
        "norm_stats": {"of_the_base_model": {"action": {"q01": [0.0], "q99": [1.0]}}},
        "pad_to_multiple_of": 64,
        "pad_token_id": 32_000,
        "text_config": {
            "model_type": "llama",
            "pad_token_id": 32_000,
            "torch_dtype": "bfloat16",
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTHS[2],
            "intermediate_size": 2 * WIDTHS[2],
            "num_hidden_layers": LAYERS[2],
            "num_attention_heads": 4,
        },
        "timm_model_ids": [
            "vit_large_patch14_reg4_dinov2.lvd142m",
            "vit_so400m_patch14_siglip_224",
        ],
        "torch_dtype": "bfloat16",
        "use_fused_vision_backbone": True,
        "vision_backbone_id": "dinosiglip-vit-so-224px",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "dataset_statistics.json").write_text(
        json.dumps(statistics or STATISTICS)
    )
    pictures = {
        "image_processor_type": "PrismaticImageProcessor",
        "auto_map": {
            "AutoImageProcessor": "processing_prismatic.PrismaticImageProcessor"
        },
        "image_resize_strategy": "resize-naive",
        "input_sizes": [[3, SIDE, SIDE], [3, SIDE, SIDE]],
        "interpolations": ["bicubic", "bicubic"],
        "means": [[0.485, 0.456, 0.406], [0.5, 0.5, 0.5]],
        "stds": [[0.229, 0.224, 0.225], [0.5, 0.5, 0.5]],
        "use_fused_vision_backbone": True,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(pictures))
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    """Words in place of Llama 2's parts of words, with its numbers of the tokens that a prompt begins and ends with."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    known = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁": BLANK}
    for at, word in enumerate(dict.fromkeys([*PROMPT, *WORDS])):
        known[word] = 100 + at
    library = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    content = json.loads(file.read_text())
    content["auto_map"] = {"AutoProcessor": "processing_prismatic.PrismaticProcessor"}
    file.write_text(json.dumps(content))

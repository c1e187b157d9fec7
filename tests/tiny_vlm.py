"""Tiny models of text and images with random weights, a processor and a tokenizer, written as Hugging Face folders."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

Kind = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]

PAD, END, TURN, START, STOP, IMAGE, VIDEO = range(7)  # token ids
PATCH, MERGE = 4, 2
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
_SPECIAL = [
    "<pad>",
    "<eos>",
    "<turn>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
# As Qwen's: parts in their order, an image as one token between its marks.
_CHAT = (
    "{% for m in messages %}<turn>{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant:{% endif %}"
)
_WORDS = [
    "<unk>",
    "user",
    "assistant",
    ":",
    "?",
    "which",
    "colour",
    "is",
    "it",
    *COLOURS,
]


def tiny_vlm(
    folder: Path,
    kind: Kind = "qwen2_5_vl",
    *,
    seed: int = 0,
    hidden: int = 32,
    most: int = 64,
) -> Path:
    """`most`: tokens of an image."""
    import torch
    import transformers

    text: dict[str, Any] = {
        "vocab_size": len(_SPECIAL) + len(_WORDS),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "pad_token_id": PAD,
        "eos_token_id": END,
        "bos_token_id": None,
        "head_dim": hidden // 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [hidden // 16, hidden // 32, hidden // 32],
        },
        "tie_word_embeddings": kind == "qwen2_vl",
    }
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": hidden,
        "embed_dim": hidden,
        "intermediate_size": 2 * hidden,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "spatial_patch_size": PATCH,
        "temporal_patch_size": 2,
        "out_hidden_size": hidden,
        "window_size": 4 * PATCH * MERGE // 2,
        "fullatt_block_indexes": [1],
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.1,
    }
    if kind == "qwen2_vl":
        vision["hidden_size"] = hidden  # of the decoder there
        vision["mlp_ratio"] = 2
    known = transformers.AutoConfig.for_model(kind)
    parts = {
        name: {
            key: value
            for key, value in keys.items()
            if key in getattr(known, name).to_dict()
        }
        for name, keys in (("text_config", text), ("vision_config", vision))
    }
    config = transformers.AutoConfig.for_model(
        kind,
        **parts,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=STOP,
        tie_word_embeddings=text["tie_word_embeddings"],
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForImageTextToText.from_config(config)
        for parameter in model.parameters():  # those of norms and biases too
            if parameter.ndim == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    _write_tokenizer(folder)
    cell = (PATCH * MERGE) ** 2
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": cell, "longest_edge": most * cell},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def tiny_smolvlm(
    folder: Path, *, side: int = 16, hidden: int = 16, layers: int = 1
) -> Path:
    """A SmolVLM with random weights and a tokenizer. `side`: pixels each way of its images."""
    import torch
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = transformers.SmolVLMConfig(
        vision_config={**sizes, "image_size": side, "patch_size": PATCH},
        text_config={
            **sizes,
            "num_hidden_layers": layers,
            "model_type": "llama",
            "num_key_value_heads": 2,
            "vocab_size": len(_SPECIAL) + len(_WORDS),
            "pad_token_id": PAD,
            "bos_token_id": None,
            "eos_token_id": END,
        },
        scale_factor=MERGE,
        image_token_id=IMAGE,
        pad_token_id=PAD,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    import transformers

    words = models.WordLevel(
        {word: at for at, word in enumerate([*_SPECIAL, *_WORDS])}, unk_token="<unk>"
    )
    library = Tokenizer(words)
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(_SPECIAL)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
    )
    tokenizer.chat_template = _CHAT
    tokenizer.save_pretrained(folder)


def png(
    width: int,
    height: int,
    colour: tuple[int, int, int] | None = None,
    *,
    seed: int = 0,
) -> bytes:
    """One colour, else noise."""
    from PIL import Image

    pixels = (
        np.random.default_rng(seed)
        .integers(0, 256, (height, width, 3))
        .astype(np.uint8)
    )
    if colour is not None:
        pixels[:] = colour
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def coloured_squares(folder: Path, rows: int = 24) -> Path:
    """A data set: an image each, which is asked for its colour."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for row in range(rows):
        name, colour = list(COLOURS.items())[row % len(COLOURS)]
        (folder / f"{row}.png").write_bytes(png(8 + 8 * (row % 2), 8, colour))
        lines.append(
            {"prompt": "which colour is it?", "image": f"{row}.png", "answer": name}
        )
    file = folder / "squares.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file

"""Tiny language models with random weights and a tokenizer of bytes, written as Hugging Face folders in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np

from rlplace.tokens import Request
from tests.tiny_tokenizer import trained_on

Kind = Literal["qwen3", "qwen3_moe", "llama"]

PAD, END = 0, 1  # token ids of <pad>, <eos>
CONTEXT = 256  # tokens

_CHAT = (
    "{% for t in tools or [] %}<turn>tool {{ t['function']['name'] }}<eos>{% endfor %}"
    "{% for m in messages %}<turn>{{ m['role'] }}: {{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant: {% endif %}"
)
_TEXT = (
    "the quick brown fox jumps over the lazy dog. 1+2=3; 12*3=36. answer question reason "
    * 20
)


def tiny_model(
    folder: Path,
    kind: Kind = "qwen3",
    *,
    vocabulary: int = 320,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
) -> Path:
    """Writes config, weights (fp32) and tokenizer: Qwen3 with a head of its own, Llama with a tied one.

    Qwen3-MoE has four experts a layer, of which each token has two.
    """
    import torch
    import transformers

    # vLLM on a CPU takes no narrower heads
    heads: dict[str, Any] = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    if kind == "qwen3_moe":
        heads |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": hidden,
        }
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        max_position_embeddings=CONTEXT,
        initializer_range=0.1,  # far enough from a uniform distribution to tell tokens apart
        pad_token_id=PAD,
        eos_token_id=END,
        bos_token_id=None,
        tie_word_embeddings=kind == "llama",
        dtype="float32",
        **heads,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tiny_tokenizer(vocabulary).save_pretrained(folder)
    return folder


def tiny_reward_model(
    folder: Path, *, like: Path, seed: int = 1, head: str = "score"
) -> Path:
    """Sequence classification with one label and random weights, of the size and with the tokenizer of `like`.

    `head` other than score: the files are those of a trunk with a value head of that name.
    """
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    config = transformers.AutoConfig.from_pretrained(like)
    config.num_labels = 1
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForSequenceClassification.from_config(config)
        torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(like).save_pretrained(folder)
    if head != "score":
        file = folder / "model.safetensors"
        weights = load_file(file)
        save_file(
            {
                f"{head}.weight" if n == "score.weight" else n: w
                for n, w in weights.items()
            },
            file,
        )
    return folder


def tiny_tokenizer(vocabulary: int) -> Any:
    from transformers import PreTrainedTokenizerFast

    bpe = trained_on(_TEXT, vocabulary)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>"
    )
    tokenizer.chat_template = _CHAT
    return tokenizer


def request_of(
    group: int = 0,
    *,
    length: int = 9,
    samples: int = 1,
    longest: int = 20,
    **others: Any,
) -> Request:
    """A prompt of random bytes that follows from its group alone."""
    tokens = np.random.default_rng(group).integers(40, 300, length).astype(np.int32)
    facts: dict[str, Any] = {
        "env_rank": 0,
        "iteration": 0,
        "group": group,
        "first_sample": 0,
        "samples": samples,
    }
    return Request(
        **(facts | {"turn": 0, "tokens": tokens, "max_new_tokens": longest} | others)
    )

"""A reward model made by hand that finds digits good, written as a Hugging Face folder in a second.

One layer whose attention looks at all tokens alike: what stands at the last token is the mean over the episode of how
much of each token's text is digits. The trunk's norms hardly change it, since one large constant outweighs it.
"""

from __future__ import annotations

from pathlib import Path

from tests.tiny_lm import CONTEXT, END, PAD, tiny_tokenizer

# Dimensions of the hidden states: a token's share of digits, a constant, the shares' mean.
_SHARE, _LARGE, _MEAN = 0, 1, 2


def digit_scorer(folder: Path, *, vocabulary: int = 320, scale: float = 4.0) -> Path:
    """Scores an episode by `scale` times its tokens' mean share of digits, prompt included."""
    import torch
    import transformers

    tokenizer = tiny_tokenizer(vocabulary)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        pad_token_id=PAD,
        eos_token_id=END,
        bos_token_id=None,
        num_labels=1,
        dtype="float32",
    )
    model = transformers.LlamaForSequenceClassification(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(float("norm" in name))
        trunk, attention = model.model, model.model.layers[0].self_attn
        texts = [tokenizer.decode([token]) for token in range(vocabulary)]
        trunk.embed_tokens.weight[:, _SHARE] = torch.tensor(
            [share(text) for text in texts]
        )
        trunk.embed_tokens.weight[:, _LARGE] = (
            4.0  # its root mean square over the 16 dimensions is 1
        )
        attention.v_proj.weight[_SHARE, _SHARE] = 1.0
        attention.o_proj.weight[_MEAN, _SHARE] = 1.0
        model.score.weight[0, _MEAN] = scale
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def share(text: str) -> float:
    """Of digits."""
    return sum(character.isdecimal() for character in text) / max(1, len(text))

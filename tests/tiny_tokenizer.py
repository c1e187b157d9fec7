"""A tokenizer of bytes with a chat template, written as a Hugging Face folder without transformers or torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = 1  # token id of <eos>, which ends answers
CHAT = (
    "{% for m in messages %}<turn>{{ m['role'] }}: {{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant: {% endif %}"
)
_TEXT = (
    "what is 1 + 2? higher lower left down right up answer with the number only " * 8
)


def tiny_tokenizer(
    folder: Path,
    *,
    chat: str | None = CHAT,
    vocabulary: int = 300,
    special: Sequence[str] = (),
) -> Path:
    """Writes tokenizer.json, its config and the token that ends an answer. `special`: further special tokens."""
    library = trained_on(_TEXT, vocabulary)
    library.add_special_tokens(list(special))
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": {
            "__type": "AddedToken",
            "content": "<pad>",
            "special": True,
        },  # as some files have it
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | ({"chat_template": chat} if chat else {}))
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    return folder


def trained_on(text: str, vocabulary: int) -> Tokenizer:
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<pad>", "<eos>", "<turn>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator([text], trainer)
    return library

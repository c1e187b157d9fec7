"""Reads the tokenizer in the folder of a vision-language model, without code from the folder."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rlplace.codes import config_error
from rlplace.units import clipped

_PATH = "actor.model.path"
# Characters of a library's reason that an error shows
_SHOWN = 200


def stored_tokenizer(folder: str, vocabulary: int, *, as_file: bool = False) -> Any:
    """Return the tokenizer of a model's folder. Raises ConfigError if it cannot be read, or has too many tokens.

    `vocabulary`: the number of tokens that the model has. `as_file`: whether the tokenizer is that of tokenizer.json,
    whatever else the folder names: a config.json with code of a hub would be asked for otherwise.
    """
    kind = PreTrainedTokenizerFast if as_file else AutoTokenizer
    try:
        tokenizer = kind.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise config_error(
            "model-misfit",
            _PATH,
            folder,
            error="tokenizer-lost",
            reason=clipped(f"{error}", _SHOWN),
        ) from error
    if len(tokenizer) > vocabulary:
        raise config_error(
            "model-misfit",
            _PATH,
            folder,
            error="tokenizer",
            size=len(tokenizer),
            vocabulary=vocabulary,
        )
    return tokenizer

"""Finds models whose files have a head of their own, and whose config says that the embedding is the head.

The folder would be read as a model without this head, as after training of `lm_head` beside LoRA factors. transformers
reads both weights then.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlplace.codes import problem
from rlplace.errors import ConfigError, Problem
from rlplace.json_text import read_object
from rlplace.models.heads import weight_shapes, weights_differ

_HEAD = "lm_head.weight"
# End of the name of the embedding of tokens
_EMBEDDING = ".embed_tokens.weight"
_TIED = "tie_word_embeddings"


def head_problems(folder: Path, key: str = "actor.model.path") -> Iterator[Problem]:
    """Yield a problem if the files of a model have a head that its config.json says is the embedding.

    `folder`: the model's folder. `key`: the config key that names it.
    """
    file = folder / "config.json"
    try:
        config = read_object(file, key)
    # Other checks report a file that is missing or damaged
    except (ConfigError, OSError):
        return
    text = config.get("text_config")
    blocks = [config, text if isinstance(text, dict) else {}]
    if not any(block.get(_TIED) is True for block in blocks):
        return
    shapes = weight_shapes(folder)
    heads = [name for name in shapes if name.endswith(_HEAD)]
    embeddings = [
        name for name in shapes if name.endswith(_EMBEDDING) and "visual" not in name
    ]
    if len(heads) == 1 and len(embeddings) == 1:
        (head,), (embedding,) = heads, embeddings
        if weights_differ(folder, head, embedding):
            yield problem(
                "two-heads", key, str(folder), head=head, embedding=embedding, file=file
            )

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
# Beginning of the types of models in which the key counts outside of `text_config` alone
_OUTER_ALONE = "qwen3_vl"


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
    block = None
    if config.get(_TIED) is True:
        block = ""
    elif isinstance(text, dict) and text.get(_TIED) is True:
        block = "text_config: "
    is_outer_alone = str(config.get("model_type")).startswith(_OUTER_ALONE)
    if block is None or (block and is_outer_alone):
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
                "two-heads",
                key,
                str(folder),
                head=head,
                embedding=embedding,
                file=file,
                block=block,
            )

"""The folders of models that a config names: whether they exist, and whether two have the same tokens.

A plan asks, so this module has no heavy imports.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rlplace.envs.text import Message

# The shortest conversation, to test a chat template
TRIED_CHAT = [
    Message("user", "-"),
    Message("assistant", "-"),
]


def folder_of(model: Mapping[str, object] | None) -> Path | None:
    """Return the folder that the config block `model` names; None if the block is None or names no folder."""
    path = (model or {}).get("path")
    if path is None:
        return None
    return Path(str(path))


def existing_folder(model: Mapping[str, object] | None) -> Path | None:
    """Return the folder that the config block `model` names; None if it names none or the folder does not exist."""
    folder = folder_of(model)
    if folder is not None and os.path.isdir(folder):
        return folder
    return None


def same_tokens(one: Path, other: Path) -> bool:
    """Return whether token ids have the same meaning in two model folders.

    `one`: the policy's folder. `other`: the folder to compare. A folder without a tokenizer is taken to use the
    policy's tokenizer, so the result is True for it.
    """
    files = [folder / "tokenizer.json" for folder in (one, other)]
    # A folder without a tokenizer is taken as one that uses the policy's.
    if one == other or not files[1].is_file():
        return True
    if files[0].read_bytes() == files[1].read_bytes():
        return True
    from rlplace.models.tokenizer import Tokenizer

    return Tokenizer.load(one).ids == Tokenizer.load(other).ids


def reads_tokens(policy: Path, other: Path, *, chat: bool) -> bool:
    """Return whether the model in `other` reads an episode in the tokens of the policy.

    `chat`: whether prompts are chats. Then a model with a chat template of its own, which differs from the policy's,
    reads its own: it has learned to read no other.
    """
    if not same_tokens(policy, other):
        return False
    if not chat or policy == other or not (other / "tokenizer.json").is_file():
        return True
    from rlplace.models.tokenizer import Tokenizer

    template = Tokenizer.load(other).chat_template
    if template is None:
        return True
    return template.strip() == (Tokenizer.load(policy).chat_template or "").strip()

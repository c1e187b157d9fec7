"""Token counts of the prompts of a large data set, computed once and stored in the user's cache folder.

::

    data set, tokenizer, template ── name ──▶ ~/.cache/rlplace/prompts/<name>.npy ──▶ lengths [rows]
                                                    └ not there: counted, then written
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlplace.extras import version_of

# Rows of a data set from which on lengths are kept; fewer are counted in a second
MANY = 10_000
# Files of a model's folder on which the tokens of a prompt depend
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
# Data sets whose lengths are kept; the file that was read longest ago goes first
_KEPT = 50

Lengths = NDArray[np.int32]


def cache_folder() -> Path:
    """Return the path of the cache folder of prompt lengths. The folder may not exist yet."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "rlplace" / "prompts"


def name_of(content: str, model: Path, settings: Mapping[str, object]) -> str | None:
    """Return the name of the cache file of prompt lengths; None if the lengths can change from day to day.

    `content`: a text that says which rows the data set has. `model`: folder with the tokenizer. `settings`: what else
    the tokens of a prompt depend on, such as the system message. A template that writes the date gives other prompts
    every day.
    """
    digest = hashlib.sha256(f"{version_of('rlplace')}\n{content}\n".encode())
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    for name in _FILES:
        with contextlib.suppress(OSError):
            text = (model / name).read_bytes()
            if b"strftime_now" in text:
                return None
            digest.update(name.encode() + hashlib.sha256(text).digest())
    return digest.hexdigest()


def kept_lengths(name: str, rows: int) -> Lengths | None:
    """Return the prompt lengths in the cache file `name`; None if there is none, or if it does not have `rows` rows."""
    file = cache_folder() / f"{name}.npy"
    try:
        found: Lengths = np.load(file, allow_pickle=False)
        # The time of the last use
        os.utime(file)
    except (OSError, ValueError, EOFError):
        return None
    if found.shape != (rows,) or found.dtype != np.int32:
        return None
    return found


def keep_lengths(name: str, lengths: Lengths) -> Path | None:
    """Write prompt lengths to the cache file `name`, and return its path; None if the folder cannot be written."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Ranks of other jobs may write the same file at this moment
        part, path = tempfile.mkstemp(dir=folder, suffix=".part")
        with os.fdopen(part, "wb") as out:
            np.save(out, lengths, allow_pickle=False)
        file = folder / f"{name}.npy"
        os.replace(path, file)
        by_use = sorted(folder.glob("*.npy"), key=lambda each: each.stat().st_mtime)
        for oldest in by_use[:-_KEPT]:
            oldest.unlink(missing_ok=True)
    except OSError:
        return None
    return file

"""Descriptions of model families: their weights, and what their layers keep. Those of the usual families are shipped.

A description has name and shape of every weight, and for every kind of layer what it saves for the backward pass and
keeps in a KV cache. The shipped ones, `descriptions/<model_type>.toml`, have expressions in place of numbers; their
letters stand for keys of a config.json (`letters`). All other families are described by transformers in a subprocess,
in the same form with plain numbers: building a model on the meta device takes torch, which the planner does not
import, and some seconds. Such a description is kept in a file for the next time; `models.describe` makes it.

    hidden, vocabulary   widths of the hidden states and of the logits
    head                 name of the weight that makes logits; a model with tied embeddings does not have this weight
    attention            heads, kv_heads, head_dim
    root                 weights outside of the layers
    blocks               kinds of layers: name ("*" is the layer number), layers (their count), weights, saved, passing
    kv                   kinds of KV caches, with the fields of `layers.KvLayers`
    tower                vision encoder: one block, and hidden, pixels, patches, mergers
    text                 for a decoder with a description of its own: key of its config.json, defaults of that, and the
                         letter of its hidden width
    notes                what is not counted
    letters              keys of the config.json, and expressions over them

A weight has a `name` inside its block and a `shape`. `ways`: how often tensor parallelism can split it (1); `linear`:
LoRA adapts it (false); `met`: the share of it that one token uses (1); `if`: the model has this weight only under a
condition. `saved` and `passing` are elements of one token, with the fields of `layers.Saved`: what the backward pass
reads, and what a pass without gradients holds at once.

`scripts/check_descriptions.py` compares the shipped ones with transformers.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlplace.codes import config_error
from rlplace.config.yaml_text import show
from rlplace.extras import install_command
from rlplace.json_text import parsed_object
from rlplace.units import clipped

# Families whose descriptions are shipped
SHIPPED = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "gpt2",
    "openvla",
)
_VERSION = 5  # version of descriptions; files of other versions are made anew
_LIMIT_S = 300.0
_NAME = re.compile(r"[A-Za-z][\w.-]*", re.ASCII)
# Files of transformers with the names of all model families
_LISTS = ("auto_mappings.py", "configuration_auto.py")
_OWN_KEYS = ("path", "kind")  # keys of this project, which no config.json has


def description_of(config: Mapping[str, object], key: str) -> Mapping[str, Any]:
    """Return the description of a model family: its weights, and what each kind of layer saves for the backward pass.

    `config`: the content of its config.json. `key`: key path of the model in the job's config, for errors. Raises
    ConfigError if no description is shipped and transformers is missing or does not know the family.
    """
    family = config.get("model_type")
    if isinstance(family, str) and family in SHIPPED:
        return shipped(family)
    return _described(config, key)


@functools.cache
def shipped(family: str) -> Mapping[str, Any]:
    """Return the description of a model family that comes with rlplace: its weights and kinds of layers.

    The family must be in `SHIPPED`.
    """
    file = Path(__file__).with_name("descriptions") / f"{family}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _described(config: Mapping[str, object], key: str) -> Mapping[str, Any]:
    """Return the description of a model (its weights and kinds of layers), generated with the library transformers.

    `config`: the content of its config.json. `key`: key path of the model in the job's config, for errors. Raises
    ConfigError if transformers is missing or does not know the family. The error does not suggest a family with a
    similar name, because that is another model.
    """
    family = config.get("model_type")
    keys = {name: value for name, value in config.items() if name not in _OWN_KEYS}
    if family is None:
        raise config_error(
            "unknown-model-family", f"{key}.model_type", error="not-named"
        )
    shipped_ones = ", ".join(SHIPPED)
    if not isinstance(family, str) or not _NAME.fullmatch(family):
        raise config_error(
            "unknown-model-family",
            f"{key}.model_type",
            show(family),
            error="no-name",
            shipped=shipped_ones,
        )
    if importlib.util.find_spec("transformers") is None:
        raise config_error(
            "unknown-model-family",
            f"{key}.model_type",
            show(family),
            error="without-transformers",
            family=family,
            shipped=shipped_ones,
            command=install_command("llm"),
        )
    if not _in_transformers(family):
        raise config_error(
            "unknown-model-family",
            f"{key}.model_type",
            show(family),
            error="unknown",
            version=importlib.metadata.version("transformers"),
            family=family,
            shipped=shipped_ones,
        )
    answer = _kept(json.dumps(keys, sort_keys=True, default=str))
    if "error" in answer:
        raise config_error(
            "unknown-model-family",
            f"{key}.model_type",
            show(family),
            error="not-built",
            version=importlib.metadata.version("transformers"),
            family=family,
            reason=answer["error"],
            shipped=shipped_ones,
        )
    if len(keys) == 1:
        raise config_error(
            "missing-key", key, f"model_type: {show(family)}", error="size-of-model"
        )
    return answer


def _in_transformers(family: str) -> bool:
    """Return whether transformers knows a model family. Its lists are read as text, because an import takes seconds.

    Return True if no list is found, as in other versions: building the model then shows whether the family is known.
    """
    spec = importlib.util.find_spec("transformers")
    assert spec is not None, "it is installed"
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = [folder / "models" / "auto" / name for folder in folders for name in _LISTS]
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    return not texts or any(f'"{family}"' in text for text in texts)


@functools.lru_cache(maxsize=64)
def _kept(keys: str) -> Mapping[str, Any]:
    """Return the description of a model from the cache folder, or generate and store it if it is not there.

    `keys`: the content of the model's config.json, as text. A result with the key "error" is not stored.
    """
    name = f"{_VERSION} {importlib.metadata.version('transformers')} {keys}"
    folder = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "rlplace"
        / "models"
    )
    file = folder / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"
    try:
        return parsed_object(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # Compute the description again; it replaces the damaged file
        found = _ask(keys)
    if "error" not in found:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            part = file.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(found), encoding="utf-8")
            part.replace(file)
        except OSError:  # the description is made again next time
            return found
    return found


def _ask(keys: str) -> Mapping[str, Any]:
    family = json.loads(keys)["model_type"]
    sys.stderr.write(
        f"counting a {clipped(show(family), 40)} by transformers, once; this takes some seconds ...\n"
    )
    return ask("rlplace.models.describe", keys)


def ask(module: str, keys: str) -> Mapping[str, Any]:
    """Return the JSON that a Python module prints when it runs in a subprocess.

    `keys`: the input of the subprocess. If the subprocess fails, the result has only the key "error".
    """
    command = [sys.executable, "-m", module]
    # Nothing is downloaded, and no model code from the hub runs.
    offline = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
    }
    try:
        done = subprocess.run(
            command,
            input=keys,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
            env=offline,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    last = done.stdout.strip().rpartition("\n")[2]
    if done.returncode or not last.startswith("{"):
        last_words = done.stderr.strip().rpartition("\n")[2]
        why = last_words or f"exit code {done.returncode}"
        return {"error": clipped(why, 300)}
    try:
        return parsed_object(last)
    except ValueError as error:
        return {"error": f"its answer cannot be read: {error}"}

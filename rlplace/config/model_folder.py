"""Find the model that a config names: a folder, or a Hugging Face hub id whose files were downloaded before."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlplace.codes import problem
from rlplace.errors import Problem, Source, did_you_mean, one_of

# scripts/get_model puts models into its folder `models`
CLONE = Path(__file__).parents[2]
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_OLD_HUB_ID = re.compile(r"\w[\w.-]*")  # an id without an owner, such as gpt2
_OTHER = "        (or the folder of another Hugging Face model)"
GET = f"scripts/get_model smollm2{_OTHER}"
# Models that scripts/get_model downloads or makes
_GOT = re.compile(r"(?:.*/)?models/(smollm2|tiny|tiny_moe|tiny_reward|tiny_vlm)/?")


def model_folder(written: str) -> Path:
    """Return the folder of a model: the first existing folder of all folders in which the model may be.

    If none of these folders exists, return the first of them. `written`: path or hub id in the config.
    """
    places = [folder for folder, _ in _places(written)]
    return next((folder for folder in places if os.path.isdir(folder)), places[0])


def text_keys(model: Mapping[str, object]) -> Mapping[str, Any]:
    """Return the keys of a model's config.json that describe its text model.

    For a vision-language model, the keys of the block `text_config` replace the outer keys, except `model_type`.
    `model`: the content of config.json.
    """
    text = model.get("text_config")
    if isinstance(text, Mapping):
        return {**model, **text, "model_type": model.get("model_type")}
    return model


def no_folder(written: str, key: str, source: Source | None = None) -> Problem:
    """Return the problem that a model's folder was not found. The problem lists all folders that were tried.

    `written`: path or hub id in the config. `key`: the config key of `written`. `source`: file and line of the key.
    """
    made = _GOT.fullmatch(written)
    near = _near(written)
    error = "another"
    if made is not None:
        error = "made-by-script"
    elif near is not None:
        error = "misspelt"
    elif _is_hub_id(written):
        error = "hub-id"
    elif key == "actor.model.path":
        error = "actor"
    looked = [f"looked for {folder}{note}" for folder, note in _places(written)]
    return problem(
        "no-model-folder",
        key,
        written,
        error=error,
        source=source,
        looked="\n".join(looked),
        made=made[1] if made is not None else None,
        near=near,
        written=written,
    )


def to_get(folder: Path) -> str:
    """Return the suggested remedy for a model folder that lacks files: the command that downloads the files."""
    _, found, name = folder.parent.parent.name.partition("models--")
    if found and folder.parent.name == "snapshots":
        return f"hf download {name.replace('--', '/')}{_OTHER}"
    return GET


def instead_of(folder: Path) -> str:
    """Return the suggested remedy for a folder without a model.

    The remedy names the models in its subfolders. If there are none, it is the command that downloads a model.
    """
    below = sorted(f"path: {found.parent}" for found in folder.glob("*/config.json"))
    if len(below) > 1:
        return one_of(below)
    if below:
        return below[0]
    return to_get(folder)


def _near(written: str) -> str | None:
    """Return an existing path or hub id that the user probably means by `written`; None if nothing resembles it.

    The result is a folder with a similar name in the same parent folder, or the hub id of a downloaded model that
    differs only in upper and lower case.
    """
    path = Path(os.path.expanduser(written))
    if path.parent.is_dir() and (
        near := did_you_mean(path.name, [p.name for p in path.parent.iterdir()])
    ):
        return str(path.with_name(near))
    folder = (
        f"models--{written.replace('/', '--')}".lower() if _is_hub_id(written) else ""
    )
    found = (p.name for p in _hub_cache().glob("models--*") if p.name.lower() == folder)
    return next(
        (name.removeprefix("models--").replace("--", "/") for name in found), None
    )


def _places(written: str) -> Iterator[tuple[Path, str]]:
    """Yield (folder, text about the folder for errors), for each folder in which a model may be, in search order.

    `written`: path or hub id in the config.
    """
    path = Path(os.path.expanduser(written))
    yield path.resolve(), ""
    if not path.is_absolute() and (CLONE / path).resolve() != path.resolve():
        yield (CLONE / path).resolve(), ", beside the package"
    if _HUB_ID.fullmatch(written) or _OLD_HUB_ID.fullmatch(written):
        folder = _hub_cache() / f"models--{written.replace('/', '--')}"
        snapshot = folder / "snapshots" / _revision(folder)
        if _is_hub_id(written) or os.path.isdir(snapshot):
            yield snapshot, ", where the Hugging Face hub's downloads are"


def _is_hub_id(written: str) -> bool:
    """Return whether `written` is a Hugging Face hub id `owner/name`. False if `owner` is a local folder."""
    owner = written.partition("/")[0]
    return (
        bool(_HUB_ID.fullmatch(written))
        and owner not in (".", "..", "models")
        and not os.path.isdir(owner)
    )


def _hub_cache() -> Path:
    """Return the folder in which huggingface_hub stores downloads. The library does not have to be installed."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", f"{cache}/huggingface")
    # The name of HF_HUB_CACHE in older versions
    hub = os.environ.get("HUGGINGFACE_HUB_CACHE", f"{home}/hub")
    return Path(
        os.path.expandvars(os.path.expanduser(os.environ.get("HF_HUB_CACHE", hub)))
    ).absolute()


def _revision(folder: Path) -> str:
    """Return the commit of a downloaded model to use: the commit that `main` had at the last download.

    If this commit is not recorded and only one commit is downloaded, return that commit. Otherwise, return "main".
    `folder`: download folder of the model.
    """
    try:
        return (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        found = [snapshot.name for snapshot in (folder / "snapshots").glob("*")]
        if len(found) == 1:
            return found[0]
        return "main"

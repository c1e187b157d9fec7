"""Read the folder of a LoRA adapter that the library peft wrote: whether training can start from its factors.

A plan asks, so this module has no heavy imports.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlplace.codes import problem
from rlplace.errors import ConfigError, Problem, Source, did_you_mean
from rlplace.json_text import parsed
from rlplace.models.heads import file_shapes, weight_shapes

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# Beginning of all names in an adapter's weight file; the name of the weight in the base model follows
_PREFIX = "base_model.model."
_A = ".lora_A.weight"
_B = ".lora_B.weight"
_HEAD = "lm_head"
# Bytes at each end of a weight file that are compared
_SAMPLE = 1 << 20
# First values of factors that leave the base model as it is. Other ones, such as PiSSA and LoRA-GA, change its weights.
_PLAIN_INITS = ("gaussian", "eva", "orthogonal")
# Entries of adapter_config.json that may only be empty here, and what they mean
_OTHER_KINDS = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules beside the factors",
    "lora_bias": "a bias in the factors",
    "rank_pattern": "layers with a rank of their own",
    "alpha_pattern": "layers with an alpha of their own",
    "target_parameters": "factors of parameters that are no linear layers",
    "layer_replication": "replicated layers",
    "trainable_token_indices": "trained tokens",
    "alora_invocation_tokens": "activated LoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "fan_in_fan_out": "transposed weights",
    "megatron_config": "layers of Megatron",
}


def factor_name(stored: str) -> str:
    """Return the name in an adapter's file of the factor that a checkpoint would store as `stored`."""
    return _PREFIX + stored


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Rank, scaling and layers of an adapter's LoRA factors.

    `folder`: absolute path of the adapter. `alpha`: a layer's weight W becomes W + alpha / rank B A. An adapter of
    rank-stabilised LoRA divides its own alpha by the root of the rank (Kalajdzievski 2023, arXiv:2312.03732); `alpha`
    is then its alpha times this root. `targets`: last parts of the names of the layers that have factors, such as
    "q_proj".
    """

    folder: Path
    rank: int
    alpha: float
    targets: tuple[str, ...]


def read_adapter(
    written: str, base: Path, key: str, source: Source | None = None
) -> Adapter:
    """Return the facts of the adapter in a folder. Raises ConfigError if training cannot start from its factors.

    `written`: path of the folder, as in the config. `base`: folder of the model that gets the factors. `key`: config
    key of the path, for errors. `source`: file and line of the key.
    """
    folder = Path(os.path.abspath(os.path.expanduser(written)))
    config, unread = _config(folder, written, key, source)
    if unread is not None:
        raise ConfigError([unread])
    unfit = next(_unfit(config), None)
    if unfit is not None:
        merged = f"{written.rstrip('/')}-merged"
        refused = problem(
            "unfit-adapter",
            key,
            written,
            error="kind",
            source=source,
            kind=unfit,
            command=shlex.join(["scripts/merge_adapter", written, merged]),
            merged=merged,
        )
        raise ConfigError([refused])
    shapes = file_shapes(folder / ADAPTER_WEIGHTS)
    rank = int(config["r"])
    targets = {name.split(".")[-3] for name in shapes if name.endswith((_A, _B))}
    named = config.get("base_model_name_or_path")
    wrong = next(_misfits(shapes, base, rank, targets), None)
    if wrong is None and named and _differ(Path(named), base):
        wrong = f"the weights of {named} are other ones"
    if wrong is not None:
        refused = problem(
            "unfit-adapter",
            key,
            written,
            error="base",
            source=source,
            misfit=wrong,
            base=base,
            named=named or "no model",
        )
        raise ConfigError([refused])
    alpha = float(config["lora_alpha"])
    if config.get("use_rslora"):
        alpha *= math.sqrt(rank)
    return Adapter(
        folder=folder, rank=rank, alpha=alpha, targets=tuple(sorted(targets))
    )


def _config(
    folder: Path, written: str, key: str, source: Source | None
) -> tuple[Mapping[str, Any], Problem | None]:
    """Return the content of adapter_config.json, and the problem of a folder that is not an adapter, or None."""
    file = folder / ADAPTER_CONFIG
    error = None
    reason = ""
    found: object = None
    near = None
    if not folder.is_dir():
        error = "no-folder"
        below = []
        if folder.parent.is_dir():
            below = [each.name for each in folder.parent.iterdir()]
        near = did_you_mean(folder.name, below)
        if near is not None:
            error = "misspelt"
            near = str(Path(written).with_name(near))
    elif not file.is_file():
        error = "no-adapter"
    elif not (folder / ADAPTER_WEIGHTS).is_file():
        error = "no-adapter-weights"
    else:
        try:
            found = parsed(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as raised:
            error = "unread"
            reason = str(raised)
    if error is None and isinstance(found, dict):
        whole = isinstance(found.get("r"), int) and found["r"] > 0
        alpha = found.get("lora_alpha")
        if whole and isinstance(alpha, int | float) and alpha > 0:
            return found, None
    if error is None:
        error = "unread"
        reason = "it has no r and lora_alpha above 0"
    return {}, problem(
        "not-an-adapter",
        key,
        written,
        error=error,
        source=source,
        folder=folder,
        file=file,
        reason=reason,
        near=near,
    )


def _unfit(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a text for each thing in adapter_config.json that the factors of this package cannot be.

    `config`: content of the file.
    """
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        yield f"{kind}"
    for name, meaning in _OTHER_KINDS.items():
        if config.get(name):
            yield f"{meaning} ({name})"
    if config.get("bias", "none") != "none":
        yield f"trained biases (bias: {config['bias']})"
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        yield f"another task (task_type: {config['task_type']})"
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        yield f"a changed base model (init_lora_weights: {init})"


def _misfits(
    shapes: Mapping[str, list[int]], base: Path, rank: int, targets: set[str]
) -> Iterator[str]:
    """Yield a text for each way in which an adapter's factors do not fit a model.

    `shapes`: name -> shape of all tensors of the adapter. `base`: folder of the model. `rank`: rank of all factors.
    `targets`: last parts of the names of the layers that have factors.
    """
    weights = weight_shapes(base)
    if not shapes:
        yield f"{ADAPTER_WEIGHTS} has no factors"
    if _HEAD in targets:
        yield f"it has factors for the head, {_HEAD}"
    adapted = set()
    for name, shape in shapes.items():
        layer = name.removeprefix(_PREFIX).removesuffix(_A).removesuffix(_B)
        weight = weights.get(f"{layer}.weight")
        if not name.startswith(_PREFIX) or not name.endswith((_A, _B)):
            yield f"{name} is no factor of a linear layer"
            continue
        adapted.add(f"{layer}.weight")
        if weight is None or len(weight) != 2:
            yield f"the model has no linear layer {layer}"
            continue
        expected = [weight[0], rank]
        if name.endswith(_A):
            expected = [rank, weight[1]]
        if shape != expected:
            yield f"{name} is {shape}, expected {expected}"
    for name in sorted(weights.keys() - adapted):
        parts = name.split(".")
        if parts[-1] == "weight" and parts[-2] in targets:
            yield f"it has no factors for {name.removesuffix('.weight')}"


def _differ(one: Path, other: Path) -> bool:
    """Return whether two folders have weights that differ. False if one of them has no weights, or other files.

    Files are compared by their sizes, beginnings and ends.
    """
    if one.resolve() == other.resolve():
        return False
    files = {file.name: file for file in one.glob("*.safetensors")}
    others = {file.name: file for file in other.glob("*.safetensors")}
    if not files or files.keys() != others.keys():
        return False
    return any(_sample(files[name]) != _sample(others[name]) for name in files)


def _sample(file: Path) -> tuple[int, bytes, bytes]:
    """Return size, beginning and end of a file."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        first = opened.read(_SAMPLE)
        opened.seek(max(0, size - _SAMPLE))
        last = opened.read(_SAMPLE)
    return size, first, last

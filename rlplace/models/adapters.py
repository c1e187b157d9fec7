"""LoRA factors as folders of the library peft, which peft, transformers and vLLM load as adapters.

::

    adapter_config.json            rank, alpha and target modules of the factors, and the folder of the base model
    adapter_model.safetensors      base_model.model.<layer>.lora_A.weight [r, I], ...lora_B.weight [O, r], float32

Letters: O rows of a weight, I its columns, r the rank of its factors.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from rlplace.codes import config_error
from rlplace.errors import OutputError
from rlplace.json_text import read_object
from rlplace.models.adapter_folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    factor_name,
)
from rlplace.models.checkpoint import Checkpoint, write_bytes
from rlplace.models.lora import (
    LoraSpec,
    checkpoint_name,
    config_of,
    is_factor,
    layer_of,
)
from rlplace.models.saved_state import SavedState

if TYPE_CHECKING:
    from rlplace.models.sharding import Part


def write_adapter(
    folder: Path, base: Path, lora: LoraSpec, factors: Iterable[tuple[str, Tensor]]
) -> None:
    """Replace `folder` by an adapter of the library peft. Raises OutputError; `folder` is then unchanged.

    `base`: folder of the base model. `lora`: rank and alpha of the factors. `factors`: (name in the module, whole
    factor). Each factor is copied to the host before the next factor is taken.
    """
    tensors: dict[str, Tensor] = {}
    targets = set()
    for name, factor in factors:
        stored = checkpoint_name(name)
        copy = factor.detach().to("cpu", copy=True).contiguous()
        tensors[factor_name(stored)] = copy
        targets.add(layer_of(name).rpartition(".")[2])
    config = config_of(lora, sorted(targets), Checkpoint(base).names)
    config.task_type = "CAUSAL_LM"
    config.base_model_name_or_path = str(base)
    config.inference_mode = True
    # Both files are written into a folder beside, which replaces `folder` at the end
    part = folder.with_name(folder.name + ".part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        config.save_pretrained(str(part))
        content = save(tensors, metadata={"format": "pt"})
        write_bytes(part / ADAPTER_WEIGHTS, content)
        # peft writes the targets in another order in every process
        written = read_object(part / ADAPTER_CONFIG, "actor.lora_targets")
        written["target_modules"] = sorted(targets)
        text = json.dumps(written, indent=2, sort_keys=True)
        write_bytes(part / ADAPTER_CONFIG, text.encode())
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise OutputError.of(folder, error) from error


def write_saved_adapter(
    folder: Path, out: Path, base: Path, lora: LoraSpec, *, average: bool = False
) -> None:
    """Write the LoRA factors of a saved state to the folder `out`, as an adapter of the library peft.

    `folder`: folder of the component's saved state. `base`: folder of the base model. `lora`: rank and alpha of the
    factors. `average`: write the moving average of the factors. Raises OutputError, ConfigError.
    """
    state = SavedState(folder, average=average)
    names = [name for name in state.names if is_factor(name)]
    write_adapter(out, base, lora, _as_float(state.tensors(names)))


def adapter_part(folder: Path, name: str, part: Part) -> Tensor:
    """Return the slice `part` of a LoRA factor in the folder of an adapter.

    `name`: name of the factor in the module. Raises ConfigError if the file cannot be read or has no such factor.
    """
    file = folder / ADAPTER_WEIGHTS
    try:
        with safe_open(file, framework="pt") as opened:
            factor: Tensor = opened.get_slice(factor_name(checkpoint_name(name)))[part]
    except (OSError, SafetensorError) as error:
        raise config_error(
            "not-an-adapter",
            "actor.lora_adapter",
            str(folder),
            error="unread",
            folder=folder,
            file=file,
            reason=str(error),
        ) from error
    return factor


def _as_float(factors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, factor in factors:
        yield name, factor.float()

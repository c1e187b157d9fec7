"""Language models from a component's saved state, under the names of a saved model; LoRA factors are merged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from rlplace.codes import config_error
from rlplace.models import BUILDING
from rlplace.models.causal_lm import LmSpec, PackedLm, skeleton, stored_part
from rlplace.models.checkpoint import Checkpoint, write_model
from rlplace.models.lora import Factors, checkpoint_name, factors_of, is_factor
from rlplace.models.saved_state import SavedState


def write_lm(
    folder: Path,
    out: Path,
    spec: LmSpec,
    kind: type[PackedLm],
    *,
    average: bool,
) -> None:
    """Write a saved language model to the folder `out` in transformers' format, as a run does at its end.

    `folder`: folder of the component's saved state. `spec`, `kind`: the model whose state was saved, and its class.
    `average`: write the moving average of the weights. Raises OutputError, ConfigError.
    """
    with BUILDING:
        module = skeleton(kind, spec)
    weights = _lm_weights(SavedState(folder, average=average), spec, module)
    config = module.saved_config()
    write_model(out, spec.folder, weights, config=config, chat=spec.chat)


def lm_weights(folder: Path, spec: LmSpec, kind: type[PackedLm]) -> dict[str, Tensor]:
    """Return name -> weight as an engine loads it: whole, LoRA merged, tied weights under each of their names.

    `folder`: folder of the component's saved state. `spec`, `kind`: the model whose state was saved, and its class.
    Raises ConfigError if the saved state does not fit the model.
    """
    with BUILDING:
        module = skeleton(kind, spec)
    found = dict(_lm_weights(SavedState(folder, average=False), spec, module))
    # A tied weight is saved once: add its other names
    first = dict[Tensor, str]()
    for name, parameter in module.named_tensors():
        stored = first.setdefault(parameter, checkpoint_name(name))
        if stored in found:
            found[checkpoint_name(name)] = found[stored]
    return found


def _lm_weights(
    state: SavedState,
    spec: LmSpec,
    module: PackedLm,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in a checkpoint, whole weight), with LoRA factors merged into the weights.

    `module`: the model on the meta device. Raises ConfigError if a saved tensor has another shape than in the model.
    """
    # Parameters by the first of their names, and their dtypes
    parameters: dict[Tensor, str] = {}
    for name, parameter in module.named_tensors():
        parameters.setdefault(parameter, name)
    dtypes = {name: parameter.dtype for parameter, name in parameters.items()}
    # Saved shapes must be those of the model
    for parameter, name in parameters.items():
        if parameter.requires_grad and state.shape(name) != tuple(parameter.shape):
            raise config_error(
                "model-weights",
                spec.key,
                str(spec.folder),
                error="checkpoint-shape",
                name=name,
                shape=list(parameter.shape),
                stored=list(state.shape(name) or ()),
            )
    # Without LoRA all weights are saved, and read in batches
    if spec.lora is None:
        saved = [name for name in parameters.values() if name not in module.kept]
        yield from (
            (checkpoint_name(name), tensor.to(dtypes[name]))
            for name, tensor in state.tensors(saved)
        )
        return
    # With LoRA only the factors are saved; the base weights come from the model's folder
    trained = {
        name: tensor.to(dtypes[name]) for name, tensor in state.tensors(state.names)
    }
    frozen = Checkpoint(spec.folder, spec.key)
    for parameter, name in parameters.items():
        if name in trained:
            weight = trained[name]
        else:
            weight = stored_part(module, name, parameter, frozen, spec).to(
                parameter.dtype
            )
        # Merge the factors of this weight
        if pair := factors_of(name):
            a, b = (trained[factor] for factor in pair)
            factors = Factors(a=a, b=b, scale=spec.lora.scale)
            weight = factors.added_to(weight, weight.device)
        if not is_factor(name) and name not in module.kept:
            yield checkpoint_name(name), weight

"""Write a language model of a checkpoint as transformers reads it."""

from __future__ import annotations

from pathlib import Path

from rlplace.checkpoints.find import verify
from rlplace.config.blocks.language_model import LanguageModelJobConfig
from rlplace.contract.requests import ExportRequest
from rlplace.jobs.exports import check_component, free_place, no_adapter, written
from rlplace.trained import Trained


def export(trained: Trained, request: ExportRequest) -> None:
    """Write the model of `request.component` from a checkpoint to the folder `request.out`, for transformers.

    With `request.adapter`, write only its LoRA factors, for the library peft.

    Raises ConfigError, OutputError.
    """
    found = trained.checkpoint
    assert found is not None, "of a language model, only checkpoints are found"
    check_component(found, request.component)
    if request.adapter:
        check_adapter(trained, request)
    free_place(request.out, (), number=found.iteration)
    verify(found, request.key)
    with written(request.out):
        _write(trained, request)


def check_adapter(trained: Trained, request: ExportRequest) -> None:
    """Raise ConfigError if the request is for LoRA factors, and the component has none that are exported."""
    config: LanguageModelJobConfig = trained.config
    if request.component != "actor":
        raise no_adapter("adapter-of-critic")
    if config.actor.lora_rank is None:
        raise no_adapter("adapter-of-whole")


def _write(trained: Trained, request: ExportRequest) -> None:
    from rlplace.models.adapters import write_saved_adapter
    from rlplace.models.causal_lm import LmSpec, ValueLm
    from rlplace.models.folders import folder_of
    from rlplace.models.saved_lm import write_lm
    from rlplace.models.vision import policy_of

    config: LanguageModelJobConfig = trained.config
    component = request.component
    folder = trained.folder / component
    job = Path(config.model_path)
    seed = config.runner.seed
    if component == "critic":
        own = folder_of(config.critic.model)
        spec = LmSpec.of(config.critic, component, seed, job_folder=job, own_folder=own)
        write_lm(folder, request.out, spec, ValueLm, average=request.average)
    else:
        spec = LmSpec.of(
            config.actor,
            component,
            seed,
            job_folder=job,
            own_folder=None,
            chat=config.env.chat,
        )
        if request.adapter:
            assert spec.lora is not None, "it was checked"
            write_saved_adapter(
                folder, request.out, spec.folder, spec.lora, average=request.average
            )
            return
        of = policy_of(config, job)
        write_lm(folder, request.out, spec, of, average=request.average)

"""Folders of vision-language models that a vision-language-action policy can read, and those that it cannot.

Needs no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlplace.codes import config_error
from rlplace.config.blocks.policies import VlaConfig
from rlplace.json_text import read_object
from rlplace.models.heads import unread_weights

_KEY = "actor.model.path"
# Families of transformers whose models have the parts that the policy calls
FAMILIES = ("smolvlm", "idefics3")
OPENVLA = "openvla"
SMOLVLA = "smolvla"
# Settings of SmolVLA with the values that the policy has
_SMOLVLA: Mapping[str, object] = {
    "attention_mode": "cross_attn",
    "self_attn_every_n_layers": 2,
    "add_image_special_tokens": False,
    "prefix_length": -1,
    "empty_cameras": 0,
    "adapt_to_pi_aloha": False,
    "min_period": 0.004,
    "max_period": 4.0,
}
# Policies of other libraries by the kind in their config.json -> how they make actions
_CONTINUOUS: Mapping[str, str] = {
    **dict.fromkeys(("pi0", "pi05"), "by flow matching"),
    **dict.fromkeys(
        ("gr00t", "gr00t_n1", "gr00t_n1_5", "gr00t_n1d6", "gr00t_n1d7"),
        "by flow matching",
    ),
    "pi0_fast": "as tokens of a frequency transform (FAST)",
    "diffusion": "by diffusion",
    "act": "by regression",
    "vqbet": "by codes of an autoencoder",
}
# Files of OpenVLA-OFT beside the model -> what they add
_PARTS: Mapping[str, str] = {
    "action_head--": "continuous actions by regression or diffusion",
    "noisy_action_projector--": "continuous actions by diffusion",
    "proprio_projector--": "numbers of the robot as a token",
    "vision_backbone--": "vision towers that read the instruction (FiLM)",
}
# Towers in the layout that the policy has
_TOWERS = ("vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224")
# Files of a checkpoint of openpi, which has no config.json
_OPENPI = ("params", "assets")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpenVlaFolder:
    """What the policy reads of a checkpoint of OpenVLA, beside its weights.

    `text`: keys of its Llama. `vocabulary`: tokens, without those that were added to get a round number; the last
    `bins` of them are actions. `sides`: pixels each way of the images of each tower. `means`, `deviations`: of each
    tower's red, green and blue, where the brightest is 1. `square`: whether it reads square images only.
    """

    text: Mapping[str, Any]
    vocabulary: int
    bins: int
    sides: tuple[int, ...]
    means: tuple[tuple[float, ...], ...]
    deviations: tuple[tuple[float, ...], ...]
    square: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SmolVlaFolder:
    """What the policy reads of a checkpoint of SmolVLA, beside its weights.

    `layers`: of decoder and expert. `expert_share`: width of the expert, as a share of that of the decoder. `state`,
    `action`: numbers of the robot's state and of an action that the network takes, robots with fewer are padded.
    `chunk`: most actions of a chunk. `side`: pixels each way of an image.
    """

    layers: int
    expert_share: float
    state: int
    action: int
    chunk: int
    side: int


def is_smolvla(path: str | None) -> bool:
    """Return whether a folder has a checkpoint of SmolVLA, as lerobot writes it."""
    return path is not None and _kind(_config(Path(path))) == SMOLVLA


def smolvla_folder(folder: Path) -> SmolVlaFolder:
    """Return what the policy reads of a checkpoint of SmolVLA.

    Raises ConfigError if a setting is one that the policy does not have.
    """
    shape = _config(folder)
    for name, value in _SMOLVLA.items():
        if shape.get(name, value) != value:
            raise _other_smolvla(folder, f"{name} is {shape[name]}, not {value}")
    layers = shape.get("num_vlm_layers", 16)
    if shape.get("num_expert_layers", -1) not in (-1, 0, layers):
        raise _other_smolvla(
            folder,
            f"num_expert_layers is {shape['num_expert_layers']}, not that of the decoder",
        )
    sides = shape.get("resize_imgs_with_padding", [512, 512])
    if not isinstance(sides, list) or len({*sides}) != 1:
        raise _other_smolvla(folder, f"resize_imgs_with_padding is {sides}, no square")
    return SmolVlaFolder(
        layers=layers,
        expert_share=shape.get("expert_width_multiplier", 0.75),
        state=shape.get("max_state_dim", 32),
        action=shape.get("max_action_dim", 32),
        chunk=shape.get("chunk_size", 50),
        side=sides[0],
    )


def _other_smolvla(folder: Path, reason: str) -> Exception:
    """Return the error that a checkpoint of SmolVLA has a setting that the policy does not have."""
    return config_error(
        "model-misfit", _KEY, str(folder), error="smolvla-setting", reason=reason
    )


def _check_smolvla(folder: Path, config: VlaConfig) -> None:
    """Raise ConfigError unless the policy can use a checkpoint of SmolVLA as the config says."""
    if config.head != "flow":
        raise config_error(
            "model-misfit", "actor.model.head", config.head, error="smolvla-head"
        )
    of = smolvla_folder(folder)
    named = str(_config(folder).get("vlm_model_name", "SmolVLM2"))
    if config.vlm is None or not (Path(config.vlm) / "config.json").exists():
        raise config_error(
            "model-misfit",
            "actor.model.vlm",
            f"{config.vlm}",
            error="smolvla-vlm",
            name=named,
        )
    shape = _config(Path(config.vlm))
    side = shape.get("vision_config", {}).get("image_size", 364)
    if _kind(shape) != "smolvlm" or side != of.side:
        raise config_error(
            "model-misfit",
            "actor.model.vlm",
            config.vlm,
            error="smolvla-other-vlm",
            name=named,
            kind=_kind(shape),
            side=side,
            needed=of.side,
        )


def is_openvla(path: str | None) -> bool:
    """Return whether a folder has a checkpoint of OpenVLA."""
    return path is not None and _kind(_config(Path(path))) == OPENVLA


def check_folder(config: VlaConfig) -> None:
    """Raise ConfigError unless the folder of a policy has a model that the policy can read, with its weights."""
    assert config.path is not None
    folder = Path(config.path)
    shape = _config(folder)
    kind = _kind(shape)
    if kind in _CONTINUOUS:
        raise config_error(
            "model-misfit",
            _KEY,
            str(folder),
            error="continuous",
            kind=kind,
            way=_CONTINUOUS[kind],
            families=" or ".join((*FAMILIES, OPENVLA, SMOLVLA)),
        )
    if kind == OPENVLA:
        _check_openvla(folder, config)
    elif kind == SMOLVLA:
        _check_smolvla(folder, config)
    elif "vision_config" not in shape:
        raise config_error(
            "model-misfit", _KEY, str(folder), error="no-vision", kind=kind
        )
    elif kind not in FAMILIES:
        raise config_error(
            "model-misfit",
            _KEY,
            str(folder),
            error="family",
            kind=kind,
            families=" or ".join((*FAMILIES, OPENVLA, SMOLVLA)),
        )
    text = shape.get("text_config", {})
    decoder = text.get("model_type", "llama")
    if config.head == "flow" and kind in FAMILIES and decoder != "llama":
        raise config_error(
            "model-misfit",
            "actor.model.head",
            "flow",
            error="flow-decoder",
            kind=decoder,
        )
    reason = unread_weights(folder)
    if reason is not None:
        error = "unread-openvla" if kind == OPENVLA else "unread"
        raise config_error(
            "model-misfit", _KEY, str(folder), error=error, reason=reason
        )


def _check_openvla(folder: Path, config: VlaConfig) -> None:
    """Raise ConfigError unless the policy can use a checkpoint of OpenVLA as the config says."""
    if config.decoding != "parallel":
        error = "no-decoding"
        if config.decoding is not None:
            error = "autoregressive"
        raise config_error(
            "model-misfit",
            "actor.model.decoding",
            f"{config.decoding}",
            error=error,
        )
    for file in sorted(file.name for file in folder.iterdir()):
        for prefix, what in _PARTS.items():
            if file.startswith(prefix):
                raise config_error(
                    "model-misfit",
                    _KEY,
                    str(folder),
                    error="oft-part",
                    file=file,
                    what=what,
                )
    openvla_folder(folder)


def openvla_folder(folder: Path) -> OpenVlaFolder:
    """Return what the policy reads of a checkpoint of OpenVLA, beside its weights.

    Raises ConfigError if a key is missing, or if the checkpoint has other towers or another decoder.
    """
    shape = _config(folder)
    try:
        pictures = read_object(folder / "preprocessor_config.json", _KEY)
    except FileNotFoundError:
        raise _unlike(folder, "it has no preprocessor_config.json") from None
    towers = shape.get("timm_model_ids")
    if towers != [*_TOWERS]:
        raise _unlike(folder, f"its vision towers are {towers}, not {[*_TOWERS]}")
    text = shape.get("text_config")
    if not isinstance(text, dict) or text.get("model_type", "llama") != "llama":
        raise _unlike(folder, "its decoder is no Llama")
    try:
        found = OpenVlaFolder(
            text=text,
            vocabulary=text["vocab_size"] - shape.get("pad_to_multiple_of", 64),
            bins=shape.get("n_action_bins", 256),
            sides=tuple(size[-1] for size in pictures["input_sizes"]),
            means=tuple(map(tuple, pictures["means"])),
            deviations=tuple(map(tuple, pictures["stds"])),
            square=pictures["image_resize_strategy"] != "resize-naive",
        )
    except (LookupError, TypeError) as error:
        raise _unlike(
            folder,
            f"a key of config.json or preprocessor_config.json is missing or another: {error!r}",
        ) from error
    numbers = [*found.means, *found.deviations]
    if (len(found.sides), [len(each) for each in numbers]) != (2, [3] * 4):
        raise _unlike(
            folder,
            "input_sizes, means and stds in preprocessor_config.json are not those of two towers",
        )
    return found


def _unlike(folder: Path, reason: str) -> Exception:
    """Return the error that a checkpoint of OpenVLA is not as published."""
    return config_error(
        "model-misfit", _KEY, str(folder), error="not-published", reason=reason
    )


def _config(folder: Path) -> Mapping[str, Any]:
    """Return the content of a folder's config.json. Raises ConfigError if it has none."""
    try:
        return read_object(folder / "config.json", _KEY)
    except FileNotFoundError:
        error = "no-folder"
        if all((folder / name).is_dir() for name in _OPENPI):
            error = "openpi"
        raise config_error("model-misfit", _KEY, str(folder), error=error) from None


def _kind(shape: Mapping[str, Any]) -> str:
    """Return the kind of model in a config.json: `model_type` of transformers, `type` of lerobot."""
    return str(shape.get("model_type", shape.get("type"))).lower()

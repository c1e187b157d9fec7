"""Config blocks of `actor.model` in jobs on simulators: one for each kind of policy network."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from rlplace.config.fields import knob

# Kind of recurrent layer -> number of remembered values for each unit of its size.
_CELLS = {
    "none": 0,
    "gru": 1,
    "lstm": 2,
}


class _WithMemory:
    memory: Literal["none", "gru", "lstm"]
    memory_size: int

    @property
    def remembered(self) -> int:
        """The number of float32 values of recurrent state that the network keeps for each environment."""
        return _CELLS[self.memory] * self.memory_size


def _memory() -> Any:
    return knob(
        "layer behind the hidden ones that remembers earlier steps: none | gru | lstm",
        "none",
    )


def _memory_size() -> Any:
    return knob("width of that layer", 128, minimum=1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MlpConfig(_WithMemory):
    """Two MLPs for policy and value, or, with a memory, one recurrent network for policy and value."""

    kind: Literal["mlp"] = knob("policy and value network, fully connected", "mlp")
    hidden: tuple[int, ...] = knob("widths of the hidden layers", (64, 64), minimum=1)
    activation: Literal["tanh", "relu", "silu"] = knob(
        "activation function between the layers", "tanh"
    )
    memory: Literal["none", "gru", "lstm"] = _memory()
    memory_size: int = _memory_size()
    initial_log_std: float = knob(
        "log of the first action noise, continuous actions only", 0.0
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CnnConfig(_WithMemory):
    """A CNN for image observations. Observation entries that are not images go through a separate layer."""

    kind: Literal["cnn"] = knob("convolutions for images", "cnn")
    network: Literal["nature", "impala"] = knob(
        "nature: for images of at least 36 x 36 pixels | impala: for images of any size",
        "nature",
    )
    channels: tuple[int, ...] = knob(
        "channels of each layer (nature) or stage (impala); none: those of the paper",
        (),
        minimum=1,
    )
    hidden: tuple[int, ...] = knob(
        "widths of the layers after the convolutions", (512,), minimum=1
    )
    memory: Literal["none", "gru", "lstm"] = _memory()
    memory_size: int = _memory_size()
    initial_log_std: float = knob(
        "log of the first action noise, continuous actions only", 0.0
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """A small transformer over observation entries and image patches, which decides each action of a chunk."""

    kind: Literal["transformer"] = knob(
        "a transformer, made for chunks of actions", "transformer"
    )
    width: int = knob("numbers of a token; a multiple of heads", 64, minimum=1)
    layers: int = knob("blocks of attention and a layer of 4 x width", 2, minimum=1)
    heads: int = knob("number of heads of each attention", 4, minimum=1)
    patch: int = knob("width and height of an image patch, in pixels", 8, minimum=1)
    initial_log_std: float = knob(
        "log of the first action noise, continuous actions only", 0.0
    )

    @property
    def remembered(self) -> int:
        return 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VlaConfig:
    """A vision-language-action policy: a vision-language model of transformers that chooses bins of actions, or makes
    continuous actions from noise.

    Without `path`, the model is a small SmolVLM from scratch, of `width`, `layers`, `vision_layers`, `heads` and
    `patch`, that reads the words of `words`. With `path`, these keys have no effect.
    """

    kind: Literal["vla"] = knob(
        "a vision-language model of transformers, for robots", "vla"
    )
    path: str | None = knob(
        "folder of a SmolVLM, an Idefics3, an OpenVLA-OFT or a SmolVLA; null: a small SmolVLM from scratch",
        None,
    )
    vlm: str | None = knob(
        "with a path to a SmolVLA: folder of its vision-language model, of which config.json and tokenizer are read",
        None,
    )
    image: str | None = knob(
        "entry of the observation that is the camera image; null: the only image", None
    )
    cameras: tuple[str, ...] = knob(
        "entries that are images of several cameras, in the order in which they are read; none: one image",
        (),
    )
    instruction: str | None = knob(
        "entry of the observation that is the instruction; null: the only text, if there is one",
        None,
    )
    state: tuple[str, ...] = knob(
        "entries of numbers that are read, such as joint angles; none: all", ()
    )
    instruction_tokens: int = knob(
        "largest number of tokens of an instruction; shorter ones are padded",
        16,
        minimum=1,
    )
    decoding: Literal["parallel", "autoregressive"] | None = knob(
        "how the model of an OpenVLA folder was trained to make actions; OpenVLA-OFT: parallel",
        None,
    )
    crop_area: float = knob(
        "of an OpenVLA folder: share of the image that is used, around its centre; 0.9 if trained with crops",
        1.0,
        minimum=0.01,
        maximum=1.0,
    )
    head: Literal["bins", "flow"] = knob(
        "how actions are made. bins: each element is a choice | flow: continuous actions from noise, by flow matching",
        "bins",
    )
    denoising_steps: int = knob(
        "head flow: steps from noise to an action", 4, minimum=1, maximum=100
    )
    noise_level: float = knob(
        "head flow: noise of each step while actions are sampled, as in Flow-SDE",
        0.5,
        minimum=0.01,
        maximum=1.0,
    )
    expert_width: int = knob(
        "head flow: numbers of a token of the expert, which makes the actions",
        48,
        minimum=2,
    )
    words: tuple[str, ...] = knob("without a path: the vocabulary of instructions", ())
    width: int = knob(
        "without a path: numbers of a token; a multiple of 2 x heads", 64, minimum=1
    )
    layers: int = knob("without a path: layers of the decoder", 2, minimum=1)
    vision_layers: int = knob(
        "without a path: layers of the vision tower", 1, minimum=1
    )
    heads: int = knob("without a path: heads of each attention", 4, minimum=1)
    patch: int = knob(
        "without a path: width and height of a patch, in pixels; 2 x 2 patches are a token",
        4,
        minimum=1,
    )

    @property
    def remembered(self) -> int:
        return 0

    @property
    def initial_log_std(self) -> float:
        """Without effect: actions are choices, or have the noise of `noise_level`."""
        return 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModuleConfig:
    """A custom policy network.

    `kwargs`: keyword arguments of its class, after the observation and action spaces.
    """

    kind: Literal["module"] = knob("a torch.nn.Module of your own", "module")
    name: str = knob("package.module:Class")
    kwargs: Mapping[str, object] = knob(
        "arguments of the class, after the spaces", dict
    )
    remembered: int = knob(
        "size of the memory state of an environment, in float32 numbers; 0: none",
        0,
        minimum=0,
    )
    initial_log_std: float = knob(
        "log of the first action noise, continuous actions only", 0.0
    )


PolicyConfig = MlpConfig | CnnConfig | TransformerConfig | VlaConfig | ModuleConfig

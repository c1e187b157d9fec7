"""Blocks of `actor.model` in jobs with simulators: one for each kind of network."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from rlplace.config.fields import knob


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MlpConfig:
    """Policy and value network of a simulator's observations."""

    kind: Literal["mlp"] = knob("policy and value network, fully connected", "mlp")
    hidden: tuple[int, ...] = knob("widths of the hidden layers", (64, 64), minimum=1)
    activation: Literal["tanh", "relu", "silu"] = knob("between the layers", "tanh")
    initial_log_std: float = knob("log of the first action noise, continuous actions only", 0.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CnnConfig:
    """Network of observations with images; numbers beside them go through a layer of their own."""

    kind: Literal["cnn"] = knob("convolutions for images", "cnn")
    network: Literal["nature", "impala"] = knob(
        "nature: of 36 pixels and more each way | impala: of any size", "nature"
    )
    channels: tuple[int, ...] = knob("of the layers of nature, the stages of impala; none: the paper's", (), minimum=1)
    hidden: tuple[int, ...] = knob("widths of the layers behind the convolutions", (512,), minimum=1)
    initial_log_std: float = knob("log of the first action noise, continuous actions only", 0.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModuleConfig:
    """Network of your own."""

    kind: Literal["module"] = knob("a torch.nn.Module of your own", "module")
    name: str = knob("package.module:Class")
    kwargs: Mapping[str, object] = knob("passed to the class behind the spaces", dict)
    initial_log_std: float = knob("log of the first action noise, continuous actions only", 0.0)


PolicyConfig = MlpConfig | CnnConfig | ModuleConfig

"""The network of OpenVLA and OpenVLA-OFT, with the names of its published checkpoints.

::

    vision_backbone.featurizer         DINOv2 with registers, in the layout of timm ┐
    vision_backbone.fused_featurizer   SigLIP, in the layout of timm ───────────────┴▶ features, joined
    projector                          three linear layers ▶ tokens of the decoder
    language_model                     Llama 2 of transformers

The layout is that of `prismatic/extern/hf/modeling_prismatic.py` in openvla/openvla (Kim et al. 2024, arXiv:2406.09246)
and of timm's `vision_transformer.py`. Features are those of the last block but one of each tower, without norm. So the
last block, its norm and the pooling of SigLIP are stored, and have no effect.

Letters: N images, P patches of an image, D width of a tower, W width of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

from rlplace.codes import config_error
from rlplace.models.heads import weight_shapes

# Both towers of OpenVLA have 16 heads in each layer
HEADS = 16
# That of timm's vision transformers
_EPSILON = 1e-6
_KEY = "actor.model.path"

Shapes = Mapping[str, Sequence[int]]


class Prismatic(nn.Module):
    """Two vision towers, a projector and a Llama, whose state has the names of a published checkpoint."""

    def __init__(self, shapes: Shapes, text: Mapping[str, Any]) -> None:
        """Make a network whose weights are not set.

        `shapes`: name -> shape of each weight in the checkpoint. `text`: `text_config` of its config.json.
        """
        super().__init__()
        self.vision_backbone = _Towers(_under(shapes, "vision_backbone"))
        self.projector = _Projector(_under(shapes, "projector"))
        keys = {
            name: value
            for name, value in text.items()
            if name not in ("torch_dtype", "dtype")
        }
        self.language_model = LlamaForCausalLM(LlamaConfig(**keys))

    def seen(self, images: Sequence[Tensor]) -> Tensor:
        """Return the tokens of N images, [N, P, W]. `images`: for each tower [N, 3, side, side], normalised for it."""
        tokens: Tensor = self.projector(self.vision_backbone(images))
        return tokens


class _Towers(nn.Module):
    """Both vision towers."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.featurizer = Tower(_under(shapes, "featurizer"))
        self.fused_featurizer = Tower(_under(shapes, "fused_featurizer"))

    def forward(self, images: Sequence[Tensor]) -> Tensor:
        """Return the features of both towers, joined: [N, P, D of the first + D of the second]."""
        first, second = images
        return torch.cat([self.featurizer(first), self.fused_featurizer(second)], dim=2)


class Tower(nn.Module):
    """A vision transformer in the layout of timm. The weights in `shapes` say which parts it has."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        width, _, side, _ = shapes["patch_embed.proj.weight"]
        self.patch_embed = _Patches(width, side)
        self.pos_embed = _empty(shapes["pos_embed"])
        # Tokens before those of the patches: a class, then registers
        self._prefix = 0
        for name in ("cls_token", "reg_token"):
            if name in shapes:
                setattr(self, name, _empty(shapes[name]))
                self._prefix += shapes[name][1]
        depth = len({_number(name) for name in shapes if name.startswith("blocks.")})
        hidden = shapes["blocks.0.mlp.fc1.weight"][0]
        scaled = "blocks.0.ls1.scale_factor" in shapes
        self.blocks = nn.ModuleList(
            _Block(width, hidden, scaled=scaled) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width, _EPSILON)
        if "attn_pool.latent" in shapes:
            self.attn_pool = _Pool(width, shapes["attn_pool.mlp.fc1.weight"][0])

    def forward(self, images: Tensor) -> Tensor:
        """Return features of each patch of N images, [N, P, D]. `images`: [N, 3, side, side]."""
        # Positions are those of patches alone
        features = self.patch_embed(images) + self.pos_embed
        before = [
            getattr(self, name).expand(len(images), -1, -1)
            for name in ("cls_token", "reg_token")
            if hasattr(self, name)
        ]
        features = torch.cat([*before, features], dim=1)
        for block in self.blocks[:-1]:
            features = block(features)
        found: Tensor = features[:, self._prefix :]
        return found


class _Block(nn.Module):
    """A layer of a vision transformer: attention, then two linear layers, each with a norm before it."""

    def __init__(self, width: int, hidden: int, *, scaled: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, _EPSILON)
        self.attn = _Attention(width)
        self.norm2 = nn.LayerNorm(width, _EPSILON)
        self.mlp = _TwoLayers(width, hidden)
        self.ls1 = _Scale(width) if scaled else nn.Identity()
        self.ls2 = _Scale(width) if scaled else nn.Identity()

    def forward(self, features: Tensor) -> Tensor:
        """Return [N, tokens, D] of the same shape."""
        features = features + self.ls1(self.attn(self.norm1(features)))
        added: Tensor = self.ls2(self.mlp(self.norm2(features)))
        return features + added


class _Patches(nn.Module):
    """Makes a token of each patch of `side` pixels each way."""

    def __init__(self, width: int, side: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, side, stride=side)

    def forward(self, images: Tensor) -> Tensor:
        """Return [N, P, D] for N images, [N, 3, height, width]."""
        tokens: Tensor = self.proj(images)
        return tokens.flatten(2).transpose(1, 2)


class _Attention(nn.Module):
    """Attention of all tokens to all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, features: Tensor) -> Tensor:
        """Return [N, tokens, D] of the same shape."""
        rows, tokens, width = features.shape
        parts = self.qkv(features).view(rows, tokens, 3, HEADS, width // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        joined: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return joined


class _TwoLayers(nn.Module):
    """Two linear layers."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, features: Tensor) -> Tensor:
        """Return [N, tokens, D] of the same shape."""
        added: Tensor = self.fc2(functional.gelu(self.fc1(features)))
        return added


class _Scale(nn.Module):
    """A factor for each element of a token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = _empty((width,))

    def forward(self, features: Tensor) -> Tensor:
        """Return [N, tokens, D] of the same shape."""
        return features * self.scale_factor


class _Pool(nn.Module):
    """The pooling of SigLIP. OpenVLA stores it and does not call it."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.latent = _empty((1, 1, width))
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, _EPSILON)
        self.mlp = _TwoLayers(width, hidden)


class _Projector(nn.Module):
    """Makes tokens of the decoder from features of patches."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        hidden, features = shapes["fc1.weight"]
        width = shapes["fc3.weight"][0]
        self.fc1 = nn.Linear(features, hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.fc3 = nn.Linear(width, width)

    def forward(self, features: Tensor) -> Tensor:
        """Return tokens [N, P, W] for features [N, P, D of both towers]."""
        hidden = functional.gelu(self.fc1(features))
        hidden = functional.gelu(self.fc2(hidden))
        tokens: Tensor = self.fc3(hidden)
        return tokens


def stored_prismatic(folder: Path, text: Mapping[str, Any]) -> Prismatic:
    """Return the network of a checkpoint, in float32.

    `text`: `text_config` of its config.json. Raises ConfigError unless the files have exactly the weights of the
    network, in its shapes.
    """
    shapes = weight_shapes(folder)
    with no_init_weights():
        try:
            model = Prismatic(shapes, text)
        except (LookupError, ValueError) as error:
            raise _other_layout(folder, str(error), 1) from error
    parameters = dict(model.named_parameters())
    wrong = sorted(
        name
        for name in {*parameters, *shapes}
        if name not in parameters
        or name not in shapes
        or list(parameters[name].shape) != list(shapes[name])
    )
    if wrong:
        raise _other_layout(folder, wrong[0], len(wrong))
    with torch.no_grad():
        for name, weight in _weights(folder):
            parameters[name].copy_(weight)
    return model


def _other_layout(folder: Path, name: str, count: int) -> Exception:
    """Return the error that the files of a folder have other weights than the published layout."""
    return config_error(
        "model-misfit", _KEY, str(folder), error="layout", name=name, count=count
    )


def _weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of each weight in the files of a folder."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # it is no mapping
                yield name, opened.get_tensor(name)


def _under(shapes: Shapes, part: str) -> Shapes:
    """Return the shapes of the weights of one part, with their names inside the part."""
    prefix = f"{part}."
    return {
        name.removeprefix(prefix): shape
        for name, shape in shapes.items()
        if name.startswith(prefix)
    }


def _number(name: str) -> str:
    """Return the number of the block in the name of a weight, such as blocks.3.norm1.weight."""
    return name.split(".")[1]


def _empty(shape: Sequence[int]) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape))

"""The weights an engine must be given: names and shapes of the model's checkpoint, read without reading a weight."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

if TYPE_CHECKING:
    from torch import Tensor

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COMPUTED = "rotary_emb.inv_freq"  # old checkpoints store this buffer, which every model computes for itself


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedWeights:
    """`tied`: the head is the embedding, which checkpoints mostly store once."""

    shapes: Mapping[str, tuple[int, ...]]
    tied: bool

    @classmethod
    def of_folder(cls, folder: Path) -> ExpectedWeights:
        """Raises FileNotFoundError without safetensors or config.json."""
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{folder} has no *.safetensors")
        shapes = {name: shape for file in files for name, shape in _shapes(file) if _COMPUTED not in name}
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        said = bool(config.get("tie_word_embeddings"))
        return cls(shapes=shapes, tied=EMBEDDING in shapes and (said or HEAD not in shapes))

    @property
    def elements(self) -> int:
        """Of all weights, a tied one counted once."""
        return sum(math.prod(shape) for name, shape in self.shapes.items() if not (self.tied and name == HEAD))

    def complete(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """With a tied head under its own name: an engine that packs its head does not see that it is the embedding."""
        if self.tied and HEAD not in weights and EMBEDDING in weights:
            return {**weights, HEAD: weights[EMBEDDING]}
        return weights

    def problems(self, weights: Mapping[str, Tensor]) -> Iterator[str]:
        """What is missing, unknown or of another shape in `weights`, completed."""
        expected = dict(self.shapes)
        if self.tied:
            expected[HEAD] = expected[EMBEDDING]
        yield from (f"{name} is missing" for name in sorted(expected.keys() - weights.keys()))
        yield from (f"{name} is not the model's" for name in sorted(weights.keys() - expected.keys()))
        for name in sorted(expected.keys() & weights.keys()):
            if tuple(weights[name].shape) != expected[name]:
                yield f"{name} is {list(weights[name].shape)}, expected {list(expected[name])}"


def _shapes(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    with safe_open(file, framework="np") as opened:
        for name in opened.keys():  # noqa: SIM118  it is no mapping
            yield name, tuple(opened.get_slice(name).get_shape())

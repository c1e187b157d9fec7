"""Weights as an engine loads them: a version completed by kept weights, and checked against names and shapes.

::

    first sync    all weights ──────────────▶ kept, on the host ───────────────────────┐
    later ones    trained weights ──▶ replace the kept ones ───────────────────────────┼──▶ engine.load: all weights
                  low-rank factors alone ──▶ added to the kept weights while loading ──┘

Each version is made from the first one: rounding does not add up, and an engine that dropped its weights gets them all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from rlplace.errors import WeightSyncError
from rlplace.models.heads import weight_shapes
from rlplace.workers.engines.contract import NO_FACTORS, FactorsOf, Weights

if TYPE_CHECKING:
    from rlplace.comm.weights.version import ReceivedWeights

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COMPUTED = "rotary_emb.inv_freq"  # old checkpoints store this buffer, which every model computes for itself


class KeptWeights:
    """Keeps the last full version, because later versions contain only changed weights.

    All ranks of a node share its memory. `keeps`: such versions will come. `scale`: of factors that travel apart.
    """

    def __init__(self, owner: str, *, keeps: bool, scale: float | None = None) -> None:
        self._owner, self._keeps, self._scale = owner, keeps, scale
        self._kept: ReceivedWeights | None = None

    @contextlib.contextmanager
    def completed(self, received: ReceivedWeights) -> Iterator[tuple[Weights, FactorsOf]]:
        """Give all weights of the received version; release it afterwards, or keep it. Raises WeightSyncError."""
        with contextlib.ExitStack() as releasing:
            releasing.enter_context(received)
            yield self._completed(received)
            if self._keeps and not received.partial:
                releasing.pop_all()
                self.close()
                self._kept = received

    def _completed(self, received: ReceivedWeights) -> tuple[Weights, FactorsOf]:
        weights: Weights = received.tensors  # no copy: a release lets go of what is in there
        if received.partial:
            if self._kept is None:
                what = f"only some of the weights of version {received.version} arrived, the others never did"
                why, fix = "a partial sync completes the first full one, and none came here", "actor.sync.mode: all"
                raise WeightSyncError.about("some-weights", self._owner, what, why=why, fix=fix)
            weights = {**self._kept.tensors, **weights}
        if self._scale is None:
            return weights, NO_FACTORS
        from rlplace.models.lora import take_factors

        weights, factors = take_factors(weights, self._scale)
        assert factors.keys() <= weights.keys(), "factors of weights that the first sync brought"
        return weights, factors

    def close(self) -> None:
        if self._kept is not None:
            self._kept.release()
            self._kept = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedWeights:
    """Names and shapes of a model's checkpoint, read without reading a weight.

    `tied`: the head is the embedding, which checkpoints mostly store once.
    """

    shapes: Mapping[str, tuple[int, ...]]
    tied: bool

    @classmethod
    def of_folder(cls, folder: Path) -> ExpectedWeights:
        """Raises FileNotFoundError without safetensors or config.json, OSError for a file that cannot be read."""
        for file in folder.glob("*.safetensors"):
            try:
                with safe_open(file, framework="np"):
                    pass  # the header is checked against the length of the file
            except SafetensorError as error:
                raise OSError(f"{file} is damaged or cut short: {error}") from error
        shapes = {name: tuple(shape) for name, shape in weight_shapes(folder).items() if _COMPUTED not in name}
        if not shapes:
            raise FileNotFoundError(f"{folder} has no *.safetensors")
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tied = EMBEDDING in shapes and (bool(config.get("tie_word_embeddings")) or HEAD not in shapes)
        return cls(shapes=shapes | ({HEAD: shapes[EMBEDDING]} if tied else {}), tied=tied)

    @property
    def elements(self) -> int:
        """Number of weights, a tied one counted once."""
        return sum(math.prod(shape) for name, shape in self.shapes.items() if not (self.tied and name == HEAD))

    def complete(self, weights: Weights) -> Weights:
        """Add a tied head under its own name: an engine that packs its head does not see that it is the embedding."""
        if self.tied and HEAD not in weights and EMBEDDING in weights:
            return {**weights, HEAD: weights[EMBEDDING]}
        return weights


def check_fit(given: Weights, expected: Mapping[str, tuple[int, ...]], *, owner: str, version: int) -> None:
    """Raise ValueError, naming all that is missing, unknown or of another shape in `given`."""
    problems = [f"{name} is missing" for name in sorted(expected.keys() - given.keys())]
    problems += [f"{name} is not the model's" for name in sorted(given.keys() - expected.keys())]
    problems += [
        f"{name} is {list(given[name].shape)}, expected {list(expected[name])}"
        for name in sorted(expected.keys() & given.keys())
        if tuple(given[name].shape) != expected[name]
    ]
    if problems:
        raise ValueError(f"{owner}: weights of version {version} do not fit the model: " + "; ".join(problems))

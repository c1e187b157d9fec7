"""How a rollout rank loads weights: pulls a version, completes it by kept weights, loads its engine, verifies it.

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
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

from rlplace.comm.weights.receiver import receiver_of
from rlplace.metrics import Metric, Metrics
from rlplace.workers.engines.errors import some_weights

if TYPE_CHECKING:
    from torch import Tensor

    from rlplace.comm.channel import Channel
    from rlplace.comm.weights.version import ReceivedWeights
    from rlplace.models.lora import Factors
    from rlplace.placement.flow import Delivery
    from rlplace.workers.engines.contract import Engine
    from rlplace.workers.engines.sync_probe import SyncProbe
    from rlplace.workers.worker import WorkerContext

Loadable = tuple[Mapping[str, "Tensor"], Mapping[str, "Factors"]]  # all weights, and the factors to add to some

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COMPUTED = "rotary_emb.inv_freq"  # old checkpoints store this buffer, which every model computes for itself


class EngineWeights:
    """One rollout rank's end of the weight sync. Owns the receiver and the kept weights; the engine is its worker's."""

    def __init__(
        self,
        engine: Engine,
        channel: Channel,
        context: WorkerContext,
        deliveries: Sequence[Delivery],
        *,
        kept: KeptWeights,
        probe: SyncProbe | None = None,
    ) -> None:
        self._engine, self._kept, self._probe = engine, kept, probe
        self._receiver = receiver_of(
            channel,
            context.rank,
            deliveries=deliveries if context.folder else (),  # without a folder all ranks are threads without GPUs
            folder=context.folder,
            device=torch.device(context.device.torch_name),
        )

    def announced(self) -> bool:
        """Return whether a version that was not pulled yet has begun to arrive."""
        return self._receiver.announced()

    def pull(self, version: int) -> Metrics:
        """Block until `version` is here, verified and loaded.

        Raises WeightSyncError or as the channel; then the weights loaded before are still in use.
        """
        began = time.perf_counter()
        received = self._receiver.pull(version)
        if self._probe is not None:
            self._probe.take(received.tensors)
        with self._kept.completed(received) as (weights, factors):
            pulled = time.perf_counter()
            self._engine.load(weights, version, factors)
        loaded = time.perf_counter()
        report = received.report
        return {
            "rollout/pull_s": Metric(loaded - began, "max"),
            "rollout/load_s": Metric(loaded - pulled, "max"),
            "rollout/pull_gb_per_s": Metric(report.size_bytes / (loaded - began) / 1e9, "min"),
            "rollout/pull_bytes": Metric(report.size_bytes, "sum"),
            **{f"rollout/pulled_{name}_bytes": Metric(size, "sum") for name, size in report.transports.items()},
            **self.verify(),
        }

    def verify(self) -> Metrics:
        """Compare the engine's log-probabilities of the probe with the actor's, for the loaded version.

        Does nothing when not due or while the engine cannot generate. Raises WeightSyncError where they differ.
        """
        if self._probe is None:
            return {}
        self._probe.compare()
        return self._probe.metrics()

    def close(self) -> None:
        self._kept.close()
        self._receiver.close()


class KeptWeights:
    """Keeps the last full version, because later versions contain only changed weights.

    All ranks of a node share its memory. `keeps`: such versions will come. `scale`: of factors that travel apart.
    """

    def __init__(self, owner: str, *, keeps: bool, scale: float | None = None) -> None:
        self._owner, self._keeps, self._scale = owner, keeps, scale
        self._kept: ReceivedWeights | None = None

    @contextlib.contextmanager
    def completed(self, received: ReceivedWeights) -> Iterator[Loadable]:
        """Give all weights of the received version; release it afterwards, or keep it. Raises WeightSyncError."""
        loaded = False
        try:
            yield self._completed(received)
            loaded = True
        finally:
            if loaded and self._keeps and not received.partial:
                self.close()
                self._kept = received
            else:
                received.release(loaded=loaded)

    def _completed(self, received: ReceivedWeights) -> Loadable:
        weights: Mapping[str, Tensor] = received.tensors  # no copy: a release lets go of what is in there
        if received.partial:
            if self._kept is None:
                raise some_weights(self._owner, received.version)
            weights = {**self._kept.tensors, **weights}
        if self._scale is None:
            return weights, {}
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
        """Raises FileNotFoundError without safetensors or config.json."""
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{folder} has no *.safetensors")
        shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            with safe_open(file, framework="np") as opened:
                names = [name for name in opened.keys() if _COMPUTED not in name]  # noqa: SIM118  it is no mapping
                shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in names}
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tied = EMBEDDING in shapes and (bool(config.get("tie_word_embeddings")) or HEAD not in shapes)
        return cls(shapes=shapes | ({HEAD: shapes[EMBEDDING]} if tied else {}), tied=tied)

    @property
    def elements(self) -> int:
        """Number of weights, a tied one counted once."""
        return sum(math.prod(shape) for name, shape in self.shapes.items() if not (self.tied and name == HEAD))

    def complete(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Add a tied head under its own name: an engine that packs its head does not see that it is the embedding."""
        if self.tied and HEAD not in weights and EMBEDDING in weights:
            return {**weights, HEAD: weights[EMBEDDING]}
        return weights


def mismatches(given: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], noun: str) -> list[str]:
    """Name what is missing, unknown or of another shape in `given`."""
    problems = [f"{name} is missing" for name in sorted(expected.keys() - given.keys())]
    problems += [f"{name} is not the {noun}'s" for name in sorted(given.keys() - expected.keys())]
    return problems + [
        f"{name} is {list(given[name].shape)}, expected {list(expected[name])}"
        for name in sorted(expected.keys() & given.keys())
        if tuple(given[name].shape) != expected[name]
    ]

"""Verify a weight sync by its effect: actor and engine give the same tokens the same log-probabilities.

::

    actor     push: scores the probe ─▶ encloses the log-probabilities with the weights ─┐
    rollout   pull ◀─────────────────────────────────────────────────────────────────────┘
              as soon as the engine can generate: scores the probe, compares

They are sent as one more tensor, so that they belong to their version by every transport.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from rlplace.comm.weights.shards import Shard, replicas
from rlplace.errors import WeightSyncError
from rlplace.metrics import Metric, Metrics
from rlplace.placement.schedule import Residency

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from rlplace.config.schema import Config
    from rlplace.workers.arguments import WorkerArguments
    from rlplace.workers.engines.contract import TextEngine

NAME = "probe.logprobs"  # among the weights; no model has it
_TOKENS = 32
# Largest difference of one log-probability that rounding explains. Half precision differs by some hundredths on most
# tokens and tenths on unlikely ones; weights that are not the actor's, by a nat and more.
_TOLERANCE = {"fp32": 1e-3, "fp16": 0.1, "bf16": 0.5, "fp8": 1.0}


def probe_tokens(job: WorkerArguments) -> list[int]:
    """Draw tokens evenly from the vocabulary, the same in every process."""
    vocabulary: int = json.loads((job.model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    length = min(_TOKENS, job.config.algorithm.longest - 1)
    drawn: list[int] = np.random.default_rng(0).integers(0, vocabulary, length).tolist()
    return drawn


def tolerance(config: Config) -> float:
    """Return the largest difference that rounding explains, by the coarsest dtype in use."""
    rollout = config.text_rollout
    return max(_TOLERANCE[dtype] for dtype in (config.actor.compute, rollout.dtype, rollout.cache))


def probe_shard(scores: Sequence[float] | None, length: int, ranks: int) -> Shard:
    """Wrap the `scores` of all but the first of `length` tokens, equal on all `ranks`; None: not probed."""
    data = torch.full((length - 1,), torch.nan) if scores is None else torch.tensor(scores, dtype=torch.float32)
    return Shard(names=(NAME,), dtype="float32", shape=(length - 1,), blocks=replicas(length - 1, ranks), data=data)


class SyncProbe:
    """A rollout rank's side. Owns the actor's log-probabilities of the last loaded version until they are compared."""

    def __init__(self, engine: TextEngine, tokens: Sequence[int], tolerance: float, owner: str) -> None:
        self._engine, self._tokens, self._tolerance, self._owner = engine, tokens, tolerance, owner
        self._expected: NDArray[np.float32] | None = None
        self._largest: float | None = None

    def take(self, tensors: dict[str, Tensor]) -> None:
        """Take the enclosed log-probabilities out of `tensors`."""
        expected = tensors.pop(NAME, None)
        self._expected = None if expected is None or expected.isnan().any() else expected.cpu().numpy().copy()

    def compare(self) -> Metrics:
        """Compare the engine's log-probabilities with the actor's, once for each version that is probed.

        Does nothing while the engine cannot generate. Return the largest difference of the last comparison. Raises
        WeightSyncError where they differ by more than rounding.
        """
        if self._expected is not None and self._engine.residency is Residency.FULL:
            expected, self._expected = self._expected, None
            differences = np.abs(np.asarray(self._engine.logprobs(self._tokens), np.float64) - expected)
            differences[np.isnan(differences)] = np.inf
            worst = int(differences.argmax())
            self._largest = float(differences[worst])
            if self._largest > self._tolerance:
                raise self._differ(worst, float(expected[worst]))
        return {} if self._largest is None else {"sync/verify_max_diff": Metric(self._largest, "max")}

    def _differ(self, worst: int, expected: float) -> WeightSyncError:
        place = worst + 1  # the first token is given
        what = f"the engine does not use the weights of version {self._engine.version}: token {self._tokens[place]}, "
        what += f"number {place} of the probe, differs most, by {self._largest:.3g}"
        why = f"rounding explains {self._tolerance:g} at most in these types; the engine has other weights"
        fix = "rollout.engine: transformers        (if it passes there, the other engine loads this model wrongly)"
        got = f"the actor has {expected:.5f}"
        return WeightSyncError.about("logprobs-differ", self._owner, what, got=got, why=why, fix=fix)

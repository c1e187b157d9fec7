"""The reference worker: log-probabilities of the policy that the actor stays near."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlplace.metrics import Metric, Metrics
from rlplace.placement.schedule import Residency
from rlplace.workers.arguments import REFERENCE_WEIGHTS
from rlplace.workers.roles.scorer import ModelInput, ModelScorer, Values
from rlplace.workers.worker import not_resident

if TYPE_CHECKING:
    from rlplace.comm.weights.version import WeightReceiver
    from rlplace.config import FrozenConfig
    from rlplace.models.causal_lm import PackedLm


class ReferenceWorker(ModelScorer):
    """Scores the tokens of the loss mask by their log-probabilities at the temperature they were drawn at."""

    _receiver: WeightReceiver | None = None

    @property
    def _block(self) -> FrozenConfig:
        return self.config.config.reference

    def _kind(self) -> type[PackedLm]:
        from rlplace.models.causal_lm import CausalLm

        return CausalLm

    def setup(self) -> None:
        super().setup()
        if REFERENCE_WEIGHTS in self.context.channels:
            from rlplace.comm.weights.receiver import CopyReceiver

            channel = self.context.channels[REFERENCE_WEIGHTS]
            self._receiver = CopyReceiver(channel, self.context.rank)  # each rank has a copy through the channel

    def _values(self, batch: tuple[ModelInput, ...]) -> Sequence[Values]:
        temperature = self.config.config.text_rollout.temperature or 1.0  # greedy answers come with the model's own
        logprobs = self._forward(batch, temperature).logprobs.float().cpu().numpy()
        return np.split(logprobs, np.cumsum([each.mask.sum() for each in batch])[:-1]) if batch else []

    def refresh(self, iteration: int, version: int) -> Metrics:
        """Load the actor's weights of `version` into the reference if this iteration is due.

        The actor sends in the same call.
        """
        if not self.config.refreshes(iteration):
            return {}
        if self._residency < Residency.WEIGHTS:
            raise not_resident(self.context.owner, "refresh", has=self._residency, needs=Residency.WEIGHTS)
        assert self._receiver is not None, "a reference that is refreshed has a channel"
        began = time.perf_counter()
        with self._receiver.pull(version) as received:
            self._lm.load(received.tensors)
        return {"reference/refresh_s": Metric(time.perf_counter() - began, "max")}

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        super().close()

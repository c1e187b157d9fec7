"""What an engine is given of a sync: all weights, of which some may be those of an earlier version.

::

    first sync    all weights ──────────────▶ kept, on the host ───────────┐
    later ones    what is trained ──▶ those instead of the kept ones  ─────┼──▶ engine.load: all weights
                  factors alone ────▶ added to the kept ones in loading  ──┘

Each version is made from the first one: rounding does not add up, and an engine that dropped its weights gets them all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from rlplace.workers.refusals import some_weights

if TYPE_CHECKING:
    from torch import Tensor

    from rlplace.comm.weights.version import ReceivedWeights
    from rlplace.models.lora import Factors


class Given(NamedTuple):
    """What is to be loaded: `weights`, those that have factors with these added."""

    weights: Mapping[str, Tensor]
    factors: Mapping[str, Factors]


class KeptWeights:
    """Owns the received version that later ones leave weights out of: one memory for all ranks of a node.

    `keeps`: such versions will come. `scale`: of factors that travel apart.
    """

    def __init__(self, owner: str, *, keeps: bool, scale: float | None = None) -> None:
        self._owner, self._keeps, self._scale = owner, keeps, scale
        self._kept: ReceivedWeights | None = None

    @contextlib.contextmanager
    def given(self, received: ReceivedWeights) -> Iterator[Given]:
        """`received` is given back afterwards, or kept. Raises WeightSyncError."""
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

    def close(self) -> None:
        if self._kept is not None:
            self._kept.release()
            self._kept = None

    def _completed(self, received: ReceivedWeights) -> Given:
        weights: Mapping[str, Tensor] = received.tensors  # no copy of it: a release lets go of what is in there
        if received.partial:
            if self._kept is None:
                raise some_weights(self._owner, received.version)
            weights = {**self._kept.tensors, **weights}
        if self._scale is None:
            return Given(weights, {})
        from rlplace.models.lora import take_factors

        given = Given(*take_factors(weights, self._scale))
        assert given.factors.keys() <= given.weights.keys(), "factors of weights that the first sync brought"
        return given

"""What a rollout rank asks of whatever generates its actions: take weights, decide, and give the accelerator back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlplace.placement.schedule import Residency

if TYPE_CHECKING:
    from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Actions for a batch of B observations, action shape A. The arrays belong to the caller."""

    actions: NDArray[Any]  # [B, *A]
    logprobs: NDArray[np.float32]  # [B]
    values: NDArray[np.float32]  # [B]
    version: int  # of the policy that decided


class Engine(Protocol):
    """Used by one thread. Born OFF without weights; `load` needs WEIGHTS, `decide` needs FULL and loaded weights."""

    @property
    def residency(self) -> Residency: ...

    def move(self, to: Residency) -> int:
        """Takes or gives back accelerator memory; returns the bytes held afterwards on each accelerator, measured.

        OFF frees everything, and the weights are gone: a copy on the host would only be overwritten by the sync that
        precedes every rollout. Raises AcceleratorOutOfMemory.
        """
        ...

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copies all weights in. Raises ValueError unless names and shapes are the policy's; NotResident when OFF."""
        ...

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copies some weights in; the others stay as they are. Raises as `load`; NotResident without weights."""
        ...

    def decide(self, observations: NDArray[np.float32], noise: NDArray[np.float32]) -> Decision:
        """Samples one action per row with that row's noise. Raises NotResident below FULL or without weights."""
        ...

    def digest(self) -> str:
        """SHA-256 of all weights by name: equal when they are equal to the bit. Raises NotResident without weights."""
        ...

    def close(self) -> None:
        """Frees everything; also after a failure."""
        ...

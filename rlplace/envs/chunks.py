"""Simulators that take several actions at once: one step is a chunk of steps, the reward their sum.

::

    actions of a row    a0   a1   a2   a3 │ a4   a5   a6   a7
    simulator steps     ●────●────●────●  │ ●────●────✕            an episode ends with a5: a6 and a7 are thrown away,
    observed            o0              o4                o8       and o8 is the first observation of the next one

Letters: B rows, n actions of a chunk, A shape of one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rlplace.envs.contract import Rendering, Restorable, Simulator, StepResult


class _Chunks:
    """Owns the simulator. An episode that ends within a chunk is as long as it was: the rest is not counted.

    A row's simulator goes on with the rest of the chunk, and then begins anew: how it is stepped does not depend on the
    rows beside it.
    """

    def __init__(self, simulator: Simulator, chunk: int) -> None:
        self._inner = simulator
        self._chunk = chunk
        self.reset = simulator.reset
        self.restart = simulator.restart
        self.close = simulator.close

    def step(self, actions: NDArray[Any]) -> StepResult:
        """Step by `actions` [B, n, *A]."""
        going = np.ones(len(actions), np.bool_)
        terminated, truncated = np.zeros((2, len(actions)), np.bool_)
        rewards = np.zeros(len(actions), np.float32)
        finals = dict[int, NDArray[Any]]()
        played = dict[int, tuple[float, int]]()
        for at in range(self._chunk):
            before = going.copy()
            result = self._inner.step(actions[:, at])
            rewards[before] += result.rewards[before]
            ended = result.terminated | result.truncated
            stories = zip(result.episode_returns, result.episode_lengths, strict=True)
            played |= {
                r: each
                for r, each in zip(np.flatnonzero(ended), stories, strict=True)
                if before[r]
            }
            cuts = zip(
                np.flatnonzero(result.truncated), result.final_observations, strict=True
            )
            finals |= {row: final for row, final in cuts if before[row]}
            terminated |= before & result.terminated
            truncated |= before & result.truncated
            going &= ~ended
        observations = result.observations
        thrown = np.flatnonzero(~before)
        if len(thrown):
            observations[thrown] = self._inner.restart(thrown.tolist())
        shape = (len(finals), *observations.shape[1:])
        return StepResult(
            observations=observations,
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            final_observations=np.array(
                [finals[r] for r in sorted(finals)], observations.dtype
            ).reshape(shape),
            episode_returns=[played[row][0] for row in sorted(played)],
            episode_lengths=[played[row][1] for row in sorted(played)],
        )


class _Restorable(_Chunks):
    """Between two chunks."""

    def row_states(self) -> list[Mapping[str, NDArray[Any]]]:
        return cast(Restorable, self._inner).row_states()

    def restore(
        self, states: Sequence[Mapping[str, NDArray[Any]]]
    ) -> Mapping[int, NDArray[Any]]:
        return cast(Restorable, self._inner).restore(states)


class _Rendering(_Chunks):
    """A picture after each chunk."""

    @property
    def frames_per_s(self) -> float:
        return cast(Rendering, self._inner).frames_per_s / self._chunk

    def frame(self) -> NDArray[np.uint8]:
        return cast(Rendering, self._inner).frame()


class _Both(_Restorable, _Rendering):
    pass


def in_chunks(simulator: Simulator, chunk: int) -> Simulator:
    """Have a simulator take so many actions at once; it can be restored and drawn if it could before."""
    kinds = (_Chunks, _Restorable, _Rendering, _Both)
    return kinds[
        isinstance(simulator, Restorable) + 2 * isinstance(simulator, Rendering)
    ](simulator, chunk)

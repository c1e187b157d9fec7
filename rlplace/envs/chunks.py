"""Simulators for policies that decide several actions at once, a chunk. A chunk's reward is the sum over its steps.

::

    actions of a row    a0   a1   a2   a3 │ a4   a5   a6   a7
    simulator steps     ●────●────●────●  │ ●────●────✕            an episode ends with a5: a6 and a7 do not count,
    observed            o0              o4                o8       and o8 is the first observation of the next episode

Letters: B rows, n actions of a chunk, A shape of one action.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rlplace.envs.contract import (
    Normalizing,
    Remarking,
    Rendering,
    Restorable,
    Simulator,
    StepResult,
)


class _Chunks:
    """A simulator that takes a chunk of actions in each step. It owns the inner simulator, which takes single actions.

    If an episode ends within a chunk, the later actions of the chunk do not count. The inner simulator still takes
    these actions, and the row then begins a new episode. So the steps of a row do not depend on other rows.
    """

    def __init__(self, simulator: Simulator, chunk: int) -> None:
        self._inner = simulator
        self._chunk = chunk
        self.reset = simulator.reset
        self.restart = simulator.restart
        self.close = simulator.close

    @property
    def remarks(self) -> Sequence[str]:
        """What the inner simulator has to say about its environments."""
        if isinstance(self._inner, Remarking):
            return self._inner.remarks
        return ()

    def step(self, actions: NDArray[Any]) -> StepResult:
        """Take one chunk for each row, actions [B, n, *A], and return the result. Rewards are summed over the chunk."""
        # Rows whose episode has not ended within this chunk
        going = np.ones(len(actions), np.bool_)
        terminated = np.zeros(len(actions), np.bool_)
        truncated = np.zeros(len(actions), np.bool_)
        rewards = np.zeros(len(actions), np.float32)
        # By row: the last observation if truncated; return and length of the ended episode
        finals = dict[int, NDArray[Any]]()
        played = dict[int, tuple[float, int]]()
        for at in range(self._chunk):
            before = going.copy()
            result = self._inner.step(actions[:, at])
            rewards[before] += result.rewards[before]
            ended = result.terminated | result.truncated
            # Only the first end of a row counts
            stories = zip(result.episode_returns, result.episode_lengths, strict=True)
            for row, story in zip(np.flatnonzero(ended), stories, strict=True):
                if before[row]:
                    played[row] = story
            cut = np.flatnonzero(result.truncated)
            for row, final in zip(cut, result.final_observations, strict=True):
                if before[row]:
                    finals[row] = final
            terminated |= before & result.terminated
            truncated |= before & result.truncated
            going &= ~ended
        # A row that ended before the last step has played part of another episode: begin one anew
        observations = result.observations
        thrown = np.flatnonzero(~before)
        if len(thrown):
            observations[thrown] = self._inner.restart(thrown.tolist())
        kept = [finals[row] for row in sorted(finals)]
        shape = (len(finals), *observations.shape[1:])
        final_observations = np.array(kept, observations.dtype).reshape(shape)
        return StepResult(
            observations=observations,
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            final_observations=final_observations,
            episode_returns=[played[row][0] for row in sorted(played)],
            episode_lengths=[played[row][1] for row in sorted(played)],
        )


class _Restorable(_Chunks):
    """A simulator with chunks of actions. Its state can be saved between two chunks and restored later."""

    def row_states(self) -> list[Mapping[str, NDArray[Any]]]:
        return cast(Restorable, self._inner).row_states()

    def restore(
        self, states: Sequence[Mapping[str, NDArray[Any]]]
    ) -> Mapping[int, NDArray[Any]]:
        return cast(Restorable, self._inner).restore(states)

    @property
    def statistics(self) -> Collection[str]:
        if isinstance(self._inner, Normalizing):
            return self._inner.statistics
        return ()

    def take_statistics(self, states: Sequence[Mapping[str, NDArray[Any]]]) -> bool:
        if isinstance(self._inner, Normalizing):
            return self._inner.take_statistics(states)
        return False


class _Rendering(_Chunks):
    """A simulator with chunks of actions. It draws one picture for each chunk."""

    @property
    def frames_per_s(self) -> float:
        return cast(Rendering, self._inner).frames_per_s / self._chunk

    def frame(self) -> NDArray[np.uint8]:
        return cast(Rendering, self._inner).frame()


class _Both(_Restorable, _Rendering):
    """A simulator with chunks of actions. Its state can be saved and restored, and it draws pictures."""


def in_chunks(simulator: Simulator, chunk: int) -> Simulator:
    """Return a simulator that takes a chunk of `chunk` actions in each step of `simulator`'s environments.

    Its state can be restored if that of `simulator` can, and it draws pictures if `simulator` does.
    """
    restorable = isinstance(simulator, Restorable)
    rendering = isinstance(simulator, Rendering)
    if restorable and rendering:
        return _Both(simulator, chunk)
    if restorable:
        return _Restorable(simulator, chunk)
    if rendering:
        return _Rendering(simulator, chunk)
    return _Chunks(simulator, chunk)

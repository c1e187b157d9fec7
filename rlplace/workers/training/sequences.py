"""Sequences of an iteration, from which a policy with memory learns.

::

    step        0   1   2   3 │ 4   5   6   7 │ 8   9  10  11      rollout_steps 12, unroll_steps 4, burn_in 2
    learned     ━━━━━━━━━━━━━━  ━━━━━━━━━━━━━━  ━━━━━━━━━━━━━━
    burn-in                ╌╌╌╌╌           ╌╌╌╌╌                   no gradient goes through it

A sequence begins with the memory that the policy had when it acted, `burn_in` steps before: stored with each
observation. These steps are run again with the weights of today, so that the memory at the first learned step is not
older than they are (Kapturowski et al. 2019, R2D2, openreview.net/forum?id=r1lyTjAqYX). The first sequence of an
iteration has nothing before it and begins with what was stored. Where an episode began, the memory is emptied.

Letters: T steps, B rows of this rank, M sequences, L steps of one, b of burn-in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlplace.algo.losses import StepSamples
from rlplace.models.networks import NetworkPolicy, Sequences
from rlplace.trajectory import Trajectory


class SequenceSamples:
    """Cuts an iteration's samples of one rank."""

    def __init__(
        self,
        policy: NetworkPolicy,
        samples: StepSamples,
        trajectory: Trajectory,
        *,
        length: int,
        burn_in: int,
        sound: Tensor | None,
    ) -> None:
        """`samples`: [T * B], observations as rows. `sound`: [T * B] bool, which count; None: all do."""
        self._policy = policy
        self._samples = samples
        self._rows = trajectory.rows
        self._length = length
        self._burn_in = burn_in
        self._sound = sound
        ended = torch.from_numpy(trajectory.terminated | trajectory.truncated)
        # The stored memory of step 0 is emptied already
        begins = torch.cat([torch.zeros_like(ended[:1]), ended[:-1]])
        self._begins = begins.flatten().to(samples.actions.device)

    def pick(self, numbers: Tensor) -> tuple[Sequences, StepSamples]:
        """Return the sequences of these numbers, flattened [T / L, B], and the samples that are learned from them."""
        numbers = numbers.to(self._begins.device)
        first = numbers // self._rows * self._length
        row = numbers % self._rows
        steps = (
            first
            + torch.arange(-self._burn_in, self._length, device=numbers.device)[:, None]
        )
        index = steps.clamp(min=0) * self._rows + row  # [b + L, M]
        own = index[self._burn_in :].flatten()
        learned = None
        if self._sound is not None:
            learned = self._sound[own].nonzero().flatten()
            own = own[learned]
        observations = self._samples.observations[index]
        sequences = Sequences(
            observations=observations,
            begins=self._begins[index],
            memory=self._policy.memory(observations[0]),
            alone=first == 0,
            burn_in=self._burn_in,
            learned=learned,
        )
        return sequences, self._samples.pick(own)

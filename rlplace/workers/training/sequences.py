"""Sequences of an iteration, from which a policy with memory learns.

::

    step        0   1   2   3 │ 4   5   6   7 │ 8   9  10  11      rollout_steps 12, unroll_steps 4, burn_in 2
    learned     ━━━━━━━━━━━━━━  ━━━━━━━━━━━━━━  ━━━━━━━━━━━━━━
    burn-in                ╌╌╌╌╌           ╌╌╌╌╌                   no gradient goes through it

A sequence begins `burn_in` steps before its first learned step, with the memory that was stored with the observation at
which the sequence begins. The burn-in steps are run again with the current weights, so that the memory at the first
learned step belongs to the current weights (Kapturowski et al. 2019, R2D2, openreview.net/forum?id=r1lyTjAqYX). The
first sequence of an iteration has no steps before it and begins with the stored memory. Where an episode begins, the
memory is emptied.

Letters: T steps, B rows of this rank, M sequences, L learned steps of a sequence, b burn-in steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlplace.algo.losses import StepSamples
from rlplace.models.networks import NetworkPolicy, Sequences
from rlplace.trajectory import Trajectory


class SequenceSamples:
    """The samples of one rank in an iteration. `pick` cuts sequences out of them."""

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
        """Prepare the samples.

        `policy`: a policy with memory. `samples`: T steps of B rows, [T * B], with each observation flattened.
        `trajectory`: the same steps, to know where episodes end. `length`: number of learned steps of a sequence.
        `burn_in`: number of steps before them, which only bring the memory up to date. `sound`: which samples are
        learned from, [T * B] bool; None: all.
        """
        self._policy = policy
        self._samples = samples
        self._rows = trajectory.rows
        self._length = length
        self._burn_in = burn_in
        self._sound = sound
        ended = torch.from_numpy(trajectory.terminated | trajectory.truncated)
        # An episode begins after a step that ended one; the stored memory of step 0 is empty already if needed
        begins = torch.cat([torch.zeros_like(ended[:1]), ended[:-1]])
        self._begins = begins.flatten().to(samples.actions.device)

    def pick(self, numbers: Tensor) -> tuple[Sequences, StepSamples]:
        """Return some sequences as input of a forward pass, and the samples that are learned from them.

        `numbers`: indices of the M sequences, in a flattened array [T / L, B]: T steps of B rows are cut into sequences
        of L steps.
        """
        numbers = numbers.to(self._begins.device)
        # Sample numbers [b + L, M] of all steps; burn-in before step 0 repeats step 0 and is not used
        first = numbers // self._rows * self._length
        row = numbers % self._rows
        offsets = torch.arange(-self._burn_in, self._length, device=numbers.device)
        steps = first + offsets[:, None]
        index = steps.clamp(min=0) * self._rows + row
        # Learned are the steps after the burn-in that count
        picked = index[self._burn_in :].flatten()
        learned = None
        if self._sound is not None:
            learned = self._sound[picked].nonzero().flatten()
            picked = picked[learned]
        observations = self._samples.observations[index]
        sequences = Sequences(
            observations=observations,
            begins=self._begins[index],
            memory=self._policy.memory(observations[0]),
            alone=first == 0,
            burn_in=self._burn_in,
            learned=learned,
        )
        return sequences, self._samples.pick(picked)

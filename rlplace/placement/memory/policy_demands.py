"""Memory demands of simulator policies, by stage, on each of their accelerators and on their host.

They match what workers report: weights and optimizer state of the actor, the whole policy of a rollout rank.
"""

from __future__ import annotations

import dataclasses

from rlplace.config.fields import Dtype
from rlplace.placement.memory import formulas
from rlplace.placement.memory.demands import (
    Bytes,
    DeviceSync,
    Footprint,
    HostBytes,
    HostPart,
    Part,
    Placed,
    Tensors,
    host_copies,
    larger,
    saved_copy,
    total,
)
from rlplace.placement.memory.formulas import DTYPE_BYTES
from rlplace.placement.memory.policies import PolicyShape
from rlplace.placement.schedule import Residency

_OFF, _WEIGHTS, _FULL = Residency
_FLOAT32 = 4
_INT64 = 8
_MOMENTS = 2  # of Adam


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTrainingDemand:
    """The memory demand of the actor of a job on simulators.

    Every rank holds all weights in one float32 tensor, and the moments of Adam. `sync`: what sending weights takes on
    an accelerator. `samples`: samples per iteration on the rank with the most. `compute`: dtype of the computation.
    `minibatch`: samples of one minibatch on this rank. `copied`: whether checkpoints are written from a copy on the
    host; None: checkpoints do not include this policy.
    """

    policy: PolicyShape
    sync: DeviceSync = dataclasses.field(default_factory=DeviceSync)
    compute: Dtype = "fp32"
    samples: int = 0  # per iteration, on the rank with the most
    minibatch: int = 0  # samples of one minibatch, on this rank
    # Whether checkpoints are written from a host copy; None: checkpoints do not include this policy.
    copied: bool | None = None

    def footprint(self, placed: Placed) -> Footprint:
        flat = self.policy.parameters_bytes
        weights: Tensors = [(flat, 1), (self.policy.buffer_bytes, 1)]
        # Adam's moments and its step count; nothing if the policy's size is unknown.
        state: Tensors = [
            (flat, _MOMENTS),
            (_FLOAT32 if flat else 0, 1),
        ]
        process = self.sync.beside(placed.process(groups=1))
        there = process | {Part.PARAMETERS: total(weights)}
        host = host_copies(
            placed, HostPart.OFFLOADED, off=[*weights, *state], weights=state
        )
        # The policy to be saved, and the content of its file.
        host[_FULL] = {
            **host[_FULL],
            HostPart.SAVED: 2 * self.policy.weights_bytes,
        }
        copy = (
            {}
            if self.copied is None
            else {HostPart.CHECKPOINT: saved_copy([*weights, *state], self.copied)}
        )
        host = {at: {**kept, **copy} for at, kept in host.items()}
        return Footprint(
            held={
                _OFF: process,
                _WEIGHTS: there,
                _FULL: there | {Part.OPTIMIZER: total(state)},
            },
            working={
                **self.sync.stages(self.policy.weights_bytes),
                "learn": self._learning(placed),
            },
            host=host,
        )

    def _learning(self, placed: Placed) -> Bytes:
        """Return purpose -> bytes at the moment of learning with the most bytes.

        Four moments are compared: the statistics, the order of the samples, the pass of a minibatch, and the sum of
        gradients over ranks.
        """
        whole = self.policy.parameters_bytes
        number = DTYPE_BYTES[self.compute]
        samples, statistics = (
            self.policy.samples_bytes(self.samples),
            self.policy.statistics_bytes(self.samples),
        )
        order = formulas.policy_order(self.samples, placed.ranks)
        # Copies of weights and gradient in the compute dtype.
        rounded = 0 if number == _FLOAT32 else 2 * whole * number // _FLOAT32
        held = {Part.GRADIENTS: whole, Part.GATHERED: rounded}
        # All samples, and a copy in the order of the epoch.
        epoch = 2 * samples + 2 * _INT64 * self.samples
        # Running sums of the observation normaliser.
        epoch += self.policy.buffer_bytes
        activations = self.policy.pass_bytes(self.minibatch, number)
        exchanged = formulas.summed(whole, placed.ranks, on_host=placed.kind != "cuda")
        return larger(
            {Part.ACTIVATIONS: samples, Part.WORKSPACE: statistics},
            held | {Part.ACTIVATIONS: 2 * samples + max(samples, order)},
            held | {Part.ACTIVATIONS: epoch + activations},
            held | {Part.ACTIVATIONS: epoch, Part.GRADIENTS: whole + exchanged},
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRolloutDemand:
    """The memory demand of a rollout rank of a job on simulators.

    The rank holds the policy, one pass of the policy, and the workspace that its config declares. `sync`: what
    receiving weights takes on an accelerator. `rows`: environments for which actions are computed at once.
    `evaluates`: whether evaluations play with a copy of the policy on the host. `played_bytes`: bytes of the simulators
    of an evaluation on the accelerators of rank 0; other ranks are counted as if they had them, too.
    """

    policy: PolicyShape
    workspace_bytes: int = 0
    sync: DeviceSync = dataclasses.field(default_factory=DeviceSync)
    rows: int = 0  # rows answered together
    evaluates: bool = False
    played_bytes: int = 0

    def footprint(self, placed: Placed) -> Footprint:
        process = self.sync.beside(placed.process(groups=0))
        there = process | {Part.PARAMETERS: self.policy.weights_bytes}
        answering = self.policy.answer_bytes(self.rows)
        normalizer = self.policy.normalizer_bytes
        working = dict(self.sync.stages(self.policy.weights_bytes))
        if self.policy.weights:
            working["sync"] = {**working.get("sync", {}), Part.ACTIVATIONS: normalizer}
            working["rollout"] = {Part.ACTIVATIONS: answering + normalizer}
        # An evaluation runs in the same stage, before the generation of the iteration
        if self.played_bytes:
            working["rollout"] = larger(
                working.get("rollout", {}), {Part.SIMULATOR: self.played_bytes}
            )
        host: dict[Residency, HostBytes] = {}
        if self.evaluates:
            # The policy that plays, and the weights on their way to it
            copies = 2 * self.policy.weights_bytes
            host[_FULL] = {HostPart.EVALUATION: copies}
        return Footprint(
            held={
                _OFF: process,
                _WEIGHTS: there,
                _FULL: there | {Part.WORKSPACE: self.workspace_bytes},
            },
            working=working,
            host=host,
        )

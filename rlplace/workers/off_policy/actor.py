"""Actor of the off-policy job: it learns from samples of all replay ranks, and hands its policy to rollout."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rlplace.metrics import Metric, Metrics
from rlplace.workers.off_policy.arguments import (
    BATCHES,
    POLICY,
    PRIORITIES,
    Arrivals,
    OffPolicyArguments,
)
from rlplace.workers.worker import Worker

if TYPE_CHECKING:
    from torch import Tensor, nn

_NOISE = 3  # number of this module's random numbers among those of a run


class OffPolicyActor(Worker):
    """Owns policy and critics. Several ranks learn from a share of each batch, and average their gradients."""

    needs_own_process: ClassVar[bool] = True
    imports: ClassVar[tuple[str, ...]] = (
        "torch",
        "rlplace.workers.off_policy.learners",
    )

    config: OffPolicyArguments

    def setup(self) -> None:
        from rlplace.workers.off_policy.learners import LEARNERS

        given = self.config
        self._pieces = given.pieces
        self._device = self.context.device.torch_name
        name = given.blocks.algorithm.name
        self._learner = LEARNERS[name](
            given.spaces, given.blocks, given.seed, self._device, self._average
        )
        modules = self._learner.modules.values()
        self.offload(*modules, *self._learner.optimizers.values())
        self.weights_of(self._learner.policy)
        if self.world_size > 1:
            self.process_group()

    def learn(self, iteration: int) -> Metrics:
        """Make the updates that follow each piece of an iteration; return their metrics."""
        pieces = self._pieces
        self._arrived = Arrivals()
        updates = 0
        for piece in pieces.learning(iteration):
            self.context.check_cancelled("learn")
            with self.timer("wait"):
                batches = self._taken(piece)
            with self.timer("update"):
                errors = self._update(iteration, piece, batches)
            updates += len(errors)
            self._hand_out(piece, errors)
        found: dict[str, Metric] = {"updates": Metric(updates, "max")}
        for name, value in self._learner.take_metrics().items():
            found[name] = Metric(value)
        return found

    def _taken(self, piece: int) -> dict[str, Tensor]:
        """Wait for the samples of a piece from all replay ranks. Return name -> tensor [updates, samples, ...]."""
        import torch

        wanted = [(piece, rank) for rank in range(self.config.ranks["replay"])]
        parts = self._arrived.take(self.channel(BATCHES), self.rank, wanted)
        found = {}
        for name in parts[0]:
            joined = torch.cat([torch.from_numpy(part[name]) for part in parts], 1)
            found[name] = joined.to(self._device)
        for name in ("observations", "next_observations"):
            found[name] = found[name].flatten(2)
        if "weights" in found:
            found["weights"] /= self._greatest(found["weights"])
        return found

    def _greatest(self, weights: Tensor) -> Tensor:
        """Return the greatest weight of the batch of each update, all actor ranks included, [updates, 1]."""
        import torch

        greatest = weights.amax(1, keepdim=True)
        if self.world_size > 1:
            torch.distributed.all_reduce(greatest, torch.distributed.ReduceOp.MAX)
        return greatest

    def _update(
        self, iteration: int, piece: int, batches: dict[str, Tensor]
    ) -> list[Tensor]:
        """Make the updates of a piece; return the errors of the samples of each."""
        import numpy as np
        import torch

        number = self._pieces.number(iteration, piece)
        seeds = np.random.SeedSequence([self.config.seed, _NOISE, number, self.rank])
        random = torch.Generator().manual_seed(int(seeds.generate_state(1)[0]))
        errors = []
        for update in range(self._pieces.updates):
            batch = {name: tensor[update] for name, tensor in batches.items()}
            errors.append(self._learner.update(batch, random))
        return errors

    def _hand_out(self, piece: int, errors: list[Tensor]) -> None:
        """Put the errors for the replay ranks that draw by them, and the policy for rollout."""
        import torch

        from rlplace.models.off_policy import joined, sent_tensors

        if self.config.blocks.replay.prioritised:
            ranks = self.config.ranks["replay"]
            parts = torch.stack(errors).cpu().chunk(ranks, dim=1)
            for rank, part in enumerate(parts):
                item = (self.rank, part.flatten().numpy())
                self.channel(PRIORITIES).put(item, key=str(rank))
        if self.rank == 0 and self._pieces.sends_policy(piece):
            numbers = joined(sent_tensors(self._learner.policy)).cpu().numpy()
            for rank in range(self.config.ranks["rollout"]):
                self.channel(POLICY).put((piece, numbers), key=str(rank))

    def _average(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average the gradients over all ranks, in place. One exchange for all, as each takes long on processors."""
        if self.world_size == 1:
            return
        import torch

        from rlplace.models.off_policy import joined, set_numbers

        gradients = [each.grad for each in parameters if each.grad is not None]
        numbers = joined(gradients)
        torch.distributed.all_reduce(numbers)
        set_numbers(gradients, numbers / self.world_size)

    # ── checkpoints ──────────────────────────────────────────────────────────────────────────────────────────────────

    def save_state(self) -> Any:
        # All ranks have the same
        if self.rank:
            return None
        return self._learner.state()

    def load_state(self, state: Any) -> None:
        self._learner.load(state)

    def save_model(self, path: str) -> None:
        """Write the weights of the policy into a file of safetensors."""
        from rlplace.models.checkpoint import write_file

        if self.rank == 0:
            weights = self._learner.policy.state_dict()
            write_file(Path(path), ((n, t.cpu()) for n, t in weights.items()))

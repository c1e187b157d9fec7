"""Learning of a language model at the command of clients: passes that add gradients, and steps when they ask for them.

Letters: N target tokens of a micro-batch, M those of a whole pass.

::

    accumulate   for each micro-batch of this rank: log-probabilities ──▶ token_losses ──▶ sum ──▶ gradients
                 one sum over ranks: log-probabilities, loss                   nothing is divided by numbers of tokens
    step         norm over ranks, clip, AdamW with the numbers of this step
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rlplace.algo.served_losses import INPUTS, ServedLoss, token_losses
from rlplace.config.blocks.training import OptimizerConfig
from rlplace.workers.training.lm_learner import LmLearner
from rlplace.workers.training.samples import Batch, SampleShard, TokenArray


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """The result of a pass, equal on all ranks.

    `logprobs`: of the target tokens of each sample, by the present weights. `loss`: sum over all target tokens.
    """

    logprobs: Sequence[TokenArray]
    loss: float


class ServedLearner(LmLearner):
    """Learner of a policy whose passes and steps a client commands. All methods are collectives."""

    def accumulate(
        self, shard: SampleShard, loss: ServedLoss, *, backward: bool
    ) -> PassResult:
        """Run a pass over all samples; with `backward`, add its gradients to those of earlier passes.

        `shard`: the samples that this rank computes, with the inputs of the loss as targets.
        """
        batch = Batch(shard, self._lm.device)
        # Each token is filled by one primary rank and stays zero elsewhere; the last number is the loss
        found = torch.zeros(batch.tokens + 1, dtype=torch.float64)
        found = found.to(self._lm.device)
        with torch.set_grad_enabled(backward):
            packing = self.inference_plan(shard.lengths)
            for picks in packing.ranks[self._ranks.replica]:
                logprobs: Tensor = self._lm.module(batch.packed(picks)).logprobs
                inputs = {name: batch.target(name, picks) for name in INPUTS[loss.name]}
                total = token_losses(loss, logprobs, inputs).sum()
                if backward:
                    total.backward()
                if self._ranks.is_primary:
                    found[batch.places(picks)] = logprobs.detach().double()
                    found[-1] += total.detach().double()
        summed = self._ranks.sum(found).cpu()
        parts = summed[:-1].float().split(list(shard.lengths.responses))
        return PassResult(
            logprobs=[part.numpy() for part in parts], loss=float(summed[-1])
        )

    def step(self, config: OptimizerConfig) -> float | None:
        """Make one optimizer step with the numbers of `config`, and return the norm of the gradient before clipping.

        If the norm is not finite, drop the gradients, make no step, and return None.
        """
        nothing = torch.zeros(1, dtype=torch.float64, device=self._lm.device)
        norm = float(self._lm.sum_shares(nothing)[-1])
        if not math.isfinite(norm):
            self._lm.end_step()
            return None
        self._trainer.configure(config)
        self._trainer.step(norm, config.lr)
        return norm

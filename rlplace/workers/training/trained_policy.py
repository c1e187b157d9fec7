"""A policy with its optimizer, whole on one rank: a step, the weights on request, what it holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from rlplace.comm.codec import dtype_name
from rlplace.comm.weights.shards import Block, Shard, replicas
from rlplace.config import OptimizerConfig
from rlplace.models.mlp import ActorCritic


class TrainedPolicy:
    """Owns this rank's parameters, gradients and optimizer state. Ask for outputs through `module(...)`.

    Where several ranks share one policy, each holds a part of it (ShardedPolicy), and what is said here of parameters
    is said of the rank's own.
    """

    _computes_in: str | None = None  # the type of parameters in the forward pass; None: their own

    def __init__(self, module: ActorCritic, optimizer: OptimizerConfig) -> None:
        """`module` must already be on its device."""
        self.module = module
        self._parameters = tuple(module.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=0.0,  # the learner sets it for each iteration
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        self._make_optimizer_state()

    def _make_optimizer_state(self) -> None:
        """Adam makes its state in the first step; made here, its size is known before the first move."""
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step()  # at rate 0: neither gradient nor decay move anything
        for state in self._optimizer.state.values():
            state["step"].zero_()
        self.drop_gathered()

    def set_lr(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    @torch.no_grad()
    def squared_gradient(self) -> Tensor:
        """[1] float64, this rank's share of the squared global gradient norm."""
        norms = torch.stack(torch._foreach_norm(self._gradients())).double()
        return norms.square().sum(dim=0, keepdim=True)

    @torch.no_grad()
    def step(self, gradient_norm: float, max_norm: float) -> None:
        """One optimizer step, gradients clipped to the global norm `max_norm` (Pascanu et al. 2013, algorithm 1).

        Not `clip_grad_norm_`: on sharded gradients that is several collectives of its own, while the norm can share one
        with the other numbers of a step.
        """
        if gradient_norm > max_norm:
            torch._foreach_mul_(self._gradients(), max_norm / gradient_norm)
        self._optimizer.step()
        self._drop_gradients()

    def drop_gathered(self) -> None:
        """Frees gathered parameters and gradients; only the rank's parameters and the optimizer state stay."""
        self._drop_gradients()

    def shards(self) -> tuple[Shard, ...]:
        """What this rank holds of the weights and buffers, to be sent in the type that the forward pass uses.

        Not copied: valid until the next step. In bf16 the parameters are rounded on the way to what the learner
        computes with, so that sampling uses the same.
        """
        tied: dict[Tensor, list[str]] = {}
        for name, tensor in self._named_tensors():
            tied.setdefault(tensor, []).append(name)
        return tuple(self._shard(tuple(names), tensor) for tensor, names in tied.items())

    def _shard(self, names: tuple[str, ...], tensor: Tensor) -> Shard:
        parameter = isinstance(tensor, nn.Parameter)
        return Shard(
            names=names,
            dtype=self._computes_in or dtype_name(tensor) if parameter else dtype_name(tensor),
            shape=tuple(tensor.shape),
            blocks=self._blocks(tensor),
            data=self._own(tensor),
            trained=tensor.requires_grad or not parameter,
        )

    def export(self, *, keep: bool) -> dict[str, Tensor]:
        """The full weights and buffers as the forward pass uses them, copied; {} where `keep` is false. A collective.

        In bf16 the parameters are rounded to what the learner computes with, so that sampling uses the same.
        """
        full = {name: tensor.detach().clone() for name, tensor in self._named_tensors()} if keep else {}
        return {name: tensor.float() if tensor.dtype == torch.bfloat16 else tensor for name, tensor in full.items()}

    def master_weights(self) -> dict[str, Tensor]:
        """The full weights and buffers in the optimizer's precision, in memory of their own. A collective."""
        return {name: self._full(tensor) for name, tensor in self._named_tensors()}

    def optimizer_state(self) -> dict[str, Tensor]:
        """The full optimizer state, named by parameter. A collective."""
        return {
            f"{name}/{key}": self._full(value)
            for name, parameter in self.module.named_parameters()
            for key, value in self._optimizer.state[parameter].items()
        }

    def weight_tensors(self) -> list[Tensor]:
        """This rank's parameters and buffers: what residency `weights` holds."""
        return [self._own(tensor) for _, tensor in self._named_tensors()]

    def optimizer_tensors(self) -> list[Tensor]:
        """This rank's optimizer state: what residency `full` adds."""
        return [self._own(value) for state in self._optimizer.state.values() for value in state.values()]

    @property
    def gathered_bytes(self) -> int:
        """Bytes of all parameters of the job in this rank's memory, while a pass or an export needs them whole."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self._parameters)

    def _gradients(self) -> list[Tensor]:
        return [self._own(cast(Tensor, parameter.grad)) for parameter in self._parameters]

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        # Tied weights appear under each of their names: who loads them must not be left with a stale one.
        yield from self.module.named_parameters(remove_duplicate=False)
        yield from self.module.named_buffers(remove_duplicate=False)

    def _own(self, tensor: Tensor) -> Tensor:
        """This rank's part of a parameter, or of what belongs to one."""
        return tensor

    def _blocks(self, tensor: Tensor) -> tuple[Block, ...]:
        """Which elements of it each rank has."""
        return replicas(tensor.numel(), 1)

    def _full(self, tensor: Tensor) -> Tensor:
        """All of it, copied. A collective."""
        return tensor.detach().clone()

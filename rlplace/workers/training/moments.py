"""Adam's two moments of every tensor it steps, in float32 or in 8 bits, and the step by them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.optim.adamw import adamw

from rlplace.config.schema import MOMENT_BLOCK, OptimizerConfig

Where = Callable[[Tensor], Tensor]  # from a tensor to where its bytes are now
# Moments by name, in the shapes of the tensors and in their order
Values = Mapping[str, list[Tensor]]
_NAMES = ("exp_avg", "exp_avg_sq")
_AT_ONCE = 1 << 14  # blocks that are unpacked at once
_TINY = torch.finfo(torch.float32).tiny


class Moments(Protocol):
    """The moments of some tensors, in their order. Owns them."""

    packed: bool  # what is read are new tensors on the host

    def step(
        self, stepped: Sequence[Tensor], gradients: Sequence[Tensor], lr: float
    ) -> None:
        """Step the tensors in place; `gradients`, of their types, may be changed."""

    def tensors(self) -> list[Tensor]:
        """Return what it holds."""

    def read(self, where: Where) -> Values:
        """Return the moments: to be read, or to be filled for `take_over`."""

    def take_over(self, values: Values, steps_made: int, where: Where) -> None:
        """Go on after so many steps from what `read` returned and somebody has filled."""


class FloatMoments:
    """Moments in the types of the tensors."""

    packed = False

    def __init__(self, stepped: Sequence[Tensor], config: OptimizerConfig) -> None:
        self._config = config
        self._moments = {
            name: [torch.zeros_like(tensor) for tensor in stepped] for name in _NAMES
        }
        self._steps = [torch.zeros((), device=tensor.device) for tensor in stepped]

    def step(
        self, stepped: Sequence[Tensor], gradients: Sequence[Tensor], lr: float
    ) -> None:
        first, second = (self._moments[name] for name in _NAMES)
        _step(stepped, gradients, first, second, self._steps, lr, self._config)

    def tensors(self) -> list[Tensor]:
        return [*self._steps, *itertools.chain(*self._moments.values())]

    def read(self, where: Where) -> Values:
        return {name: [*map(where, moment)] for name, moment in self._moments.items()}

    def take_over(self, values: Values, steps_made: int, where: Where) -> None:
        for step in self._steps:
            where(step).fill_(steps_made)


class ByteMoments:
    """Moments in 8 bits: codes of a table, and a float32 scale of each block (Dettmers et al. 2022, arXiv:2110.02861).

    Of the second moment the root is kept, which spans half the decades, in a table without zero: a first moment that is
    none would be divided by it (Li et al. 2023, arXiv:2309.01507, section 4.1). Both tables have the ends of their
    range, so that what was unpacked packs to the same bits.
    """

    packed = True

    def __init__(self, stepped: Sequence[Tensor], config: OptimizerConfig) -> None:
        self._config = config
        self._steps_made = 0
        self._shapes = [tensor.shape for tensor in stepped]
        self._first, self._root = (
            [_Packed.zeros(tensor, signed=s) for tensor in stepped]
            for s in (True, False)
        )

    def step(
        self, stepped: Sequence[Tensor], gradients: Sequence[Tensor], lr: float
    ) -> None:
        for tensor, gradient, *moments in zip(
            stepped, gradients, self._first, self._root, strict=True
        ):
            numbers = (
                of.view(-1).split(_AT_ONCE * MOMENT_BLOCK)
                for of in (tensor, gradient.contiguous())
            )
            packed = (moment.pieces() for moment in moments)
            for weights, slopes, first, root in zip(*numbers, *packed, strict=True):
                m = first.unpack()[: len(weights)]
                v = root.unpack()[: len(weights)].square_()
                steps = torch.full((), float(self._steps_made), device=tensor.device)
                _step([weights], [slopes], [m], [v], [steps], lr, self._config)
                first.pack(m)
                root.pack(v.sqrt_())
        self._steps_made += 1

    def tensors(self) -> list[Tensor]:
        return [
            tensor
            for packed in (*self._first, *self._root)
            for tensor in (packed.codes, packed.scales)
        ]

    def read(self, where: Where) -> Values:
        """Return them in float32, in new tensors on the host."""
        read = list[list[Tensor]]()
        for moment in (self._first, self._root):
            numbers = (
                packed.at(lambda tensor: where(tensor).cpu()).unpack()
                for packed in moment
            )
            read.append(
                [
                    of[: shape.numel()].view(shape)
                    for of, shape in zip(numbers, self._shapes, strict=True)
                ]
            )
        for root in read[1]:
            root.square_()
        return dict(zip(_NAMES, read, strict=True))

    def take_over(self, values: Values, steps_made: int, where: Where) -> None:
        self._steps_made = steps_made
        for moment, read in zip(
            (self._first, self._root), values.values(), strict=True
        ):
            for packed, numbers in zip(moment, read, strict=True):
                here = _Packed.zeros(numbers, signed=packed.signed)
                there = packed.at(where)
                here.pack(
                    numbers.view(-1) if packed.signed else numbers.view(-1).sqrt()
                )
                there.codes.copy_(here.codes)
                there.scales.copy_(here.scales)


class _Packed:
    """Numbers as codes [blocks, 256] and scales [blocks, 1]."""

    def __init__(self, codes: Tensor, scales: Tensor, *, signed: bool) -> None:
        self.codes = codes
        self.scales = scales
        self.signed = signed

    @classmethod
    def zeros(cls, like: Tensor, *, signed: bool) -> _Packed:
        codes = torch.zeros(
            -(-like.numel() // MOMENT_BLOCK),
            MOMENT_BLOCK,
            dtype=torch.uint8,
            device=like.device,
        )
        return cls(
            codes, codes.new_zeros(len(codes), 1, dtype=torch.float32), signed=signed
        )

    def pieces(self) -> list[_Packed]:
        cut = zip(self.codes.split(_AT_ONCE), self.scales.split(_AT_ONCE), strict=True)
        return [_Packed(codes, scales, signed=self.signed) for codes, scales in cut]

    def at(self, where: Where) -> _Packed:
        return _Packed(where(self.codes), where(self.scales), signed=self.signed)

    def unpack(self) -> Tensor:
        """Return [blocks x 256], in new memory."""
        numbers = _table(self.signed, self.codes.device).index_select(
            0, self.codes.view(-1).int()
        )
        return numbers.view(self.codes.shape).mul_(self.scales).view(-1)

    def pack(self, numbers: Tensor) -> None:
        """Take the codes that are nearest; `numbers` may lack what the last block has room for."""
        blocks = pad(numbers, (0, self.codes.numel() - len(numbers))).view(
            self.codes.shape
        )
        torch.amax(blocks.abs(), dim=1, keepdim=True, out=self.scales)
        table = _table(self.signed, self.codes.device)
        self.codes.copy_(
            torch.bucketize(
                blocks / self.scales.clamp_min(_TINY),
                (table[1:] + table[:-1]) / 2,
                out_int32=True,
            )
        )


@functools.cache
def _table(signed: bool, device: torch.device) -> Tensor:
    """Return the 256 numbers from -1 or 0 to 1, seven decades of them, each with twice those of the decade below."""
    counts = [2 ** (decade + (not signed)) for decade in range(7)]
    above = torch.cat(
        [
            10.0 ** (at - 6) * (0.1 + 0.9 * (torch.arange(n) + 0.5) / n)
            for at, n in enumerate(counts)
        ]
    )
    one = torch.ones(1)
    if signed:  # -0.993 gives way to -1
        return torch.cat([-one, -above[:-1].flip(0), torch.zeros(1), above, one]).to(
            device
        )
    return torch.cat([above[:1] / 4, above, one]).to(device)


def _step(
    stepped: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    steps: list[Tensor],
    lr: float,
    config: OptimizerConfig,
) -> None:
    """Call what `torch.optim.AdamW` calls, without what it does around it: that outlasts a small policy's step."""
    adamw(
        list(stepped),
        list(gradients),
        first,
        second,
        [],
        steps,
        fused=True,
        amsgrad=False,
        beta1=config.beta1,
        beta2=config.beta2,
        lr=lr,
        weight_decay=config.weight_decay,
        eps=config.eps,
        maximize=False,
    )

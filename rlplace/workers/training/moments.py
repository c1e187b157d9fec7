"""Adam's two moments (exponential averages) of every stepped tensor, in float32 or in 8 bits, and Adam's step."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.optim.adamw import adamw

from rlplace.config.blocks.training import MOMENT_BLOCK, OptimizerConfig

# A function from a tensor to where its bytes are now, on accelerator or host
Where = Callable[[Tensor], Tensor]
# Moments by name, in the shapes of the tensors and in their order
Values = Mapping[str, list[Tensor]]
_NAMES = ("exp_avg", "exp_avg_sq")
_AT_ONCE = 1 << 14  # blocks that are unpacked at once, which bounds the float32 copies
_TINY = torch.finfo(torch.float32).tiny


class Moments(Protocol):
    """Adam's two moments of each tensor that the optimizer changes, in the order of these tensors.

    `packed`: whether they are stored in 8 bits, so that `read` returns new float32 tensors.
    """

    packed: bool  # whether `read` returns new float32 tensors on the host
    config: OptimizerConfig  # of the next step

    def step(
        self,
        stepped: Sequence[Tensor],
        gradients: Sequence[Tensor],
        lr: float,
    ) -> None:
        """Make one optimizer step: change the tensors `stepped` in place, and update their moments.

        `gradients`: in the dtypes of `stepped`; they may be overwritten. `lr`: learning rate.
        """

    def tensors(self) -> list[Tensor]:
        """Return all tensors in which the moments are stored, to offload them and to count their bytes."""

    def read(self, where: Where) -> Values:
        """Return the moments by name: for each name, one tensor per stepped tensor, with its shape.

        The tensors can be saved. They can also be filled from a checkpoint and then passed to `take_over`.

        `where`: called with a tensor, returns the tensor that has its data now: itself, or while it is offloaded, its
        copy on the host.
        """

    def take_over(
        self,
        values: Values,
        steps_made: int,
        where: Where,
    ) -> None:
        """Continue with the moments `values`, after `steps_made` optimizer steps.

        `values`: the result of `read`, filled from a checkpoint. `where`: called with a tensor, returns the tensor that
        has its data now: itself, or while it is offloaded, its copy on the host.
        """


class FloatMoments:
    """Moments that are stored in the shapes and dtypes of the stepped tensors."""

    packed = False

    def __init__(self, stepped: Sequence[Tensor], config: OptimizerConfig) -> None:
        self.config = config
        self._moments: dict[str, list[Tensor]] = {}
        for name in _NAMES:
            self._moments[name] = [torch.zeros_like(tensor) for tensor in stepped]
        self._steps = [torch.zeros((), device=tensor.device) for tensor in stepped]

    def step(
        self,
        stepped: Sequence[Tensor],
        gradients: Sequence[Tensor],
        lr: float,
    ) -> None:
        first, second = (self._moments[name] for name in _NAMES)
        _step(stepped, gradients, first, second, self._steps, lr, self.config)

    def tensors(self) -> list[Tensor]:
        return [*self._steps, *itertools.chain(*self._moments.values())]

    def read(self, where: Where) -> Values:
        return {name: [*map(where, moment)] for name, moment in self._moments.items()}

    def take_over(
        self,
        values: Values,
        steps_made: int,
        where: Where,
    ) -> None:
        for step in self._steps:
            where(step).fill_(steps_made)


class ByteMoments:
    """Moments in 8 bits: each number is a code into a table, times a float32 scale of its block (Dettmers et al. 2022,
    arXiv:2110.02861).

    The second moment is stored as its square root, which spans half as many decades. The table of the root has no zero,
    because Adam divides by the root: a zero would blow up the step (Li et al. 2023, arXiv:2309.01507, section 4.1).
    Both tables contain the ends of their range, so numbers that were unpacked are packed to the same bits again.
    """

    packed = True

    def __init__(self, stepped: Sequence[Tensor], config: OptimizerConfig) -> None:
        self.config = config
        self._steps_made = 0
        self._shapes = [tensor.shape for tensor in stepped]
        self._first = [_Packed.zeros(tensor, signed=True) for tensor in stepped]
        self._root = [_Packed.zeros(tensor, signed=False) for tensor in stepped]

    def step(
        self,
        stepped: Sequence[Tensor],
        gradients: Sequence[Tensor],
        lr: float,
    ) -> None:
        for tensor, gradient, first_moment, root_moment in zip(
            stepped,
            gradients,
            self._first,
            self._root,
            strict=True,
        ):
            # Piece by piece, so that only one piece is unpacked to float32 at a time
            pieces = zip(
                tensor.view(-1).split(_AT_ONCE * MOMENT_BLOCK),
                gradient.contiguous().view(-1).split(_AT_ONCE * MOMENT_BLOCK),
                first_moment.pieces(),
                root_moment.pieces(),
                strict=True,
            )
            for weights, gradients_of, first, root in pieces:
                m = first.unpack()[: len(weights)]
                v = root.unpack()[: len(weights)].square_()
                steps = torch.full((), float(self._steps_made), device=tensor.device)
                _step([weights], [gradients_of], [m], [v], [steps], lr, self.config)
                first.pack(m)
                root.pack(v.sqrt_())
        self._steps_made += 1

    def tensors(self) -> list[Tensor]:
        tensors: list[Tensor] = []
        for packed in (*self._first, *self._root):
            tensors.append(packed.codes)
            tensors.append(packed.scales)
        return tensors

    def read(self, where: Where) -> Values:
        """Return both moments by name, as new float32 tensors on the host."""

        def to_host(tensor: Tensor) -> Tensor:
            return where(tensor).cpu()

        read = list[list[Tensor]]()
        for moment in (self._first, self._root):
            unpacked: list[Tensor] = []
            for packed, shape in zip(moment, self._shapes, strict=True):
                numbers = packed.at(to_host).unpack()
                # The last block may be longer than the tensor
                unpacked.append(numbers[: shape.numel()].view(shape))
            read.append(unpacked)
        # Stored is the root of the second moment
        for root in read[1]:
            root.square_()
        return dict(zip(_NAMES, read, strict=True))

    def take_over(
        self,
        values: Values,
        steps_made: int,
        where: Where,
    ) -> None:
        self._steps_made = steps_made
        for moment, read in zip(
            (self._first, self._root),
            values.values(),
            strict=True,
        ):
            for packed, numbers in zip(moment, read, strict=True):
                # Pack on the host, then copy to where the moments are now
                flat = numbers.view(-1)
                here = _Packed.zeros(numbers, signed=packed.signed)
                here.pack(flat if packed.signed else flat.sqrt())
                there = packed.at(where)
                there.codes.copy_(here.codes)
                there.scales.copy_(here.scales)


class _Packed:
    """Numbers that are stored as 8-bit codes [blocks, 256] into a table, and one float32 scale per block, [blocks, 1].

    `signed`: whether the numbers of the table range from -1 to 1 instead of 0 to 1.
    """

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        *,
        signed: bool,
    ) -> None:
        self.codes = codes
        self.scales = scales
        self.signed = signed

    @classmethod
    def zeros(cls, like: Tensor, *, signed: bool) -> _Packed:
        """Return packed zeros on the device of `like`, with as many blocks as the elements of `like` need. `signed`:
        whether negative numbers can be stored.
        """
        blocks = -(-like.numel() // MOMENT_BLOCK)
        codes = torch.zeros(blocks, MOMENT_BLOCK, dtype=torch.uint8, device=like.device)
        scales = codes.new_zeros(blocks, 1, dtype=torch.float32)
        return cls(codes, scales, signed=signed)

    def pieces(self) -> list[_Packed]:
        """Return this object in pieces of up to `_AT_ONCE` blocks each; the pieces share its memory."""
        cut = zip(self.codes.split(_AT_ONCE), self.scales.split(_AT_ONCE), strict=True)
        return [_Packed(codes, scales, signed=self.signed) for codes, scales in cut]

    def at(self, where: Where) -> _Packed:
        """Return an object with the same numbers whose tensors are `where(codes)` and `where(scales)`."""
        return _Packed(where(self.codes), where(self.scales), signed=self.signed)

    def unpack(self) -> Tensor:
        """Return the numbers [blocks * 256] as a new float32 tensor."""
        table = _table(self.signed, self.codes.device)
        numbers = table.index_select(0, self.codes.view(-1).int())
        return numbers.view(self.codes.shape).mul_(self.scales).view(-1)

    def pack(self, numbers: Tensor) -> None:
        """Store `numbers`: each number becomes the nearest entry of the table, after division by the scale of its
        block.

        `numbers`: [n]; they may fill only a part of the last block.
        """
        missing = self.codes.numel() - len(numbers)
        blocks = pad(numbers, (0, missing)).view(self.codes.shape)
        torch.amax(blocks.abs(), dim=1, keepdim=True, out=self.scales)
        # The nearest entry changes half way between two entries
        table = _table(self.signed, self.codes.device)
        borders = (table[1:] + table[:-1]) / 2
        scaled = blocks / self.scales.clamp_min(_TINY)
        self.codes.copy_(torch.bucketize(scaled, borders, out_int32=True))


@functools.cache
def _table(signed: bool, device: torch.device) -> Tensor:
    """Return the 256 entries of the table in ascending order: from -1 to 1 if `signed`, else from almost 0 to 1.

    The positive entries span seven decades. Each decade has twice as many entries as the decade below it.
    """
    # Positive entries by decade, the lowest decade first: 1, 2, 4, ... or, unsigned, 2, 4, 8, ...
    lowest = 1 if signed else 2
    decades = []
    for decade in range(7):
        count = lowest * 2**decade
        # Centres of `count` equal parts of [0.1, 1], scaled to the decade
        centres = 0.1 + 0.9 * (torch.arange(count) + 0.5) / count
        decades.append(10.0 ** (decade - 6) * centres)
    above = torch.cat(decades)
    one = torch.ones(1)
    if signed:
        # -1 takes the place of -0.993, so that the entries are 256
        below = -above[:-1].flip(0)
        return torch.cat([-one, below, torch.zeros(1), above, one]).to(device)
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
    """Make one step of AdamW on the tensors `stepped`, in place, with the function that `torch.optim.AdamW` calls.

    The class `torch.optim.AdamW` does more around this call, which would take longer than the step of a small policy.

    `first`, `second`: moments of each tensor. `steps`: number of steps of each tensor so far, as a tensor. `lr`:
    learning rate.
    """
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

"""Peak memory of a language model's pass, in addition to what is resident; all results are bytes.

::

    forward     layer, layer ... ▸ head: scores of a tile
    backward    head: scores of a tile, its gradient ◂ layer, recomputed ▸ reduced ◂ ... ◂ all outside, reduced

A run shards by FSDP2. Weights outside the layers are gathered for the whole pass. A layer is gathered for its own turn
while the next one arrives. Every micro-batch is reduced into float32 shards of the gradients.
tests/contract/test_lm_memory.py compares these numbers with measured ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from rlplace.placement.memory import formulas
from rlplace.placement.memory.model import ModelShape

_FLOAT32 = 4
# Bytes per token: ids, positions, log-probabilities, loss terms, rotary angles.
_TOKEN_BYTES = 512


class Moment(NamedTuple):
    gathered: int = 0
    activations: int = 0
    logits: int = 0
    gradients: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The sizes of a forward pass, or of a forward and backward pass, over `tokens` tokens on one rank.

    `number`: bytes of a number in the compute dtype. `parallel`: tensor-parallel ranks. `copied`: whether the pass
    computes with copies of the weights, gathered or of another dtype. `shared`: whether ranks hold shards of the
    weights. `kept_gathered`: whether layers stay gathered from the forward to the backward pass. `exchanged`:
    context-parallel ranks. `by_sequence`: whether attention runs one sequence at a time. `repeated`: whether keys and
    values are repeated for every query head. `routes`: bytes per token of experts that are replayed; 0: none are.
    `balanced`: whether the loss has the auxiliary loss of routers.
    """

    model: ModelShape
    tokens: int
    number: int
    parallel: int = 1
    # Computation uses copies of the weights: gathered from shards, or of another dtype.
    copied: bool = True
    shared: bool = True  # ranks hold shards of the weights, so the next layer is gathered while one computes
    # Layers stay gathered from the forward to the backward pass
    kept_gathered: bool = False
    # context-parallel ranks, which exchange tokens for heads around attention
    exchanged: int = 1
    # Attention runs one sequence after the other, and its outputs are joined.
    by_sequence: bool = True
    repeated: bool = False  # keys and values are repeated for every query head
    # Bytes per token of the experts that routers replay; each rank has those of all tokens
    routes: int = 0
    # Each layer saves the probabilities of its experts once more
    balanced: bool = False

    def forward(self) -> Moment:
        """Return the bytes, by kind, at the peak of a pass without gradients.

        The peak is in the output head, in the largest layer, or at the start.
        """
        gathered = self._gathered()
        states = self._states(1) + self._beside
        last = (
            gathered
            if self.kept_gathered or not self.shared
            else gathered - self.number * self._layer
        )
        head = Moment(
            last, states, formulas.tile_scores(self.model, self.tokens, self.parallel)
        )
        layer = (
            formulas.layer_pass(self.model, self.tokens, self.number, self.parallel)
            + self._repeats
        )
        moments = [
            self._arriving(),
            head,
            Moment(gathered, max(layer, self._exchange()) + self._beside),
        ]
        if (tower := self.model.tower) is not None:
            moments.append(
                Moment(gathered, tower.layer(self.tokens, self.number) + self._beside)
            )
        return _fullest(*moments)

    def learning(
        self,
        *,
        trained: tuple[int, int],
        checkpointing: bool,
        offload: bool,
        earlier: bool,
        master: int,
    ) -> Moment:
        """Return the bytes, by kind, at the peak of a forward and backward pass and the optimizer step.

        `trained`: (number of trained elements inside the layers, number outside the layers) in the shards of this rank.
        `checkpointing`: whether activations are computed again in the backward pass. `offload`: whether layer inputs
        are kept on the host. `earlier`: whether gradients of earlier micro-batches exist. `master`: bytes that the
        optimizer step adds per trained number.
        """
        return _fullest(
            *self._moments(trained, checkpointing, offload, earlier, master)
        )

    def _moments(
        self,
        trained: tuple[int, int],
        checkpointing: bool,
        offload: bool,
        earlier: bool,
        master: int,
    ) -> Iterator[Moment]:
        model = self.model
        number = self.number
        beside = self._beside
        if (tower := model.tower) is not None:
            beside += tower.kept(self.tokens, number, checkpointing)
        layers, outside = (_FLOAT32 * elements for elements in trained)
        before = layers + outside if earlier else 0
        # Joining the attention outputs makes one more tensor, and a key head may have several copies.
        joined = self.by_sequence or self.exchanged > 1
        more = (
            joined * formulas.attended(model, self.tokens, number, self.parallel)
            + self._copied_keys
        )
        more += self._repeats
        if self.balanced:
            more += _FLOAT32 * self.tokens * model.experts
        one = formulas.one_layer(model, self.tokens, number, self.parallel) + more
        saved = formulas.checkpoints(model, self.tokens, number, self.parallel)
        if not checkpointing:
            saved = formulas.activations(model, self.tokens, number, self.parallel)
            saved += model.layers * more
        elif offload:
            saved //= model.layers
        gathered = self._gathered()
        # The head: its norm saves float32 and two states; each tile of scores is made again in the backward pass.
        head = (
            saved
            + self._cut(_FLOAT32 * self.tokens * model.hidden + self._states(3))
            + beside
        )
        # With tensor parallelism: the gathered hidden states, and those of the tokens that are scored.
        head += self._states(2) if self.parallel > 1 else 0
        # In full training (no LoRA), the head has a gradient.
        full = bool(outside)
        tile = formulas.tile_scores(model, self.tokens, self.parallel)
        yield self._arriving()._replace(gradients=before)
        yield Moment(gathered, head, tile, before)
        yield Moment(
            gathered, head + self._states(1), *self._head_backward(tile, before, full)
        )
        # Backward pass of a layer, recomputed: the first, second or last one. Gradients outside the layers stay until
        # the end.
        flow = formulas.flowing(model, self.tokens, number, self.parallel) + beside
        # Gradients of the hidden states, which are summed over the tensor-parallel ranks.
        flow += self._states(1) * (self.parallel > 1)
        of_head = number * self._head if full else 0
        again = one - self._states(1) if checkpointing else 0
        for done in (0, min(1, model.layers - 1), model.layers - 1):
            left = saved - saved * done * (not offload) // model.layers
            made = before or layers * done // model.layers
            # Float32 gradient of a layer, while it is reduced to the shards of all ranks.
            reduced = _FLOAT32 * self._layer if full and done else 0
            held = gathered + number * self._layer * self.copied
            yield Moment(held, left + again + flow, 0, made + of_head + reduced)
        # The vision encoder runs its backward pass last.
        if tower is not None:
            seen = (
                beside
                + tower.layer(self.tokens, number)
                + tower.flowing(self.tokens, number)
                + self._states(1)
            )
            yield Moment(gathered, seen, 0, before or layers)
        # Gradients outside the layers are copied to a buffer, from which the shards are reduced.
        root = self._cut(model.root_elements) if full else 0
        fresh = max(number * root + _FLOAT32 * root, _FLOAT32 * root + outside)
        yield Moment(0, beside, 0, layers + (outside if earlier else 0) + fresh)
        # The optimizer step: all gradients, and what the step adds for each trained number.
        yield Moment(0, beside, 0, layers + outside + master * sum(trained))

    def _arriving(self) -> Moment:
        """Return the bytes, by kind, just before the first layer computes.

        At that moment, the buffer with which the weights outside the layers were gathered still exists.
        """
        if not (self.copied and self.shared):
            return Moment()
        weights = 2 * self._cut(self.model.root_elements) + 2 * self._layer
        return Moment(self.number * weights, self._states(1) + self._beside)

    @property
    def _copied_keys(self) -> int:
        return formulas.copied_keys(
            self.model, self.tokens * self.exchanged, self.number, self.exchanged
        )

    def _exchange(self) -> int:
        """Return the bytes of the all-to-all exchange that context-parallel ranks make around attention.

        The exchange turns tensors that are split by tokens into tensors that are split by heads, and back. Counted are
        the inputs, the buffers to send and receive, and the tensors that are split by heads. The result is 0 without
        context parallelism.
        """
        if self.exchanged == 1:
            return 0
        attention = self.model.attention
        each = self.tokens * (attention.query + 2 * attention.keys) * self.number
        return self._states(2) + 4 * each + 3 * self._copied_keys

    def _head_backward(self, tile: int, before: int, full: bool) -> tuple[int, int]:
        """Return (bytes of scores, bytes of gradients) in the backward pass of the output head.

        `tile`: bytes of the scores (logits) of one tile. `before`: bytes of gradients of earlier micro-batches. `full`:
        whether the head's weight has a gradient. In a dtype smaller than float32, products need memory in addition to
        their float32 sum.
        """
        rows, entries = formulas.score_tile(
            self.tokens, self._cut(self.model.vocabulary), self.model.hidden
        )
        sums = _FLOAT32 * rows * self.model.hidden
        summed = _FLOAT32 * self._head if full else 0
        if self.number == _FLOAT32:
            return tile, before + summed
        rounded = self.number * rows * entries
        product = (
            self.number * (max(rows, entries) if full else rows) * self.model.hidden
        )
        return sums + rounded + max(tile, product), before + summed

    def _gathered(self) -> int:
        """Return the bytes of gathered weights while one layer computes and the next layer is being gathered."""
        if not self.copied:
            return 0
        if self.kept_gathered:
            return self.number * self._cut(self.model.parameters)
        layers = 2 if self.shared else 1
        return self.number * (
            self._cut(self.model.root_elements) + layers * self._layer
        )

    def _states(self, times: int) -> int:
        return times * self.tokens * self.model.hidden * self.number

    @property
    def _repeats(self) -> int:
        if not self.repeated:
            return 0
        attention = self.model.attention
        return (
            2
            * (attention.query - attention.keys)
            // self.parallel
            * self.tokens
            * self.number
        )

    @property
    def _beside(self) -> int:
        """The bytes that a pass takes in addition to activations.

        Input images count as if all tokens came from images.
        """
        images = self.model.tower.given(self.tokens) if self.model.tower else 0
        routes = self.routes * self.tokens * self.exchanged
        return _TOKEN_BYTES * self.tokens + images + routes

    @property
    def _layer(self) -> int:
        return self._cut(self.model.largest_layer_elements)

    @property
    def _head(self) -> int:
        return self._cut(self.model.vocabulary * self.model.hidden)

    def _cut(self, elements: int) -> int:
        return -(-elements // self.parallel)


def _fullest(*moments: Moment) -> Moment:
    return max(moments, key=sum)

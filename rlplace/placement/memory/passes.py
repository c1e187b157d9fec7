"""What a pass of a language model holds at its fullest moment, beside what is resident; all results are bytes.

::

    forward     layer, layer ... ▸ head: scores of a tile
    backward    head: scores of a tile, its gradient ◂ layer, recomputed ▸ reduced ◂ ... ◂ all outside, reduced

A run shards by FSDP2: all outside the layers is gathered for the whole pass, a layer for its own turn while the next
one comes; every micro-batch is reduced into float32 shards of the gradients. tests/contract/test_lm_memory.py compares.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from rlplace.placement.memory import formulas
from rlplace.placement.memory.model import ModelShape

_FLOAT32 = 4
_TOKEN_BYTES = 512  # of a token's numbers: ids, places, log-probabilities, terms of the loss, angles of its rotation


class Moment(NamedTuple):
    gathered: int = 0
    activations: int = 0
    logits: int = 0
    gradients: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Of so many tokens, by one rank. `number`: bytes of one in the computation."""

    model: ModelShape
    tokens: int
    number: int
    parallel: int = 1
    # Weights are computed with in copies: gathered, or of another type
    copied: bool = True
    shared: bool = True  # ranks have parts of them, so that the next layer is on its way while one computes
    # Layers stay gathered from the forward to the backward pass
    kept_gathered: bool = False
    exchanged: int = 1  # ranks that exchange tokens for heads around attention
    # Attention goes one sequence after the other, and joins what comes out
    by_sequence: bool = True
    repeated: bool = False  # keys and values are repeated for it, for every query head

    def forward(self) -> Moment:
        """Without gradients: at the head, when all layers are over, or in the largest layer."""
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
        """Forward and backward, and the step. `trained`: shards in elements, of all layers and of what is in none.

        `offload`: inputs of layers are on the host. `earlier`: gradients of micro-batches before are there. `master`:
        bytes a step needs for each trained number.
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
        # What attention has saved is another tensor than what comes out, and of each key head it may have several.
        joined = self.by_sequence or self.exchanged > 1
        more = (
            joined * formulas.attended(model, self.tokens, number, self.parallel)
            + self._copied_keys
        )
        more += self._repeats
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
        # Gathered, and those of tokens that are scored
        head += self._states(2) if self.parallel > 1 else 0
        # Without factors instead: the head has a gradient
        full = bool(outside)
        tile = formulas.tile_scores(model, self.tokens, self.parallel)
        yield self._arriving()._replace(gradients=before)
        yield Moment(gathered, head, tile, before)
        yield Moment(
            gathered, head + self._states(1), *self._head_backward(tile, before, full)
        )
        # A layer, recomputed: the first, the second or the last one. What is outside has its gradients until the end.
        flow = formulas.flowing(model, self.tokens, number, self.parallel) + beside
        # Gradients, to be summed over the ranks of a copy
        flow += self._states(1) * (self.parallel > 1)
        of_head = number * self._head if full else 0
        again = one - self._states(1) if checkpointing else 0
        for done in (0, min(1, model.layers - 1), model.layers - 1):
            left = saved - saved * done * (not offload) // model.layers
            made = before or layers * done // model.layers
            # On its way to the shards of all ranks
            reduced = _FLOAT32 * self._layer if full and done else 0
            held = gathered + number * self._layer * self.copied
            yield Moment(held, left + again + flow, 0, made + of_head + reduced)
        # Goes backward last
        if tower is not None:
            seen = (
                beside
                + tower.layer(self.tokens, number)
                + tower.flowing(self.tokens, number)
                + self._states(1)
            )
            yield Moment(gathered, seen, 0, before or layers)
        # Outside the layers: copied to a buffer, from which the shards are reduced.
        root = self._cut(model.root_elements) if full else 0
        fresh = max(number * root + _FLOAT32 * root, _FLOAT32 * root + outside)
        yield Moment(0, beside, 0, layers + (outside if earlier else 0) + fresh)
        yield Moment(0, beside, 0, layers + outside + master * sum(trained))

    def _arriving(self) -> Moment:
        """At the first layer: what is outside has been cut out of the buffer it came in, which is still there."""
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
        """Where tokens come for heads: queries, keys and values, what is sent, what comes, and that by heads."""
        if self.exchanged == 1:
            return 0
        attention = self.model.attention
        each = self.tokens * (attention.query + 2 * attention.keys) * self.number
        return self._states(2) + 4 * each + 3 * self._copied_keys

    def _head_backward(self, tile: int, before: int, full: bool) -> tuple[int, int]:
        """Scores and gradients; products of less than float32 are made beside the float32 sum they are added to."""
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
        """While a layer computes; the next is on its way."""
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
        """Also images, as if all tokens were theirs."""
        return _TOKEN_BYTES * self.tokens + (
            self.model.tower.given(self.tokens) if self.model.tower else 0
        )

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

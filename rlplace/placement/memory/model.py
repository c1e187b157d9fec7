"""Shapes of language models: every weight by name and shape, from a description and the keys of a `config.json`.

Names and shapes are those that the `transformers` library gives the model, so that totals can be compared with it.
`families` says what a description is and where it comes from.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlplace.errors import ConfigError
from rlplace.placement.memory.families import description_of
from rlplace.placement.memory.layers import Block, KvLayers, Saved, Tower, Weight
from rlplace.placement.memory.letters import Letters
from rlplace.placement.memory.quantised import bits_of, excepted


class Head(enum.Enum):
    """The output head of a language model, after its last layer."""

    LANGUAGE = "language model"  # logits over the vocabulary
    SCORE = "score"  # one bias-free linear layer to the labels, no language model head: rewards, critics
    # A language model with a scalar value beside it
    LANGUAGE_AND_VALUE = "language model and value"


_FLOAT32 = 4
_SMALL_EXPERTS = 128  # numbers of so many experts fit into a signed byte, beside -1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a language model: weights, kinds of layers, KV caches, and a vision encoder if the model has one.

    `hidden`: width of the hidden states. `vocabulary`: width of the logits; 0 without a language model head. `kv`: the
    KV caches. `root`: the weights outside the layers; tied weights once. `blocks`: the layers, grouped by equal sizes.
    `notes`: parts of the model that are not counted. `tower`: the vision encoder; None for text models.
    """

    hidden: int
    vocabulary: int  # width of the logits; 0 without a language model head
    kv: tuple[KvLayers, ...]
    # Weights outside the layers: embeddings, last norm, heads; tied weights once.
    root: tuple[Weight, ...]
    blocks: tuple[Block, ...]
    attention: Attention  # attention of the layers that have it
    notes: tuple[str, ...] = ()  # parts of the model that are not counted
    tower: Tower | None = None  # vision encoder; None for text models

    @property
    def layers(self) -> int:
        return sum(block.layers for block in self.blocks)

    @property
    def parameters(self) -> int:
        """The number of parameters of the model; tied weights count once."""
        return sum(w.elements * copies for w, copies in self.weights())

    @property
    def met(self) -> int:
        """The number of parameters that one token uses. A mixture of experts has more parameters than that."""
        return round(sum(w.elements * w.met * copies for w, copies in self.weights()))

    @property
    def experts(self) -> int:
        """The number of experts of a layer; 0 for a dense model."""
        return max((shape[0] for _, shape, _ in self._stacked()), default=0)

    @property
    def route_bytes(self) -> int:
        """Bytes per token of a record of the experts that all layers choose; 0 without experts.

        An expert is one byte in layers of up to 128 experts, else two bytes, as `models.routers.route_dtype` has it.
        """
        found = 0
        for layers, shape, met in self._stacked():
            experts = shape[0]
            each = 1 if experts <= _SMALL_EXPERTS else 2
            found += layers * round(experts * met) * each
        return found

    def _stacked(self) -> Iterator[tuple[int, tuple[int, ...], float]]:
        """Yield (layers, shape of a weight of all experts, share that a token uses) for each kind of layer with them.

        The shape is [experts, rows, columns].
        """
        for block in self.blocks:
            for weight in block.weights:
                if weight.met < 1 and len(weight.shape) == 3:
                    yield block.layers, weight.shape, weight.met
                    break

    def weights(self) -> tuple[tuple[Weight, int], ...]:
        """Return (weight, number of layers that have it) for each weight of the model.

        The number is 1 for a weight outside the layers.
        """
        inner = tuple((w, block.layers) for block in self._units for w in block.weights)
        return (*((w, 1) for w in self.root), *inner)

    def parts(self, tensor_parallel: int = 1, shards: int = 1) -> list[tuple[int, int]]:
        """Return (elements on the fullest rank, number of layers that have the weight) for each weight.

        `tensor_parallel`: ranks that split a weight. `shards`: ranks that shard each part of a split weight.
        """
        return [
            (w.part(tensor_parallel, shards), copies) for w, copies in self.weights()
        ]

    def stored(
        self, each: int, tensor_parallel: int = 1, shards: int = 1
    ) -> list[tuple[int, int]]:
        """Return (bytes on the fullest rank, number of layers that have the weight) for each weight of a frozen model.

        `each`: bytes per number of a weight that is not quantised. A quantised weight has the bits per number of its
        files. `tensor_parallel`: ranks that split a weight. `shards`: ranks that shard each part of a split weight.
        """
        return [
            (math.ceil(part * w.bits / 8) if w.bits else part * each, copies)
            for (part, copies), (w, _) in zip(
                self.parts(tensor_parallel, shards), self.weights(), strict=True
            )
        ]

    def lora_parts(
        self, rank: int, tensor_parallel: int = 1, shards: int = 1
    ) -> list[tuple[int, int]]:
        """Return (elements on the fullest rank, number of layers) for each LoRA factor: [rank, in] and [out, rank].

        `rank`: the rank of the factors. `tensor_parallel`: ranks that split a weight. `shards`: ranks that shard each
        part of a split weight. Source: Hu et al. 2022, arXiv:2106.09685, section 4.1. Exact if all linear layers except
        experts are adapted. Tensor parallelism splits one factor along the dimension in which it splits the weight; the
        other factor is whole.
        """
        return [
            (
                Weight(name=w.name, shape=shape, ways=w.ways if cut else 1).part(
                    tensor_parallel, shards
                ),
                copies,
            )
            for w, copies in self.weights()
            if w.projection
            for shape, cut in (
                ((rank, w.shape[1]), w.by_columns),
                ((w.shape[0], rank), not w.by_columns),
            )
        ]

    @property
    def _units(self) -> tuple[Block, ...]:
        if self.tower is None:
            return self.blocks
        return (*self.blocks, self.tower.block)

    @property
    def root_elements(self) -> int:
        return sum(w.elements for w in self.root)

    @property
    def largest_layer_elements(self) -> int:
        return max(sum(w.elements for w in block.weights) for block in self._units)

    @property
    def largest_weight_elements(self) -> int:
        return max(w.elements for w, _ in self.weights())

    @property
    def read_again(self) -> float:
        """The cost of a prompt token for each answer after the first, if the answers to a prompt share its computation.

        The cost is the bytes that a layer saves for the token, as a fraction of those for the first answer. A further
        answer saves only attention tensors: queries, keys, values and the attention output. As many key heads as query
        heads are counted, because ranks that exchange tokens for heads hold that many. This is an upper bound: other
        saved tensors bring the true fraction nearer to 1.
        """
        attention = self.attention
        shares = list[float]()
        for compute in (2, _FLOAT32):
            again = 4 * attention.query
            copied = 2 * (attention.query - attention.keys)
            kept = (
                min(block.saved.bytes_per_token(compute, 1) for block in self.blocks)
                + compute * copied
            )
            shares.append((compute * again + _FLOAT32 * attention.heads) / kept)
        return max(shares)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The sizes of grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245).

    `hidden`: width of the hidden states. `heads`: query heads. `kv_heads`: key heads. `head_dim`: width of a head.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim


def read_model(
    config: Mapping[str, object], *, head: Head = Head.LANGUAGE, key: str = "model"
) -> ModelShape:
    """Return the shape of the model that `config`, the content of a config.json, describes.

    `head`: the output head. `key`: key path of the model in the job's config, for errors. Families without a shipped
    description are described by transformers in a subprocess. Raises ConfigError with all problems at once: an unknown
    family, or keys that are missing or not numbers.
    """
    shape = shape_of(description_of(config, key), config, head=head, key=key)
    quantised = config.get("quantization_config")
    if isinstance(quantised, Mapping):
        return with_bits(shape, quantised)
    return shape


def shape_of(
    record: Mapping[str, Any],
    config: Mapping[str, object],
    *,
    head: Head = Head.LANGUAGE,
    key: str = "model",
) -> ModelShape:
    """Return the shape that a family's description `record` gives for the content of a config.json.

    `head`: the output head. `key`: key path of the model in the job's config, for errors. Raises ConfigError with all
    keys that are missing or not numbers.
    """
    letters = Letters(record.get("letters", {}), config, key)
    if "text" in record:
        shape = _with_text(record, letters, config, head, key)
    else:
        shape = _shape(record, letters, head)
    if letters.problems:
        raise ConfigError(letters.problems)
    return shape


def with_bits(model: ModelShape, quantised: Mapping[str, Any]) -> ModelShape:
    """Return the model with the bits per number of its quantised weights filled in.

    `quantised`: the `quantization_config` of the model's config.json. If its method is not known, no bits are filled
    in, and the model gets a note.
    """
    bits = bits_of(quantised)
    method = quantised.get("quant_method")
    if not bits:
        note = f"weights quantised by {method} are counted as if they were not: how many bits it takes is not known"
        return dataclasses.replace(model, notes=(*model.notes, note))
    listed = ("modules_to_not_convert", "llm_int8_skip_modules", "ignore")
    kept = [str(name) for key in listed for name in quantised.get(key) or ()]

    def stored(weight: Weight) -> Weight:
        # Weights with three dimensions are stacked experts, which are quantised like linear layers.
        linear = weight.projection or len(weight.shape) == 3
        if linear and not excepted(weight.name, kept):
            return dataclasses.replace(weight, bits=bits)
        return weight

    blocks = (
        dataclasses.replace(block, weights=tuple(map(stored, block.weights)))
        for block in model.blocks
    )
    return dataclasses.replace(model, blocks=tuple(blocks))


def _shape(record: Mapping[str, Any], letters: Letters, head: Head) -> ModelShape:
    """Return the shape of a model, with the output head `head`.

    `record`: the description of the whole model. `letters`: the values of its variables.
    """
    hidden = int(letters.value(record["hidden"]))
    attention = Attention(hidden=hidden, **_numbers(record["attention"], letters))
    vocabulary = int(letters.value(record["vocabulary"]))
    # A model that scores has no language model head
    root = [
        weight
        for weight in _weights(record["root"], letters)
        if head is not Head.SCORE or weight.name != record["head"]
    ]
    if head is Head.SCORE:
        labels = letters.number("num_labels", 1)
        root.append(Weight(name="score.weight", shape=(labels, hidden)))
    elif head is Head.LANGUAGE_AND_VALUE:
        root.append(Weight(name="score.weight", shape=(1, hidden)))
    tower = None
    if record.get("tower") is not None:
        tower = _tower(record["tower"], letters)
    return ModelShape(
        hidden=hidden,
        vocabulary=0 if head is Head.SCORE else vocabulary,
        kv=tuple(_kv(record["kv"], letters)),
        attention=attention,
        root=tuple(root),
        blocks=tuple(_blocks(record["blocks"], letters)),
        notes=_notes(record, letters),
        tower=tower,
    )


def _with_text(
    record: Mapping[str, Any],
    letters: Letters,
    config: Mapping[str, object],
    head: Head,
    key: str,
) -> ModelShape:
    """Return the shape of a model whose decoder has a description of its own.

    `record`: the description of the whole model. `letters`: the values of its variables. `config`: the config.json of
    the model, in which one block has the keys of the decoder. `head`: the output head. `key`: key path of the model in
    the job's config, for errors.
    """
    text = record["text"]
    own = config.get(text["key"])
    keys = {**text["defaults"], **(own if isinstance(own, Mapping) else {})}
    decoder = read_model(keys, head=head, key=f"{key}.{text['key']}")
    letters.give(text["hidden"], decoder.hidden)
    return dataclasses.replace(
        decoder,
        root=(*decoder.root, *_weights(record["root"], letters)),
        blocks=(*_blocks(record["blocks"], letters), *decoder.blocks),
        notes=(*decoder.notes, *_notes(record, letters)),
    )


def _blocks(rows: Sequence[Mapping[str, Any]], letters: Letters) -> Iterator[Block]:
    """Yield the kinds of layers that the model has, as its config.json says.

    `rows`: all kinds of layers in a description. `letters`: the values of the description's variables; those of kinds
    that the model does not have are not read.
    """
    for row in rows:
        layers = int(letters.value(row["layers"]))
        if layers:
            yield _block(row, layers, letters)


def _block(row: Mapping[str, Any], layers: int, letters: Letters) -> Block:
    passing = None
    if "passing" in row:
        passing = Saved(**_numbers(row["passing"], letters))
    return Block(
        layers=layers,
        weights=tuple(_weights(row["weights"], letters, row["name"] + ".")),
        saved=Saved(**_numbers(row.get("saved", {}), letters)),
        passing=passing,
    )


def _kv(rows: Sequence[Mapping[str, Any]], letters: Letters) -> Iterator[KvLayers]:
    for row in rows:
        if letters.value(row["layers"]):
            yield KvLayers(**_numbers(row, letters))


def _weights(
    rows: Sequence[Mapping[str, Any]], letters: Letters, layer: str = ""
) -> Iterator[Weight]:
    """Yield those of the described weights that the model has.

    `rows`: weights in a description. `letters`: the values of the description's variables. `layer`: prefix of the names
    of the weights.
    """
    for row in rows:
        if letters.value(row.get("if", True)):
            yield Weight(
                name=layer + row["name"],
                shape=tuple(int(letters.value(size)) for size in row["shape"]),
                ways=int(letters.value(row.get("ways", 1))),
                projection=row.get("linear", False),
                met=float(letters.value(row.get("met", 1.0))),
            )


def _tower(row: Mapping[str, Any], letters: Letters) -> Tower:
    sizes = {name: row[name] for name in ("hidden", "pixels", "patches", "mergers")}
    block = _block(row, int(letters.value(row["layers"])), letters)
    return Tower(block=block, **_numbers(sizes, letters))


def _numbers(written: Mapping[str, Any], letters: Letters) -> dict[str, int]:
    return {name: int(letters.value(number)) for name, number in written.items()}


def _notes(record: Mapping[str, Any], letters: Letters) -> tuple[str, ...]:
    return tuple(f"{letters.family}: {note}" for note in record.get("notes", ()))

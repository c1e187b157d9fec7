"""Shapes of language models: every weight by name and shape, read from the keys of a `config.json`.

Names and shapes are those that the `transformers` library gives the model, so that totals can be compared with it.
Letters: h hidden width, I width of the feed-forward layer, q and k widths of all query and all key heads together.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlplace.config.yaml_text import show
from rlplace.errors import ConfigError, Problem
from rlplace.placement.memory.families import described
from rlplace.placement.memory.layers import Block, KvLayers, Saved, Tower, Weight
from rlplace.placement.memory.quantised import bits_of, excepted


class Head(enum.Enum):
    """The output head on top of the transformer backbone."""

    LANGUAGE = "language model"  # logits over the vocabulary
    SCORE = "score"  # one bias-free linear layer to the labels, no language model head: rewards, critics
    # A language model with a scalar value beside it
    LANGUAGE_AND_VALUE = "language model and value"


Weights = tuple[Weight, ...]
_FLOAT32 = 4
_SAVED = ("compute", "compute_cut", "float32", "float32_cut")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A transformer decoder."""

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
        """The exact number of trainable numbers, tied ones counted once."""
        return sum(w.elements * copies for w, copies in self.weights())

    @property
    def met(self) -> int:
        """The number of parameters that compute one token; for mixtures of experts, fewer than `parameters`."""
        return round(sum(w.elements * w.met * copies for w, copies in self.weights()))

    def weights(self) -> tuple[tuple[Weight, int], ...]:
        """Return each weight and the number of layers that have it."""
        inner = tuple((w, block.layers) for block in self._units for w in block.weights)
        return (*((w, 1) for w in self.root), *inner)

    def parts(self, tensor_parallel: int = 1, shards: int = 1) -> list[tuple[int, int]]:
        """Return, for each weight, its elements on the fullest rank and the number of layers that have it."""
        return [
            (w.part(tensor_parallel, shards), copies) for w, copies in self.weights()
        ]

    def stored(
        self, each: int, tensor_parallel: int = 1, shards: int = 1
    ) -> list[tuple[int, int]]:
        """Return the same as `parts` in bytes, for a frozen model.

        Weights that the files have quantised keep their bits; all others have `each` bytes per number.
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
        """Return the same as `parts` for LoRA factors: [rank, in] and [out, rank] for each projection.

        Source: Hu et al. 2022, arXiv:2106.09685, section 4.1. Exact if all linear layers except experts are adapted.
        Tensor parallelism splits one factor along the dimension in which it splits the weight; the other factor is
        whole.
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
        """The attention tensors that each further segment saves for a shared prompt token, as a share of a layer's.

        Counted are queries, keys, values and the attention output, with as many key heads as query heads, because ranks
        that exchange tokens for heads hold them so. This is an upper bound: other saved tensors bring the true share
        nearer to 1.
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
class Family:
    """How a family of decoders differs from Llama."""

    tied: bool = False  # tied embeddings, if the config does not say
    # Biases on queries, keys and values only, whatever the config says
    qkv_bias: bool = False
    qk_norms: bool = False  # a norm over each query and key head
    # A second norm after attention and after the feed-forward layer
    norms_after: bool = False
    # The scaled output of a norm is float32 too, not only its input.
    norms_in_float32: bool = False
    # Queries, keys and values in one weight, gate and up in another
    fused: bool = False
    # Tokens of a sliding window, if the config does not say; 0: no window.
    window: int = 0
    # Period of full attention: the last of every `pattern` layers sees all tokens; 1: no layer does.
    pattern: int = 1
    # Mixture of experts: config keys of an expert's width, and of the width of the shared expert.
    experts: tuple[str, str | None] | None = None


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(window=4096),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norms=True),
    "gemma": Family(tied=True, norms_in_float32=True),
    "gemma2": Family(
        tied=True, norms_in_float32=True, norms_after=True, window=4096, pattern=2
    ),
    "gemma3_text": Family(
        tied=True,
        norms_in_float32=True,
        norms_after=True,
        qk_norms=True,
        window=4096,
        pattern=6,
    ),
    "phi3": Family(fused=True),
    "mixtral": Family(experts=("intermediate_size", None)),
    "qwen2_moe": Family(
        qkv_bias=True,
        experts=("moe_intermediate_size", "shared_expert_intermediate_size"),
    ),
    "qwen3_moe": Family(qk_norms=True, experts=("moe_intermediate_size", None)),
}
_MOST = 10**12  # largest number accepted in a config.json
_GPT2 = "gpt2"
_OPENVLA = "openvla"


def read_model(
    config: Mapping[str, object], *, head: Head = Head.LANGUAGE, key: str = "model"
) -> ModelShape:
    """Return the shape of the model that `config` describes. `key`: where the config stands, for errors.

    Families without formulas here are described by transformers in a subprocess. Raises ConfigError with all problems
    at once: an unknown family, or keys that are missing or not numbers.
    """
    family = config.get("model_type")
    numbers = ModelKeys(config, key)
    if family == _OPENVLA:
        shape = _openvla(config, head, key)
    elif family not in (*FAMILIES, _GPT2):
        shape = _described(
            numbers, described(config, (*FAMILIES, _GPT2, _OPENVLA), key), head
        )
    else:
        shape = (
            _gpt2(numbers, head)
            if family == _GPT2
            else _decoder(numbers, str(family), head)
        )
    if numbers.problems:
        raise ConfigError(numbers.problems)
    quantised = config.get("quantization_config")
    if isinstance(quantised, Mapping):
        return with_bits(shape, quantised)
    return shape


def with_bits(model: ModelShape, quantised: Mapping[str, Any]) -> ModelShape:
    """Return the model with quantised bits per weight, from the `quantization_config` of its config.json."""
    bits = bits_of(quantised)
    method = quantised.get("quant_method")
    if not bits:
        note = f"weights quantised by {method} are counted as if they were not: how many bits it takes is not known"
        return dataclasses.replace(model, notes=(*model.notes, note))
    listed = ("modules_to_not_convert", "llm_int8_skip_modules", "ignore")
    kept = [str(name) for key in listed for name in quantised.get(key) or ()]

    def stored(weight: Weight) -> Weight:
        # Of experts
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


class ModelKeys:
    """Reads whole numbers and switches of a config.json and collects problems; a missing number counts as 1."""

    def __init__(self, config: Mapping[str, object], key: str) -> None:
        self._config = config
        self._key = key
        self.problems: list[Problem] = []

    def number(self, name: str, default: int | None = None) -> int:
        value = self._config.get(name)
        if value is None and default is not None:
            return default
        if (
            isinstance(value, int)
            and not isinstance(value, bool)
            and 0 < value <= _MOST
        ):
            return value
        missing = value is None
        from_model = f"copy {name} from the model's config.json"
        unquoted = isinstance(value, str) and re.fullmatch("[1-9][0-9]{0,11}", value)
        self.problems.append(
            Problem(
                code="missing-key" if missing else "wrong-type",
                key=f"{self._key}.{name}",
                what="is required"
                if missing
                else f"expected a whole number of 1 to {_MOST:,}",
                got=None if missing else show(value),
                why=f"the parameters of a {self._config['model_type']} model cannot be counted without it",
                fix=f"{name}: {value}" if unquoted else from_model,
            )
        )
        return 1

    @property
    def family(self) -> object:
        return self._config.get("model_type")

    def either(self, *names: str) -> int:
        """Return the number under the first of these names that is present, since names differ between versions."""
        return self.number(
            next(
                (name for name in names if self._config.get(name) is not None), names[0]
            )
        )

    def window(self, default: int) -> int:
        """Return the tokens of a sliding window; 0 if no layer has one."""
        if str(self.family).startswith("qwen") and not self.switch(
            "use_sliding_window", False
        ):
            return 0
        if "sliding_window" in self._config and self._config["sliding_window"] is None:
            return 0
        if default or "sliding_window" in self._config:
            return self.number("sliding_window", default)
        return 0

    def sliding_layers(self, layers: int, pattern: int) -> int:
        """Count the layers with a sliding window.

        They follow from `layer_types`, else for Qwen from `max_window_layers`, else from the period of full attention.
        """
        kinds = self._config.get("layer_types")
        if isinstance(kinds, (list, tuple)):
            return sum(kind != "full_attention" for kind in kinds[:layers])
        if str(self.family).startswith("qwen"):
            first = self._config.get("max_window_layers", 28)
            if isinstance(first, int):
                return max(0, layers - first)
            return layers
        step = self.number("sliding_window_pattern", pattern)
        return sum(step == 1 or (layer + 1) % step != 0 for layer in range(layers))

    def switch(self, name: str, default: bool) -> bool:
        value = self._config.get(name)
        if value is None:
            return default
        return bool(value)

    def listed(self, name: str) -> frozenset[int]:
        value = self._config.get(name)
        return frozenset(value if isinstance(value, (list, tuple)) else ())


def _decoder(numbers: ModelKeys, name: str, head: Head) -> ModelShape:
    family = FAMILIES[name]
    attention = Attention.read(numbers)
    hidden = attention.hidden
    vocabulary = numbers.number("vocab_size")
    layers = numbers.number("num_hidden_layers")
    # Number of sparse layers, which have experts.
    sparse = 0
    blocks: list[Block] = []
    if family.experts is not None:
        step = numbers.number("decoder_sparse_step", 1)
        dense_only = numbers.listed("mlp_only_layers")
        sparse = sum(
            1
            for layer in range(layers)
            if layer not in dense_only and (layer + 1) % step == 0
        )
    if layers > sparse:
        width = numbers.number("intermediate_size")
        feed_forward = tuple(
            _gated(
                hidden, width, "mlp", numbers.switch("mlp_bias", False), family.fused
            )
        )
        kept = (
            Saved(compute_cut=4 * width),
            Saved(compute_cut=(4 if family.fused else 3) * width),
        )
        blocks.append(_block(layers - sparse, attention, family, feed_forward, *kept))
    if sparse and family.experts is not None:
        blocks.append(
            _block(
                sparse, attention, family, *_experts(numbers, family.experts, hidden)
            )
        )
    tied = numbers.switch("tie_word_embeddings", family.tied)
    return ModelShape(
        hidden=hidden,
        vocabulary=0 if head is Head.SCORE else vocabulary,
        kv=tuple(_kept(numbers, family, attention, layers)),
        attention=attention,
        root=(
            Weight(
                name="model.embed_tokens.weight",
                shape=(vocabulary, hidden),
                ways=vocabulary,
            ),
            Weight(name="model.norm.weight", shape=(hidden,)),
            *_heads(head, hidden, vocabulary, tied, numbers),
        ),
        blocks=tuple(blocks),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Heads and biases of grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245)."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    bias: bool

    @classmethod
    def read(cls, numbers: ModelKeys) -> Attention:
        hidden = numbers.number("hidden_size")
        heads = numbers.number("num_attention_heads")
        return cls(
            hidden=hidden,
            heads=heads,
            kv_heads=numbers.number("num_key_value_heads", heads),
            head_dim=numbers.number("head_dim", max(1, hidden // heads)),
            bias=numbers.switch("attention_bias", False),
        )

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim

    def weights(self, family: Family) -> Iterator[Weight]:
        at = "model.layers.*.self_attn."
        bias = self.bias or family.qkv_bias
        if family.fused:
            yield from _linear(
                at + "qkv_proj",
                self.hidden,
                self.query + 2 * self.keys,
                bias,
                self.kv_heads,
            )
        else:
            yield from _linear(at + "q_proj", self.hidden, self.query, bias, self.heads)
            yield from _linear(
                at + "k_proj", self.hidden, self.keys, bias, self.kv_heads
            )
            yield from _linear(
                at + "v_proj", self.hidden, self.keys, bias, self.kv_heads
            )
        own_bias = self.bias and not family.qkv_bias
        yield from _linear(
            at + "o_proj",
            self.query,
            self.hidden,
            own_bias,
            self.heads,
            cut_outputs=False,
        )
        if family.qk_norms:
            yield Weight(name=at + "q_norm.weight", shape=(self.head_dim,))
            yield Weight(name=at + "k_norm.weight", shape=(self.head_dim,))


def _linear(
    name: str,
    inputs: int,
    outputs: int,
    bias: bool,
    ways: int,
    *,
    cut_outputs: bool = True,
) -> Iterator[Weight]:
    yield Weight(
        name=name + ".weight", shape=(outputs, inputs), ways=ways, projection=True
    )
    # If the inputs are split, partial outputs are summed and every rank adds the whole bias.
    if bias:
        yield Weight(
            name=name + ".bias", shape=(outputs,), ways=ways if cut_outputs else 1
        )


def _gated(
    hidden: int, width: int, name: str, bias: bool = False, fused: bool = False
) -> Iterator[Weight]:
    at = f"model.layers.*.{name}."
    if fused:
        yield from _linear(at + "gate_up_proj", hidden, 2 * width, bias, width)
    else:
        yield from _linear(at + "gate_proj", hidden, width, bias, width)
        yield from _linear(at + "up_proj", hidden, width, bias, width)
    yield from _linear(at + "down_proj", width, hidden, bias, width, cut_outputs=False)


def _experts(
    numbers: ModelKeys, keys: tuple[str, str | None], hidden: int
) -> tuple[Weights, Saved, Saved]:
    width_key, shared_key = keys
    count = numbers.either("num_local_experts", "num_experts")
    width = numbers.number(width_key)
    active = numbers.number("num_experts_per_tok")
    at = "model.layers.*.mlp."
    weights = [
        Weight(name=at + "gate.weight", shape=(count, hidden)),
        Weight(
            name=at + "experts.gate_up_proj",
            shape=(count, 2 * width, hidden),
            ways=width,
            met=active / count,
        ),
        Weight(
            name=at + "experts.down_proj",
            shape=(count, hidden, width),
            ways=width,
            met=active / count,
        ),
    ]
    shared = 0 if shared_key is None else numbers.number(shared_key)
    if shared:
        weights += _gated(hidden, shared, "mlp.shared_expert")
        weights.append(
            Weight(
                name=at + "shared_expert_gate.weight",
                shape=(1, hidden),
                projection=True,
            )
        )
    # Each active expert gets its own copy of the token and gives back a scaled output; the router scores all experts.
    saved = Saved(
        compute=2 * active * hidden + (hidden if shared else 0),
        compute_cut=4 * (active * width + shared),
        float32=2 * count + 6 * active,
    )
    return tuple(weights), saved, saved


def _block(
    layers: int,
    attention: Attention,
    family: Family,
    weights: Weights,
    saved: Saved,
    passing: Saved,
) -> Block:
    """Return a block of equal layers; what norms and attention save is added to what feed-forward saves."""
    hidden = attention.hidden
    norms = ["input_layernorm", "post_attention_layernorm"]
    if family.norms_after:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    # A norm saves its input and one root in float32, then the scaled value; two of them also the output that goes into
    # projections, where the norms of query and key heads give what attention saves anyway.
    normed = len(norms) * hidden
    roots = len(norms)
    if family.qk_norms:
        normed += attention.query + attention.keys
        roots += attention.heads + attention.kv_heads
    scaled = 0 if family.norms_in_float32 else normed
    inputs = passing.compute + 4 * hidden + 2 * attention.head_dim
    # Rotary embedding takes three steps, queries first. While keys are rotated, queries exist twice.
    turned = max(
        4 * attention.query + 2 * attention.keys,
        2 * attention.query + 5 * attention.keys,
    )
    widest = max(passing.compute_cut, turned)
    return Block(
        layers=layers,
        weights=(
            *attention.weights(family),
            *weights,
            *(
                Weight(name=f"model.layers.*.{norm}.weight", shape=(hidden,))
                for norm in norms
            ),
        ),
        saved=Saved(
            compute=saved.compute + (3 if family.fused else 2) * hidden + scaled,
            compute_cut=saved.compute_cut
            + 2 * (attention.query + attention.keys),  # queries, keys, values, output
            float32=saved.float32 + roots + 2 * normed - scaled,
            float32_cut=saved.float32_cut
            + attention.heads,  # the logarithm of each softmax's sum
        ),
        passing=Saved(compute=inputs, compute_cut=widest, float32=passing.float32 + 8),
    )


def _kept(
    numbers: ModelKeys, family: Family, attention: Attention, layers: int
) -> Iterator[KvLayers]:
    """Yield the KV caches of layers with a sliding window, and of layers with full attention."""
    window = numbers.window(family.window)
    heads = attention.kv_heads
    each = 2 * attention.head_dim
    sliding = numbers.sliding_layers(layers, family.pattern) if window else 0
    if sliding:
        yield KvLayers(layers=sliding, heads=heads, numbers=each, window=window)
    if layers > sliding:
        yield KvLayers(layers=layers - sliding, heads=heads, numbers=each)


def _described(numbers: ModelKeys, record: Mapping[str, Any], head: Head) -> ModelShape:
    """Return the shape that transformers described, with the head of a role."""
    vocabulary = int(record["vocabulary"])
    hidden = int(record["hidden"])
    root = [
        _weight(row)
        for row in record["root"]
        if head is not Head.SCORE or row[0] != record["head"]
    ]
    # `root` already has the language model head, so it is treated as tied here.
    score = _heads(head, hidden, vocabulary, True, numbers)
    return ModelShape(
        hidden=hidden,
        vocabulary=0 if head is Head.SCORE else vocabulary,
        kv=tuple(KvLayers(**layers) for layers in record["kv"]),
        attention=Attention(hidden=hidden, **record["attention"], bias=False),
        root=(*root, *score),
        blocks=tuple(
            Block(
                layers=block["layers"],
                weights=tuple(map(_weight, block["weights"])),
                saved=Saved(**dict(zip(_SAVED, block["saved"], strict=True))),
            )
            for block in record["blocks"]
        ),
        notes=tuple(f"{numbers.family}: {note}" for note in record["notes"]),
        tower=None if record["tower"] is None else _seeing(record["tower"]),
    )


def _seeing(record: Mapping[str, Any]) -> Tower:
    block = Block(
        layers=record["layers"],
        weights=tuple(
            dataclasses.replace(_weight(row), projection=False, ways=1)
            for row in record["weights"]
        ),
        saved=Saved(**dict(zip(_SAVED, record["saved"], strict=True))),
    )
    return Tower(
        block=block,
        hidden=record["hidden"],
        pixels=record["pixels"],
        patches=record["patches"],
        mergers=record["mergers"],
    )


def _weight(row: Sequence[Any]) -> Weight:
    name, shape, ways, projection = row
    return Weight(name=name, shape=tuple(shape), ways=ways, projection=projection)


def _heads(
    head: Head, hidden: int, vocabulary: int, tied: bool, numbers: ModelKeys
) -> Iterator[Weight]:
    if head is not Head.SCORE and not tied:
        yield Weight(name="lm_head.weight", shape=(vocabulary, hidden), ways=vocabulary)
    if head is Head.SCORE:
        yield Weight(
            name="score.weight", shape=(numbers.number("num_labels", 1), hidden)
        )
    if head is Head.LANGUAGE_AND_VALUE:
        yield Weight(name="score.weight", shape=(1, hidden))


def _gpt2(numbers: ModelKeys, head: Head) -> ModelShape:
    """Return the shape of GPT-2 (Radford et al. 2019), whose linear layers store their weights as [in, out]."""
    hidden = numbers.number("n_embd")
    heads = numbers.number("n_head")
    vocabulary = numbers.number("vocab_size")
    width = numbers.number("n_inner", 4 * hidden)
    layers = numbers.number("n_layer")
    at = "transformer.h.*."
    shapes = {
        "ln_1": (1, hidden),
        "attn.c_attn": (hidden, 3 * hidden),
        "attn.c_proj": (hidden, hidden),
        "ln_2": (1, hidden),
        "mlp.c_fc": (hidden, width),
        "mlp.c_proj": (width, hidden),
    }
    weights: list[Weight] = []
    for name, (inputs, outputs) in shapes.items():
        norm = name.startswith("ln")
        shape = (outputs,) if norm else (inputs, outputs)
        ways = 1 if norm else width if name.startswith("mlp") else heads
        weights.append(
            Weight(
                name=f"{at}{name}.weight", shape=shape, ways=ways, projection=not norm
            )
        )
        weights.append(
            Weight(
                name=f"{at}{name}.bias",
                shape=(outputs,),
                ways=1 if name.endswith("c_proj") else ways,
            )
        )
    tied = numbers.switch("tie_word_embeddings", True)
    return ModelShape(
        hidden=hidden,
        vocabulary=0 if head is Head.SCORE else vocabulary,
        kv=(KvLayers(layers=layers, heads=heads, numbers=2 * max(1, hidden // heads)),),
        attention=Attention(
            hidden=hidden,
            heads=heads,
            kv_heads=heads,
            head_dim=max(1, hidden // heads),
            bias=True,
        ),
        root=(
            Weight(
                name="transformer.wte.weight",
                shape=(vocabulary, hidden),
                ways=vocabulary,
            ),
            Weight(
                name="transformer.wpe.weight",
                shape=(numbers.number("n_positions"), hidden),
            ),
            Weight(name="transformer.ln_f.weight", shape=(hidden,)),
            Weight(name="transformer.ln_f.bias", shape=(hidden,)),
            *_heads(head, hidden, vocabulary, tied, numbers),
        ),
        blocks=(
            Block(
                layers=layers,
                weights=tuple(weights),
                # The approximated GELU is unfused: five tensors of the feed-forward width.
                saved=Saved(
                    compute=5 * hidden,
                    compute_cut=5 * hidden + 5 * width,
                    float32=4,
                    float32_cut=heads,
                ),
                passing=Saved(
                    compute=4 * hidden,
                    compute_cut=max(6 * hidden, 4 * width),
                    float32=8,
                ),
            ),
        ),
    )


# OpenVLA, arXiv:2406.09246, is code of its own, of no release of transformers: two towers, a projector, Llama 2.
_LLAMA_2_7B = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
} | dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 32)
_SIGHTLESS = (
    "its vision towers save more the more they see: their activations are not counted"
)


def _openvla(config: Mapping[str, object], head: Head, key: str) -> ModelShape:
    """Return the shape of OpenVLA: Llama 2 on features of DINOv2-L and SigLIP-SO400M.

    Images have 224 x 224 pixels, which are 256 patches of 14 x 14.
    """
    own = config.get("text_config")
    keys = {
        "model_type": "llama",
        **_LLAMA_2_7B,
        **(own if isinstance(own, Mapping) else {}),
    }
    text = read_model(keys, head=head, key=f"{key}.text_config")
    hidden = text.hidden
    see = 1024 + 1152
    large = _tower("featurizer", 24, 1024, 4096, 2)
    so400m = _tower("fused_featurizer", 27, 1152, 4304, 0)
    pool = [
        ("latent", (1152,)),
        ("q", (1152, 1152)),
        ("kv", (2304, 1152)),
        ("proj", (1152, 1152)),
    ]
    pool += [("fc1", (4304, 1152)), ("fc2", (1152, 4304)), ("norm", (1152,))]
    rest: list[tuple[str, tuple[int, ...]]] = [
        ("featurizer.tokens", (1 + 4 + 256, 1024)),
        ("fused.pos", (256, 1152)),
    ]
    rest += [
        (f"{at}.patch", (width, 3 * 14 * 14))
        for at, width in (("featurizer", 1024), ("fused", 1152))
    ]
    # Biases of the patch embedding and of the norm.
    rest += [
        (f"{at}.biases", (3 * width,))
        for at, width in (("featurizer", 1024), ("fused", 1152))
    ]
    rest += [(f"pool.{name}", shape) for name, shape in pool] + [
        ("pool.biases", (1152 + 2304 + 1152 + 4304 + 2 * 1152,))
    ]
    for at, (inputs, outputs) in enumerate(
        ((see, 4 * see), (4 * see, hidden), (hidden, hidden)), 1
    ):
        rest += [
            (f"projector.fc{at}", (outputs, inputs)),
            (f"projector.fc{at}.bias", (outputs,)),
        ]
    seen = tuple(Weight(name=name, shape=shape) for name, shape in rest)
    notes = (*text.notes, f"{_OPENVLA}: {_SIGHTLESS}")
    return dataclasses.replace(
        text,
        root=(*text.root, *seen),
        blocks=(large, so400m, *text.blocks),
        notes=notes,
    )


def _tower(at: str, layers: int, width: int, wide: int, scales: int) -> Block:
    """Return the layers of a vision transformer; `scales`: layer scales per layer (2 in DINOv2)."""
    linear = {
        "qkv": (3 * width, width),
        "proj": (width, width),
        "fc1": (wide, width),
        "fc2": (width, wide),
    }
    weights = [
        Weight(name=f"{at}.*.{name}.weight", shape=shape, projection=True)
        for name, shape in linear.items()
    ]
    weights += [
        Weight(name=f"{at}.*.{name}.bias", shape=shape[:1])
        for name, shape in linear.items()
    ]
    weights.append(
        Weight(name=f"{at}.*.norms_and_scales", shape=((4 + scales) * width,))
    )
    return Block(layers=layers, weights=tuple(weights), saved=Saved())

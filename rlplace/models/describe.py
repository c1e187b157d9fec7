"""Describe a language model of any family of transformers: weights, KV cache, and what autograd saves in its layers.

The planner runs this in a process of its own, `python -m rlplace.models.describe`. Standard input has the keys of a
`config.json` as JSON; standard output has the answer, which `placement.memory.families` reads. The model is built on
the meta device: neither weights nor code are downloaded, and nothing is computed.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from rlplace.models.families import VISION_FAMILIES
from rlplace.units import clipped

_ATTENTION = "rlplace_described"
# Tokens of the shorter of two passes; their difference is what one token saves
_TOKENS = 128
# Raised by model code that reads tensor values, or that wants more input than text
_UNTRACED = (
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
# Saved tensors: bytes of an element (2 or 4), and number of elements
_Tensors = list[tuple[int, float]]
# What a layer saves, in the order in which the functions below count it
_SAVED = ("compute", "compute_cut", "float32", "float32_cut")
# Last names of weights that tensor parallelism splits by heads, and by feed-forward
# width
_HEADS_CUT = {"q_proj", "q_b_proj", "kv_b_proj", "qkv_proj", "o_proj"}
_WIDTH_CUT = {"gate_proj", "up_proj", "gate_up_proj", "down_proj"}
# Those split by columns (inputs)
_INPUTS_CUT = {"o_proj", "down_proj"}
# Endings of the architectures that generate text
_GENERATES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


def describe(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a language model for the planner, ready for JSON. `keys`: the entries of config.json.

    Raises the errors of transformers if it cannot build the model.
    """
    options = {key: value for key, value in keys.items() if key != "model_type"}
    config = AutoConfig.for_model(str(keys["model_type"]), **options)
    # Shapes and dtypes only, on the meta device
    with torch.device("meta"):
        model: PreTrainedModel = _made_by(config, keys)._from_config(
            config,
            dtype=torch.bfloat16,
        )
    # Layers of text, and of a vision tower its blocks; other lists of a tower are not layers
    layers = _layers(model)
    sees = config.model_type in VISION_FAMILIES
    if sees:
        layers = {
            name: layer
            for name, layer in layers.items()
            if ".visual." not in name or ".visual.blocks." in name
        }
    text = _decoder(config)
    # What autograd saves: traced where a pass can be run without values, else estimated
    saved = None
    notes = list[str]()
    try:
        saved = _saved(model, layers, text)
        first_blocks = {
            name: layer
            for name, layer in layers.items()
            if sees and name.endswith(".visual.blocks.0")
        }
        if first_blocks:
            saved = saved | _saved_by_patch(model, first_blocks)
    except _UNTRACED as error:
        # The description stays useful: weights are known all the same
        first_line = str(error).strip().partition("\n")[0]
        why = clipped(f"{type(error).__name__}: {first_line}", 200)
        saved = None
        notes.append(
            f"activations are a guess by the widths of its layers: no pass could be traced, {why}"
        )
    layer_lists = {prefix.rpartition(".")[0] for prefix in layers}
    if len(layer_lists) > 1 and not sees:
        notes.append(
            "its vision or action layers save more the more they see: their activations are not counted"
        )
    # The vision tower is described apart from the blocks of the decoder
    kv = list(_kept(text, notes))
    blocks, root = _blocks(model, layers, saved, text)
    tower = []
    if sees:
        tower = [block for block in blocks if ".visual." in block["name"]]
    described_tower = None
    if tower:
        # Of a tower no part is split, and none adapted by LoRA
        bare = [{"name": w["name"], "shape": w["shape"]} for w in tower[0]["weights"]]
        described_tower = {**tower[0], "weights": bare, **_patches(model)}
    # A head of its own has a name; one tied to the embedding has none
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    own_head = None
    if head is not None and not tied:
        own_head = next(n for n, p in model.named_parameters() if p is head.weight)
    return {
        "hidden": text.hidden_size,
        "vocabulary": 0 if head is None else text.vocab_size,
        "head": own_head,
        "root": root,
        "blocks": [block for block in blocks if block not in tower],
        "tower": described_tower,
        "kv": kv,
        "attention": _heads(text),
        "notes": notes,
    }


def _decoder(config: Any) -> Any:
    """Return the part of a model's config that describes the text decoder."""
    # Some families nest the decoder's config in another one
    found = config.get_text_config(decoder=True)
    if hasattr(found, "num_hidden_layers"):
        return found
    return next(_decoder(getattr(config, name)) for name in config.sub_configs)


def _made_by(config: Any, keys: Mapping[str, Any]) -> Any:
    """Return the class of transformers to build: the architecture that the config names, if it generates text.

    Otherwise, return a class for the model type. `keys`: the entries of config.json. Raises ValueError if transformers
    has no such class.
    """
    known = []
    for name in keys.get("architectures") or ():
        if str(name).endswith(_GENERATES) and hasattr(transformers, name):
            known.append(name)
    tables = (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )
    for table in tables:
        if config.model_type in table:
            known.append(table[config.model_type])
    if not known:
        raise ValueError(f"transformers generates nothing with a {config.model_type}")
    return getattr(transformers, known[0])


# ── weights ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return name -> layer: the entries, with parameters, of the outermost module lists of the model."""
    found: dict[str, nn.Module] = {}
    for name, part in model.named_modules():
        if isinstance(part, nn.ModuleList) and not any(
            name.startswith(inside + ".") for inside in found
        ):
            found |= {f"{name}.{at}": layer for at, layer in enumerate(part)}
    return {
        name: layer
        for name, layer in found.items()
        if next(layer.parameters(), None) is not None
    }


def _blocks(
    model: PreTrainedModel,
    layers: Mapping[str, nn.Module],
    saved: Mapping[str, list[int]] | None,
    text: Any,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the kinds of layers, each with the number of equal layers, and the weights outside of layers.

    Both are lists of JSON objects, as `placement.memory.families` reads them. `layers`: name -> layer. `saved`: name of
    a layer -> elements per token that autograd saves; None if they are unknown. `text`: the config of the text decoder.
    """
    linear = {
        f"{name}.weight"
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear)
    }
    # Sort weights into layers and root
    root: list[dict[str, Any]] = []
    inside: dict[str, list[dict[str, Any]]] = {name: [] for name in layers}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        layer = next((at for at in layers if name.startswith(at + ".")), None)
        # The vocabulary can be split by rows
        if layer is None:
            ways = shape[0] if len(shape) == 2 and shape[0] == text.vocab_size else 1
            root.append({"name": name, "shape": shape, "ways": ways})
        else:
            weight = {
                "name": name.removeprefix(layer + "."),
                "shape": shape,
                "ways": _ways(name, shape, text),
                "linear": name in linear,
            }
            inside[layer].append(weight)
    # Layers of one list with equal weights are one kind; it saves what the largest of
    # them saves
    alike: dict[tuple[str, str], list[list[int]]] = {}
    for name, rows in inside.items():
        kept = _widths(rows) if saved is None else saved.get(name, [0, 0, 0, 0])
        kind = (name.rpartition(".")[0] + ".*", json.dumps(rows))
        alike.setdefault(kind, []).append(kept)
    blocks = []
    for (shown, weights), all_kept in alike.items():
        block = {
            "name": shown,
            "layers": len(all_kept),
            "weights": json.loads(weights),
            "saved": dict(zip(_SAVED, max(all_kept, key=sum), strict=True)),
        }
        blocks.append(block)
    return blocks, root


def _ways(name: str, shape: tuple[int, ...], text: Any) -> int:
    """Return the number of parts into which tensor parallelism can split a layer's weight at most.

    The number is 1 if the weight cannot be split, or if this is unknown. `name`: the name of the weight within the
    layer. `text`: the config of the text decoder.
    """
    module, _, kind = name.rpartition(".")
    # The module's last name; a weight with three dimensions is its own module
    last = (name if len(shape) == 3 else module).rpartition(".")[2]
    # Ranks sum their products; each adds the whole bias
    if kind == "bias" and last in _INPUTS_CUT:
        return 1
    # Linear attention splits by its own heads
    if "linear_attn." in name:
        if shape[0] > 1 and last != "norm":
            return int(getattr(text, "linear_num_key_heads", 1))
        return 1
    # Attention splits by heads, the feed-forward layer by its width
    if last in ("k_proj", "v_proj"):
        return int(
            getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        )
    if last in _HEADS_CUT:
        return int(text.num_attention_heads)
    if last in _WIDTH_CUT and shape:
        return min(shape[-2:])
    return 1


def _widths(rows: list[dict[str, Any]]) -> list[int]:
    """Return an upper bound of the elements per token that autograd saves in a layer, as four numbers.

    The numbers: elements in the dtype of the computation, first those that tensor parallelism does not split, then
    those that it splits; then the same two numbers for float32. The bound counts inputs and outputs of the layer's
    linear layers, and norms in float32. `rows`: the weights of the layer.
    """
    wide = 0
    norms = 0
    for row in rows:
        shape = row["shape"]
        if len(shape) > 1:
            wide += sum(shape[-2:])
        elif len(shape) == 1:
            norms += shape[0]
    return [2 * wide, 0, norms, 0]


# ── activations ──────────────────────────────────────────────────────────────────────────────────────────────────────


class _Attention(torch.autograd.Function):
    """Attention that saves the same tensors for its backward pass as fast attention kernels do.

    These are inputs, output, and one float32 number per query, but no matrix of scores.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        batch, heads, tokens, _ = query.shape
        out = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(
            query,
            key,
            value,
            out,
            query.new_empty(query.shape[:-1], dtype=torch.float32),
        )
        return out

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError("nothing is computed on the meta device")


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return a tensor with the shape of the attended values, but without their content, and None for attention weights.

    This is the attention function that `_saved` gives to transformers.
    """
    return _Attention.apply(query, key, value).transpose(1, 2).contiguous(), None


def _saved(
    model: PreTrainedModel,
    layers: Mapping[str, nn.Module],
    text: Any,
) -> dict[str, list[int]]:
    """Return name -> elements per token that autograd saves, for each text layer.

    The elements are four numbers: elements in the dtype of the computation, first those that tensor parallelism does
    not split, then those that it splits; then the same two numbers for float32. `layers`: name -> layer. `text`: the
    config of the text decoder.
    """
    # Replace attention by one that saves what real kernels save
    AttentionInterface.register(_ATTENTION, _attend)
    AttentionMaskInterface.register(_ATTENTION, lambda *_, **__: None)
    if getattr(model, "_supports_attention_backend", False):
        model.set_attn_implementation(_ATTENTION)
    # Decoders that do not declare support read the config's own entry
    text._attn_implementation = _ATTENTION
    model.train()
    # Experts of one token, each with an input of its own
    active = int(getattr(text, "num_experts_per_tok", None) or 1)

    def read(tokens: int) -> None:
        ids = torch.zeros((1, tokens), dtype=torch.int64, device="meta")
        # Model code reads the values of the mask, so it is a real tensor
        model(input_ids=ids, attention_mask=torch.ones((1, tokens)), use_cache=False)

    return _by_token(
        model,
        layers,
        text.hidden_size,
        {text.hidden_size, active * text.hidden_size},
        read,
    )


def _saved_by_patch(
    model: Any,
    layers: Mapping[str, nn.Module],
) -> dict[str, list[int]]:
    """Return name -> elements per image patch that autograd saves, for the one vision block in `layers`.

    The elements are four numbers: elements in the dtype of the computation, first those that tensor parallelism does
    not split, then those that it splits; then the same two numbers for float32.
    """
    width = _patches(model)["hidden"]
    heads = model.model.visual.blocks[0].attn.num_heads
    (layer,) = layers.values()

    def see(patches: int) -> None:
        # A block's input: states of the patches, and cosines and sines of their
        # positions
        states = torch.empty(
            patches,
            width,
            device="meta",
            dtype=torch.bfloat16,
            requires_grad=True,
        )
        turned = torch.empty(
            patches,
            width // heads,
            device="meta",
            dtype=torch.bfloat16,
        )
        layer(
            states,
            cu_seqlens=torch.tensor([0, patches], device="cpu"),
            position_embeddings=(turned, turned),
        )

    return _by_token(model, layers, width, {width}, see)


def _patches(model: Any) -> dict[str, int]:
    """Return sizes of the vision tower, by name.

    "hidden": width of the states. "pixels": numbers of a patch. "patches": patches that make up one token. "mergers":
    number of modules that merge patches to tokens.
    """
    tower = model.model.visual
    pixels = tower.patch_embed.proj.weight.shape
    merge = tower.spatial_merge_size
    mergers = 1 + len(getattr(tower, "deepstack_merger_list", ()))
    return {
        "hidden": pixels[0],
        "pixels": math.prod(pixels[1:]),
        "patches": merge * merge,
        "mergers": mergers,
    }


def _by_token(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    hidden: int,
    whole: set[int],
    run_pass: Callable[[int], None],
) -> dict[str, list[int]]:
    """Return name -> elements per token that autograd saves in each layer, as four numbers.

    They follow from the difference between a longer and a shorter pass. The numbers: elements of 2 bytes, first those
    that tensor parallelism does not split, then those that it splits; then the same two numbers for elements of 4
    bytes. `layers`: name -> layer. `run_pass`: runs a pass over a given number of tokens. `hidden`: width of the
    states. `whole`: widths that tensor parallelism does not split.
    """
    short = _pass(model, layers, hidden, run_pass, _TOKENS)
    long = _pass(model, layers, hidden, run_pass, 2 * _TOKENS)
    found: dict[str, list[int]] = {}
    for name, fewer in short.items():
        more = long[name]
        # Tensors correspond one to one; else only their sums by element size do
        if len(fewer) == len(more):
            pairs = list(zip(fewer, more, strict=True))
        else:
            pairs = [_sums(fewer, more, kind) for kind in (2, 4)]
        # Whole and split elements of 2 bytes, then those of 4; float32 counts as whole
        row = [0.0] * 4
        for (kind, less), (_, size) in pairs:
            width = (size - less) / _TOKENS
            if kind == 4:
                row[2] += width
            elif width in whole:
                row[0] += width
            else:
                row[1] += width
        found[name] = [round(width) for width in row]
    return found


def _sums(
    fewer: _Tensors,
    more: _Tensors,
    kind: int,
) -> tuple[tuple[int, float], tuple[int, float]]:
    """Return (bytes of an element, sum of elements) for a shorter and a longer pass, over saved tensors of one kind.

    `fewer`, `more`: the tensors that each pass saved, as (bytes of an element, elements). `kind`: only tensors with so
    many bytes per element are counted.
    """
    fewer_total = 0.0
    for fewer_kind, size in fewer:
        if fewer_kind == kind:
            fewer_total += size
    more_total = 0.0
    for more_kind, size in more:
        if more_kind == kind:
            more_total += size
    return (kind, fewer_total), (kind, more_total)


def _pass(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    hidden: int,
    run_pass: Callable[[int], None],
    tokens: int,
) -> dict[str, _Tensors]:
    """Return name of each layer -> sizes of the tensors that autograd saves in a pass over `tokens` tokens.

    `layers`: name -> layer. `run_pass`: runs a pass over a given number of tokens. A tensor counts once, in the first
    layer that saves it. `hidden`: width of the states.
    """
    # Names of the layers that the pass is in; the last one saves
    found: dict[str, _Tensors] = {}
    inside: list[str] = []
    # Tensors are kept alive, so that no new storage gets the id of an old one
    kept: list[Tensor] = list(model.parameters())
    seen = {tensor.untyped_storage()._cdata for tensor in kept}

    # Called with each tensor that autograd saves
    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if inside and storage._cdata not in seen:
            kept.append(tensor)
            seen.add(storage._cdata)
            kind = 2 if tensor.itemsize == 2 else 4
            found[inside[-1]].append((kind, storage.nbytes() / kind))
        return tensor

    def enter(name: str) -> Any:
        def hook(_: nn.Module, args: Any, named: Mapping[str, Any]) -> None:
            inside.append(name)
            found.setdefault(name, [])
            # Inputs that all layers share, such as cosines of positions, do not count
            for given in (*args[1:], *named.values()):
                tensors = given if isinstance(given, tuple) else (given,)
                for tensor in tensors:
                    if isinstance(tensor, Tensor) and tensor.shape[-1:] != (hidden,):
                        kept.append(tensor)
                        seen.add(tensor.untyped_storage()._cdata)

        return hook

    # Hooks note which layer the pass is in
    hooks = [
        layer.register_forward_pre_hook(enter(name), with_kwargs=True)
        for name, layer in layers.items()
    ]
    hooks += [
        layer.register_forward_hook(lambda *_: inside.pop() and None)
        for layer in layers.values()
    ]
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run_pass(tokens)
    for hook in hooks:
        hook.remove()
    return found


# ── heads, keys and values ────────────────────────────────────────────────────────────────────────────────────────────


def _heads(text: Any) -> dict[str, int]:
    """Return "heads": number of attention heads, "kv_heads": number of key heads, "head_dim": largest width of a head.

    `text`: the config of the text decoder.
    """
    heads = text.num_attention_heads
    plain = getattr(text, "head_dim", None) or text.hidden_size // heads
    # Multi-head latent attention (DeepSeek-V2): a query has a part with and one without
    # rotation
    latent = (getattr(text, "qk_nope_head_dim", None) or 0) + (
        getattr(text, "qk_rope_head_dim", None) or 0
    )
    width = max(latent, getattr(text, "v_head_dim", None) or 0) or plain
    return {
        "heads": heads,
        "kv_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": width,
    }


def _kept(text: Any, notes: list[str]) -> Iterator[dict[str, int]]:
    """Yield, for each kind of attention layer, what an engine keeps of a token in its KV cache: fields of `KvLayers`.

    `text`: the config of the text decoder. `notes`: a note is appended for each kind of layer that this function does
    not know.
    """
    # Layers that share the cache of another layer keep nothing
    count = text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", None) or 0)
    kinds = Counter(
        (getattr(text, "layer_types", None) or ["full_attention"] * count)[:count]
    )
    # Keys and values of one token
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = 2 * (
        getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    )
    # Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): one latent vector for all heads
    if getattr(text, "kv_lora_rank", None):
        heads = 1
        width = (
            text.kv_lora_rank
            + text.qk_rope_head_dim
            + (getattr(text, "index_head_dim", None) or 0)
        )
    # Config keys of the window, for kinds of layers that have one
    windows = {
        "sliding_attention": "sliding_window",
        "chunked_attention": "attention_chunk_size",
    }
    # An entry for each kind of layer
    for kind, layers in kinds.items():
        if kind in ("full_attention", "indexed_attention"):
            yield {"layers": layers, "heads": heads, "numbers": width}
        elif window := getattr(text, windows.get(kind, ""), None):
            yield {"layers": layers, "heads": heads, "numbers": width, "window": window}
        elif kind == "linear_attention" and (
            values := getattr(text, "linear_num_value_heads", None)
        ):
            # Linear attention keeps a state and the last inputs of a convolution, not
            # tokens
            keys = text.linear_num_key_heads * text.linear_key_head_dim
            state = values * text.linear_key_head_dim * text.linear_value_head_dim
            past = (text.linear_conv_kernel_dim - 1) * (
                2 * keys + values * text.linear_value_head_dim
            )
            yield {
                "layers": layers,
                "heads": values,
                "numbers": 0,
                "state": -(-(state + past) // values),
            }
        else:
            notes.append(
                f"what its {layers} layers of type {kind} keep of a sequence is not counted"
            )


def main() -> None:
    """Read the keys of a config.json from standard input; write the description to standard output."""
    transformers.logging.set_verbosity_error()
    sys.stdout.write(json.dumps(describe(json.load(sys.stdin))) + "\n")


if __name__ == "__main__":
    main()

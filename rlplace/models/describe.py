"""Describe a model of any family that transformers knows: its weights, keys and values, and what its layers save.

The planner runs this as a process of its own, `python -m rlplace.models.describe`, with the keys of a `config.json` as
JSON on its standard input; the answer on its standard output is what `placement.memory.families` reads. The model is
built on the meta device: neither weights nor code are downloaded, and nothing is computed.
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

from rlplace.models.families import SEEING

_ATTENTION = "rlplace_described"
# Of the shorter of two passes; what grows between them is what a token saves
_TOKENS = 128
# What code of a model raises that asks for values, or for more than text.
_UNTRACED = (
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
_Tensors = list[tuple[int, float]]  # 2 or 4, and how many numbers of so many bytes
_HEADS_CUT = {"q_proj", "q_b_proj", "kv_b_proj", "qkv_proj", "o_proj"}
_WIDTH_CUT = {"gate_proj", "up_proj", "gate_up_proj", "down_proj"}
_INPUTS_CUT = {"o_proj", "down_proj"}
_GENERATES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


def describe(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a model. Raises what transformers raises where it cannot build it."""
    config = AutoConfig.for_model(
        str(keys["model_type"]), **{k: v for k, v in keys.items() if k != "model_type"}
    )
    with torch.device("meta"):
        model: PreTrainedModel = _made_by(config, keys)._from_config(
            config, dtype=torch.bfloat16
        )
    layers = _layers(model)
    sees = config.model_type in SEEING
    if sees:  # other lists of its tower are no layers of it
        layers = {
            name: layer
            for name, layer in layers.items()
            if ".visual." not in name or ".visual.blocks." in name
        }
    text = _decoder(config)
    saved = None
    notes = list[str]()
    try:
        seen = {
            name: layer
            for name, layer in layers.items()
            if sees and name.endswith(".visual.blocks.0")
        }
        saved = _saved(model, layers, text) | (
            _saved_by_patch(model, seen) if seen else {}
        )
    except _UNTRACED as error:  # weights are known all the same
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[
            :200
        ]
        notes.append(
            f"activations are a guess by the widths of its layers: no pass could be traced, {why}"
        )
    if len({prefix.rpartition(".")[0] for prefix in layers}) > 1 and not sees:
        notes.append(
            "its vision or action layers save more the more they see: their activations are not counted"
        )
    kv = list(_kept(text, notes))
    blocks, root = _blocks(model, layers, saved, text)
    tower = (
        [block for block in blocks if ".visual." in block["weights"][0][0]]
        if sees
        else []
    )
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    return {
        "hidden": text.hidden_size,
        "vocabulary": 0 if head is None else text.vocab_size,
        "head": None
        if head is None or tied
        else next(n for n, p in model.named_parameters() if p is head.weight),
        "root": root,
        "blocks": [block for block in blocks if block not in tower],
        "tower": {**tower[0], **_patches(model)} if tower else None,
        "kv": kv,
        "attention": _heads(text),
        "notes": notes,
    }


def _decoder(config: Any) -> Any:
    """Return the config of the decoder that reads text."""
    found = config.get_text_config(decoder=True)
    if hasattr(found, "num_hidden_layers"):
        return found
    return next(_decoder(getattr(config, name)) for name in config.sub_configs)


def _made_by(config: Any, keys: Mapping[str, Any]) -> Any:
    """Return the class that the config names as its architecture, else that of transformers for text and images."""
    named = [
        n
        for n in keys.get("architectures") or ()
        if str(n).endswith(_GENERATES) and hasattr(transformers, n)
    ]
    tables = (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )
    known = [table[config.model_type] for table in tables if config.model_type in table]
    if not named and not known:
        raise ValueError(f"transformers generates nothing with a {config.model_type}")
    return getattr(transformers, [*named, *known][0])


# ── weights ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers by name: entries of those lists that are inside no other list."""
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
) -> tuple[list[dict[str, Any]], list[list[Any]]]:
    """Return layers that are all alike once, with their number, and the weights that are in no layer."""
    linear = {
        f"{name}.weight"
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear)
    }
    root: list[list[Any]] = []
    inside: dict[str, list[list[Any]]] = {name: [] for name in layers}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        layer = next((at for at in layers if name.startswith(at + ".")), None)
        if layer is None:
            ways = shape[0] if len(shape) == 2 and shape[0] == text.vocab_size else 1
            root.append([name, shape, ways, False])
        else:
            shown = name.replace(layer, layer.rpartition(".")[0] + ".*", 1)
            inside[layer].append(
                [shown, shape, _ways(name, shape, text), name in linear]
            )
    alike: dict[str, list[list[int]]] = {}
    for name, rows in inside.items():
        kept = _widths(rows) if saved is None else saved.get(name, [0, 0, 0, 0])
        alike.setdefault(json.dumps(rows), []).append(kept)
    blocks = [
        {"layers": len(k), "weights": json.loads(rows), "saved": max(k, key=sum)}
        for rows, k in alike.items()
    ]
    return blocks, root


def _ways(name: str, shape: tuple[int, ...], text: Any) -> int:
    """Return into how many parts tensor parallelism can cut a weight of a layer; 1 where that is not known."""
    module, _, kind = name.rpartition(".")
    last = (name if len(shape) == 3 else module).rpartition(".")[2]
    # Parts are summed, and every rank adds the whole bias
    if kind == "bias" and last in _INPUTS_CUT:
        return 1
    if "linear_attn." in name:
        if shape[0] > 1 and last != "norm":
            return int(getattr(text, "linear_num_key_heads", 1))
        return 1
    if last in ("k_proj", "v_proj"):
        return int(
            getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        )
    if last in _HEADS_CUT:
        return int(text.num_attention_heads)
    if last in _WIDTH_CUT and shape:
        return min(shape[-2:])
    return 1


def _widths(rows: list[list[Any]]) -> list[int]:
    """Return an upper bound of what a layer saves: each linear layer's inputs and outputs, norms in float32."""
    wide = sum(sum(shape[-2:]) for _, shape, _, _ in rows if len(shape) > 1)
    norms = sum(shape[0] for _, shape, _, _ in rows if len(shape) == 1)
    return [2 * wide, 0, norms, 0]


# ── activations ──────────────────────────────────────────────────────────────────────────────────────────────────────


class _Attention(torch.autograd.Function):
    """Keep for the backward pass what attention without its matrix of scores keeps."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
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
    return _Attention.apply(query, key, value).transpose(1, 2).contiguous(), None


def _saved(
    model: PreTrainedModel, layers: Mapping[str, nn.Module], text: Any
) -> dict[str, list[int]]:
    """Return numbers of a token that autograd saves in each layer that a pass over text goes through.

    By dtype of the computation and float32, each whole and as tensor parallelism cuts it: as `Saved` has them.
    """
    AttentionInterface.register(_ATTENTION, _attend)
    AttentionMaskInterface.register(_ATTENTION, lambda *_, **__: None)
    if getattr(model, "_supports_attention_backend", False):
        model.set_attn_implementation(_ATTENTION)
    # Of decoders that do not say that it can be replaced
    text._attn_implementation = _ATTENTION
    model.train()
    active = int(getattr(text, "num_experts_per_tok", None) or 1)

    def read(tokens: int) -> None:
        ids = torch.zeros((1, tokens), dtype=torch.int64, device="meta")
        # The mask's values are asked for
        model(input_ids=ids, attention_mask=torch.ones((1, tokens)), use_cache=False)

    return _by_token(
        model,
        layers,
        text.hidden_size,
        {text.hidden_size, active * text.hidden_size},
        read,
    )


def _saved_by_patch(
    model: Any, layers: Mapping[str, nn.Module]
) -> dict[str, list[int]]:
    """Return the same numbers of a patch in a layer of the tower."""
    width = _patches(model)["hidden"]
    heads = model.model.visual.blocks[0].attn.num_heads
    (layer,) = layers.values()

    def see(patches: int) -> None:
        states = torch.empty(
            patches, width, device="meta", dtype=torch.bfloat16, requires_grad=True
        )
        turned = torch.empty(
            patches, width // heads, device="meta", dtype=torch.bfloat16
        )
        layer(
            states,
            cu_seqlens=torch.tensor([0, patches], device="cpu"),
            position_embeddings=(turned, turned),
        )

    return _by_token(model, layers, width, {width}, see)


def _patches(model: Any) -> dict[str, int]:
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
    through: Callable[[int], None],
) -> dict[str, list[int]]:
    """Compare two passes, `through` more and fewer tokens. `whole`: widths that tensor parallelism does not cut."""
    short, long = (
        _pass(model, layers, hidden, through, tokens)
        for tokens in (_TOKENS, 2 * _TOKENS)
    )
    found: dict[str, list[int]] = {}
    for name, fewer in short.items():
        row = [0.0] * 4
        more = long[name]
        alike = len(fewer) == len(more)
        for (kind, less), (_, size) in (
            zip(fewer, more, strict=True)
            if alike
            else [_sums(fewer, more, k) for k in (2, 4)]
        ):
            width = (size - less) / _TOKENS
            row[2 * (kind == 4) + (kind == 2 and width not in whole)] += width
        found[name] = [round(width) for width in row]
    return found


def _sums(
    fewer: _Tensors, more: _Tensors, kind: int
) -> tuple[tuple[int, float], tuple[int, float]]:
    """Return both passes' tensors of one kind as if they were one, where a longer pass saves more of them."""
    return (kind, sum(size for k, size in fewer if k == kind)), (
        kind,
        sum(size for k, size in more if k == kind),
    )


def _pass(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    hidden: int,
    through: Callable[[int], None],
    tokens: int,
) -> dict[str, _Tensors]:
    """Return each tensor that a pass over `tokens` saves once, by layer."""
    found: dict[str, _Tensors] = {}
    inside: list[str] = []
    # Alive, so that no storage has the id of another
    kept: list[Tensor] = list(model.parameters())
    seen = {tensor.untyped_storage()._cdata for tensor in kept}

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
            # Such as cosines of positions, which all layers share
            for given in (
                *args[1:],
                *named.values(),
            ):
                for tensor in given if isinstance(given, tuple) else (given,):
                    if isinstance(tensor, Tensor) and tensor.shape[-1:] != (hidden,):
                        kept.append(tensor)
                        seen.add(tensor.untyped_storage()._cdata)

        return hook

    hooks = [
        layer.register_forward_pre_hook(enter(name), with_kwargs=True)
        for name, layer in layers.items()
    ]
    hooks += [
        layer.register_forward_hook(lambda *_: inside.pop() and None)
        for layer in layers.values()
    ]
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        through(tokens)
    for hook in hooks:
        hook.remove()
    return found


# ── heads, keys and values ────────────────────────────────────────────────────────────────────────────────────────────


def _heads(text: Any) -> dict[str, int]:
    """Return the heads of attention, by the widest of queries, keys and values."""
    heads = text.num_attention_heads
    plain = getattr(text, "head_dim", None) or text.hidden_size // heads
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
    """Yield groups of layers with what an engine keeps of a token, as `KvLayers` has it."""
    count = text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", None) or 0)
    kinds = Counter(
        (getattr(text, "layer_types", None) or ["full_attention"] * count)[:count]
    )
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = 2 * (
        getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    )
    # DeepSeek-V2, arXiv:2405.04434, section 2.1: one latent for all heads
    if getattr(text, "kv_lora_rank", None):
        heads = 1
        width = (
            text.kv_lora_rank
            + text.qk_rope_head_dim
            + (getattr(text, "index_head_dim", None) or 0)
        )
    windows = {
        "sliding_attention": "sliding_window",
        "chunked_attention": "attention_chunk_size",
    }
    for kind, layers in kinds.items():
        if kind in ("full_attention", "indexed_attention"):
            yield {"layers": layers, "heads": heads, "numbers": width}
        elif window := getattr(text, windows.get(kind, ""), None):
            yield {"layers": layers, "heads": heads, "numbers": width, "window": window}
        elif kind == "linear_attention" and (
            values := getattr(text, "linear_num_value_heads", None)
        ):
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
    transformers.logging.set_verbosity_error()
    sys.stdout.write(json.dumps(describe(json.load(sys.stdin))) + "\n")


if __name__ == "__main__":
    main()

"""Tiny mixtures of experts with random weights, and an independent way to replay routes in transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

FAMILIES = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
EXPERTS, CHOSEN, LAYERS = 6, 2, 3
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
}


def tiny_experts(folder: Path, family: str, **keys: Any) -> PreTrainedModel:
    """In fp32, with eager attention and a loop over experts."""
    known = AutoConfig.for_model(family).to_dict()
    given = {name: value for name, value in (SIZES | keys).items() if name in known}
    config = AutoConfig.for_model(family, **given)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
    model.save_pretrained(folder)
    return model.eval()


def gates(model: PreTrainedModel) -> list[Any]:
    return [
        layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")
    ]


@contextmanager
def forced(model: PreTrainedModel, routes: Tensor) -> Iterator[None]:
    """Give each token its experts, with probabilities over all of them as in a dense layer.

    `routes`: [tokens of all rows with their padding, routers, k]; below 0: the router's own.
    """
    found = gates(model)
    kept = [gate.forward for gate in found]

    def of(gate: Any, wanted: Tensor) -> Any:
        def forward(states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = states.reshape(-1, states.shape[-1]) @ gate.weight.t()
            chosen = wanted.clone()
            own = logits.topk(wanted.shape[-1]).indices
            chosen[wanted < 0] = own[wanted < 0]
            shares = torch.exp(logits - logits.logsumexp(-1, keepdim=True))
            picked = torch.stack([row[at] for row, at in zip(shares, chosen)])  # noqa: B905
            if getattr(gate, "norm_topk_prob", True):
                picked = picked / picked.sum(-1, keepdim=True)
            return logits, picked, chosen

        return forward

    for at, gate in enumerate(found):
        gate.forward = of(gate, routes[:, at])
    try:
        yield
    finally:
        for gate, forward in zip(found, kept, strict=True):
            gate.forward = forward


def padded_logprobs(
    model: PreTrainedModel,
    sequences: Sequence[NDArray[Any]],
    masks: Sequence[NDArray[np.bool_]],
    routes: Sequence[NDArray[Any]],
) -> Tensor:
    """Log-probabilities of the masked tokens from one padded batch in which the experts are forced."""
    longest = max(map(len, sequences))
    tokens = torch.zeros(len(sequences), longest, dtype=torch.long)
    seen = torch.zeros_like(tokens)
    chosen = torch.full((len(sequences), longest, *routes[0].shape[1:]), -1)
    for row, (ids, ways) in enumerate(zip(sequences, routes, strict=True)):
        tokens[row, : len(ids)] = torch.tensor(ids)
        seen[row, : len(ids)] = 1
        chosen[row, : len(ids)] = torch.tensor(ways).long()
    with forced(model, chosen.flatten(0, 1)):
        logits = model(input_ids=tokens, attention_mask=seen, use_cache=False).logits
    scores = logits.log_softmax(-1)
    found = []
    for row, (ids, mask) in enumerate(zip(sequences, masks, strict=True)):
        targets = torch.tensor(ids[1:]).long()
        each = scores[row, : len(ids) - 1].gather(-1, targets[:, None])[:, 0]
        found.append(each[torch.tensor(mask[1:])])
    return torch.cat(found)


def drawn_routes(length: int, routers: int, seed: int) -> NDArray[np.int8]:
    """Other experts than the router's for most tokens, [length, routers, k]."""
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(EXPERTS)[:CHOSEN] for _ in range(length * routers)]
    return np.array(rows, np.int8).reshape(length, routers, CHOSEN)

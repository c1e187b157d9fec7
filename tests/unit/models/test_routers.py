"""Routers take the experts they are given, with weights and gradients of their own scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from rlplace.models.causal_lm import CausalLm, LmSpec, build
from rlplace.models.packed import Packed
from rlplace.models.routers import FREE, Routers, load_metrics, route_dtype
from rlplace.workers.training.ranks import Ranks
from tests.tiny_experts import (
    CHOSEN,
    EXPERTS,
    FAMILIES,
    LAYERS,
    drawn_routes,
    gates,
    padded_logprobs,
    tiny_experts,
)
from tests.tiny_lm import tiny_model

# Two with a prompt of 7 tokens in common, and one of two conversations
_RNG = np.random.default_rng(3)
_PROMPT = _RNG.integers(3, 320, 7)
SEQUENCES = [
    np.concatenate((_PROMPT, _RNG.integers(3, 320, 6))),
    np.concatenate((_PROMPT, _RNG.integers(3, 320, 9))),
    _RNG.integers(3, 320, 11),
]
MASKS = [
    np.arange(len(s)) >= first for s, first in zip(SEQUENCES, (7, 8, 2), strict=True)
]
ALIKE = [(0, 7), (0, 7), (1, 0)]


def routes_of(routers: int) -> list[NDArray[Any]]:
    """Equal for the common prompt; the last token of the third is nobody's."""
    prompt = drawn_routes(7, routers, 1)
    found = [
        np.concatenate((prompt, drawn_routes(6, routers, 2))),
        np.concatenate((prompt, drawn_routes(9, routers, 3))),
        drawn_routes(11, routers, 4),
    ]
    found[2][-1] = FREE
    return found


def packed(routes: list[NDArray[Any]] | None) -> Packed:
    return Packed.of(SEQUENCES, MASKS, alike=ALIKE, routes=routes or ())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_replayed_pass_is_a_padded_loop_with_forced_experts(
    family: str, checkpointing: bool, ranks: Ranks, tmp_path: Path
) -> None:
    model = tiny_experts(tmp_path, family)
    routes = routes_of(LAYERS)
    expected = padded_logprobs(model, SEQUENCES, MASKS, routes)
    spec = LmSpec(folder=tmp_path, checkpointing=checkpointing)
    module = build(CausalLm, spec, ranks.mesh)
    found = module(packed(routes)).logprobs
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    # Random routes are far from the routers' own
    own = module(packed(None)).logprobs
    assert float((own - expected).detach().abs().max()) > 1e-3
    rate = torch.linspace(-1.0, 2.0, len(expected))
    (rate @ expected).backward()
    module.zero_grad()
    (rate @ module(packed(routes)).logprobs).backward()
    gradients = {n: p.grad for n, p in module.lm.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            gradients[name].full_tensor(),
            parameter.grad,
            atol=1e-5,
            rtol=1e-4,
            msg=name,
        )
    for gate in gates(model):
        assert float(gate.weight.grad.abs().max()) > 0


def test_only_layers_with_a_router_have_routes(ranks: Ranks, tmp_path: Path) -> None:
    model = tiny_experts(tmp_path, "qwen3_moe", mlp_only_layers=[1])
    module = build(CausalLm, LmSpec(folder=tmp_path), ranks.mesh)
    assert len(module.routers) == LAYERS - 1
    routes = routes_of(LAYERS - 1)
    expected = padded_logprobs(model, SEQUENCES, MASKS, routes)
    found = module(packed(routes)).logprobs
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_what_was_recorded_and_replayed_changes_no_bit(
    ranks: Ranks, tmp_path: Path
) -> None:
    tiny_experts(tmp_path, "qwen3_moe")
    module = build(CausalLm, LmSpec(folder=tmp_path), ranks.mesh)
    with module.routers.recorded() as chosen:
        own = module(packed(None)).logprobs
    assert [tuple(each.shape) for each in chosen] == [(33, CHOSEN)] * LAYERS
    whole = torch.stack(chosen, 1).to(route_dtype(EXPERTS)).numpy()
    first, second, third, fourth = np.split(whole, np.cumsum([7, 6, 9]))
    routes = [
        np.concatenate((first, second)),
        np.concatenate((first, third)),
        fourth,
    ]
    assert torch.equal(module(packed(routes)).logprobs, own)


def test_a_dense_model_has_no_routers(ranks: Ranks, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "qwen3")
    module = build(CausalLm, LmSpec(folder=folder), ranks.mesh)
    assert len(module.routers) == 0
    module.routers.counts = True
    module(packed(None))
    assert module.routers.balance() is None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", [True, False])
def test_the_auxiliary_loss_is_that_of_transformers(
    family: str, checkpointing: bool, ranks: Ranks, tmp_path: Path
) -> None:
    model = tiny_experts(tmp_path, family)
    spec = LmSpec(folder=tmp_path, checkpointing=checkpointing)
    module = build(CausalLm, spec, ranks.mesh)
    module.routers.balances = True
    (alone,) = SEQUENCES[2:]
    scores = module(Packed.of([alone], [MASKS[2]]))
    balance = module.routers.balance()
    assert balance is not None
    assert balance.loss is not None
    assert module.routers.balance() is None
    output = model(
        input_ids=torch.tensor(alone)[None], output_router_logits=True, use_cache=False
    )
    expected = load_balancing_loss_func(output.router_logits, EXPERTS, CHOSEN)
    torch.testing.assert_close(balance.loss, expected, atol=1e-5, rtol=0)
    assert balance.counts.sum(-1).tolist() == [len(alone) * CHOSEN] * LAYERS
    # With the log-probabilities in one loss, as in learning
    (balance.loss + 0.0 * scores.logprobs.sum()).backward()
    expected.backward()
    gradients = {n: p.grad for n, p in module.lm.named_parameters()}
    for name, parameter in model.named_parameters():
        wanted = parameter.grad
        if wanted is None:
            wanted = torch.zeros_like(parameter)
        torch.testing.assert_close(
            gradients[name].full_tensor(), wanted, atol=1e-5, rtol=1e-4, msg=name
        )


def test_fillers_count_for_no_expert(tmp_path: Path) -> None:
    model = tiny_experts(tmp_path, "olmoe")
    routers = Routers(model.base_model)
    routers.counts = True
    with routers.counted(4), torch.no_grad():
        model(input_ids=torch.tensor(SEQUENCES[2])[None], use_cache=False)
    balance = routers.balance()
    assert balance is not None
    assert balance.loss is None
    assert balance.counts.sum(-1).tolist() == [4 * CHOSEN] * LAYERS


def test_metrics_of_load() -> None:
    counts = torch.tensor([[4, 0, 0, 0], [1, 1, 1, 1]])
    assert load_metrics(counts) == {"expert_load_max": 2.5, "experts_unused": 3 / 8}


def test_routes_are_as_small_as_the_number_of_experts_allows() -> None:
    assert route_dtype(128) == torch.int8
    assert route_dtype(129) == torch.int16


def test_padding_has_no_routes() -> None:
    whole = Packed.of(SEQUENCES[2:], MASKS[2:], routes=[drawn_routes(11, 2, 4)])
    padded = whole.padded(4)
    assert padded.routes is not None
    assert padded.routes.shape == (12, 2, CHOSEN)
    assert (padded.routes[-1] == FREE).all()

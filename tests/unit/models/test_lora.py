"""Factors: what they train, what they start from, how they are merged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rlplace.config.blocks.training import TrainedConfig
from rlplace.errors import ConfigError
from rlplace.models.causal_lm import CausalLm, LmSpec, build
from rlplace.models.lora import (
    Factors,
    LoraSpec,
    checkpoint_name,
    factors_of,
    first_values,
    is_factor,
    take_factors,
)
from rlplace.models.packed import Packed
from rlplace.workers.training.ranks import Ranks
from tests.tiny_lm import Kind, tiny_model

SPEC = LoraSpec(rank=4, alpha=8.0)
BASE = "model.layers.0.self_attn.q_proj"


def scores(module: CausalLm) -> torch.Tensor:
    tokens = np.arange(5, 25)
    return module(Packed.of([tokens], [np.arange(len(tokens)) > 0])).logprobs


def test_factors_travel_as_peft_stores_them_and_are_found_again() -> None:
    a, b, other = torch.randn(4, 6), torch.randn(5, 4), torch.randn(3)
    stored = [checkpoint_name(f"{BASE}.lora_{which}.default.weight") for which in "AB"]
    assert stored == [f"{BASE}.lora_A.weight", f"{BASE}.lora_B.weight"]
    sent = {stored[0]: a, "model.norm.weight": other, stored[1]: b}
    weights, factors = take_factors(sent, SPEC.scale)
    assert weights == {"model.norm.weight": other}
    assert factors.keys() == {f"{BASE}.weight"}
    weight = torch.randn(5, 6)
    found = factors[f"{BASE}.weight"].added_to(weight, torch.device("cpu"))
    torch.testing.assert_close(found, weight + 2.0 * b @ a)
    assert found.data_ptr() != weight.data_ptr()
    assert (
        factors[f"{BASE}.weight"].added_to(weight.bfloat16(), torch.device("cpu")).dtype
        == torch.bfloat16
    )


def test_only_factors_are_trained_and_they_change_nothing_at_first(
    folder: Path, ranks: Ranks
) -> None:
    plain = build(CausalLm, LmSpec(folder=folder), ranks.mesh)
    module = build(CausalLm, LmSpec(folder=folder, lora=SPEC), ranks.mesh)
    trained = {name for name, p in module.named_tensors() if p.requires_grad}
    assert trained == {name for name, _ in module.named_tensors() if is_factor(name)}
    assert len(trained) == 2 * 2 * 7  # A and B, two blocks, seven linear layers
    assert torch.equal(scores(module), scores(plain))
    scores(module).sum().backward()
    moved = {
        name
        for name, p in module.named_tensors()
        if p.grad is not None and p.grad.full_tensor().any()
    }
    assert moved == {
        name for name in trained if ".lora_B." in name
    }  # A moves once B is not zero


def test_targets_are_chosen_by_name(folder: Path, ranks: Ranks) -> None:
    spec = LoraSpec(rank=2, alpha=2.0, targets=("q_proj", "v_proj"))
    module = build(CausalLm, LmSpec(folder=folder, lora=spec), ranks.mesh)
    assert {
        name.split(".")[-4] for name, _ in module.named_tensors() if is_factor(name)
    } == {"q_proj", "v_proj"}


def test_an_unknown_target_is_refused(qwen: Path, ranks: Ranks) -> None:
    with pytest.raises(ConfigError, match=r"lora_targets: \[q_proj\]") as caught:
        build(
            CausalLm,
            LmSpec(folder=qwen, lora=LoraSpec(rank=2, alpha=2.0, targets=("q_prj",))),
            ranks.mesh,
        )
    assert caught.value.codes == ("lora-target-unknown",)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_the_head_gets_no_factors(
    kind: Kind, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A head of its own, and one that is tied: learning ended with an error of autograd."""
    folder = tiny_model(tmp_path_factory.mktemp(kind), kind)
    lora = LoraSpec(rank=2, alpha=2.0, targets=("q_proj", "lm_head"))
    with pytest.raises(ConfigError, match="the head that makes scores") as caught:
        build(CausalLm, LmSpec(folder=folder, lora=lora), ranks.mesh)
    assert caught.value.codes == ("lora-target-unknown",)


@torch.no_grad()
def test_merged_weights_compute_what_factors_compute(qwen: Path, ranks: Ranks) -> None:
    module = build(CausalLm, LmSpec(folder=qwen, lora=SPEC), ranks.mesh)
    named = dict(module.named_tensors())
    generator = torch.Generator().manual_seed(1)
    for name, parameter in named.items():
        if is_factor(name):
            local = parameter.to_local()
            local.copy_(0.05 * torch.randn(local.shape, generator=generator))
    with_factors = scores(module)
    for name, parameter in named.items():
        if (factors := factors_of(name)) is not None:
            a, b = (named[of].to_local() for of in factors)
            parameter.to_local().copy_(
                Factors(a=a, b=b, scale=SPEC.scale).added_to(
                    parameter.to_local(), a.device
                )
            )
            b.zero_()
    torch.testing.assert_close(scores(module), with_factors, atol=1e-5, rtol=0)


def test_first_values_follow_from_seed_and_name() -> None:
    a = first_values(f"{BASE}.lora_A.default.weight", (4, 64), seed=1)
    assert torch.equal(
        a, first_values(f"{BASE}.lora_A.default.weight", (4, 64), seed=1)
    )
    assert not torch.equal(
        a, first_values(f"{BASE}.lora_A.default.weight", (4, 64), seed=2)
    )
    assert not torch.equal(
        a,
        first_values(
            "model.layers.1.self_attn.q_proj.lora_A.default.weight", (4, 64), seed=1
        ),
    )
    assert a.abs().max() <= 64**-0.5
    assert not first_values(f"{BASE}.lora_B.default.weight", (64, 4), seed=1).any()


def test_what_is_frozen_is_kept_as_it_is_computed(folder: Path, ranks: Ranks) -> None:
    """Half the memory, and not another number: a pass would round it anyway."""
    plain = build(CausalLm, LmSpec(folder=folder, compute="bf16"), ranks.mesh)
    module = build(
        CausalLm, LmSpec(folder=folder, compute="bf16", lora=SPEC), ranks.mesh
    )
    assert {p.dtype for _, p in module.named_tensors() if not p.requires_grad} == {
        torch.bfloat16
    }
    assert {p.dtype for _, p in module.named_tensors() if p.requires_grad} == {
        torch.float32
    }
    assert torch.equal(scores(module), scores(plain))
    scores(module).sum().backward()
    assert {p.grad.dtype for _, p in module.named_tensors() if p.grad is not None} == {
        torch.float32
    }


def test_factors_beside_frozen_bf16_weights_are_float32(
    folder: Path, ranks: Ranks
) -> None:
    """As the ledger counts them: Adam's steps on 16 bits would be lost in rounding."""
    asked = TrainedConfig(weights="bf16", compute="bf16", lora_rank=4)
    spec = LmSpec.of(asked, "actor", 0, job_folder=folder, own_folder=None)
    module = build(CausalLm, spec, ranks.mesh)
    found = {
        is_factor(name): parameter.dtype for name, parameter in module.named_tensors()
    }
    assert found == {True: torch.float32, False: torch.bfloat16}
    assert asked.trained_dtype == "fp32"

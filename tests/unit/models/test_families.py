"""Every family that a plan lets a run train learns, and answers, as transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlplace.config.blocks.language_model import TextRolloutConfig
from rlplace.models.causal_lm import CausalLm, LmSpec, build
from rlplace.models.families import TRAINED, why_not_trained
from rlplace.models.packed import Packed
from rlplace.placement.language.spec import Parallel
from rlplace.placement.schedule import Residency
from rlplace.workers.engines.contract import EngineSettings
from rlplace.workers.engines.transformers import TransformersEngine
from rlplace.workers.training.ranks import Ranks
from rlplace.workers.training.trained_model import TrainedLm
from rlplace.workers.worker import Rendezvous
from tests.rollout_stage import Ledger
from tests.tiny_lm import request_of
from tests.worker_ranks import context_of, in_processes

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "sliding_window": 6,  # shorter than a sequence
    "use_sliding_window": True,
    "layer_types": ["sliding_attention", "full_attention"],
    "logits_scaling": 3.0,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
}


def tiny(family: str, folder: Path, **keys: Any) -> PreTrainedModel:
    """Every weight is drawn, those of norms and biases too."""
    known = AutoConfig.for_model(family).to_dict()
    config = AutoConfig.for_model(
        family,
        **{name: value for name, value in (SMALL | keys).items() if name in known},
    )
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model.eval()


def logprobs_of(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Of each token after the first."""
    scores = torch.log_softmax(
        model(input_ids=tokens[None], use_cache=False).logits[0, :-1], dim=-1
    )
    return scores.gather(1, tokens[1:, None])[:, 0]


_FIRST, _OTHER, _LAST = (
    np.random.default_rng(length).integers(3, 320, length) for length in (20, 5, 9)
)
SEQUENCES, SCORED_FROM = (
    (_FIRST, np.concatenate((_FIRST[:12], _OTHER)), _LAST),
    (12, 14, 1),
)


def packed() -> Packed:
    """Three sequences, of which two have a prompt of 12 tokens in common, that stands once."""
    masks = [
        np.arange(len(tokens)) >= first
        for tokens, first in zip(SEQUENCES, SCORED_FROM, strict=True)
    ]
    found = Packed.of(SEQUENCES, masks, alike=[(0, 12), (0, 12), (1, 0)])
    assert (found.lengths, found.after) == ((12, 8, 5, 9), (None, 0, 0, None))
    return found


def expected_of(model: PreTrainedModel) -> torch.Tensor:
    """Of each sequence by itself."""
    pairs = zip(SEQUENCES, SCORED_FROM, strict=True)
    return torch.cat(
        [
            logprobs_of(model, torch.tensor(tokens))[first - 1 :]
            for tokens, first in pairs
        ]
    )


@pytest.mark.parametrize("family", sorted(TRAINED))
def test_a_step_is_that_of_transformers(
    family: str, ranks: Ranks, tmp_path: Path
) -> None:
    model = tiny(family, tmp_path)
    expected = expected_of(model)
    module = build(CausalLm, LmSpec(folder=tmp_path), ranks.mesh)
    found = module(packed()).logprobs
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    rate = torch.linspace(-1.0, 2.0, len(expected))
    steps = []
    for trained, loss in ((model, rate @ expected), (module.lm, rate @ found)):
        loss.backward()
        torch.optim.SGD(trained.parameters(), lr=0.01).step()
        steps.append(
            {
                n: p.full_tensor() if hasattr(p, "full_tensor") else p
                for n, p in trained.named_parameters()
            }
        )
    assert steps[0].keys() == steps[1].keys()
    for name, weight in steps[1].items():
        torch.testing.assert_close(
            weight, steps[0][name], atol=1e-5, rtol=1e-4, msg=name
        )


@pytest.mark.parametrize("family", sorted(TRAINED))
def test_no_random_numbers_are_drawn_in_training(
    family: str, ranks: Ranks, tmp_path: Path
) -> None:
    """Dropout of any name and noise of a router: the engine has none, and the policy ratio would be random."""
    noise = {
        name: 0.5
        for name, value in AutoConfig.for_model(family).to_dict().items()
        if isinstance(value, float)
        and any(word in name for word in ("dropout", "pdrop", "jitter"))
    }
    expected = expected_of(tiny(family, tmp_path, **noise))
    module = build(CausalLm, LmSpec(folder=tmp_path), ranks.mesh)
    assert module.training
    torch.testing.assert_close(module(packed()).logprobs, expected, atol=1e-5, rtol=0)


def _with_half_the_tokens(
    folder: Path, rank: int, rendezvous: Rendezvous, _: Path
) -> dict[str, dict[str, np.ndarray]]:
    """By family, log-probabilities and gradients."""
    ranks = Ranks(
        context_of("actor", rank, 2, rendezvous, {}),
        60.0,
        Parallel(context_parallel_size=2),
    )
    found = {}
    for family in sorted(TRAINED):
        lm = TrainedLm(LmSpec(folder=folder / family), ranks)
        logprobs = lm.module(packed()).logprobs
        (torch.linspace(-1.0, 2.0, len(logprobs)) @ logprobs).backward()
        gradients = {
            name: parameter.grad.full_tensor()
            for name, parameter in lm.module.lm.named_parameters()
        }
        found[family] = {"logprobs": logprobs.detach().numpy()} | {
            n: g.numpy() for n, g in gradients.items()
        }
    ranks.close()
    return found


@pytest.mark.slow
def test_ranks_with_half_the_tokens_each_say_what_transformers_says(
    tmp_path: Path,
) -> None:
    models = {family: tiny(family, tmp_path / family) for family in TRAINED}
    for rank in in_processes(_with_half_the_tokens, tmp_path, 2):
        for family, model in models.items():
            model.zero_grad()
            expected = expected_of(model)
            (torch.linspace(-1.0, 2.0, len(expected)) @ expected).backward()
            np.testing.assert_allclose(
                rank[family].pop("logprobs"),
                expected.detach(),
                atol=1e-5,
                err_msg=family,
            )
            assert rank[family].keys() == dict(model.named_parameters()).keys()
            for name, parameter in model.named_parameters():
                gradient = rank[family][name]
                np.testing.assert_allclose(
                    gradient,
                    parameter.grad,
                    atol=1e-4,
                    rtol=1e-3,
                    err_msg=f"{family} {name}",
                )


@pytest.mark.parametrize("family", sorted(TRAINED))
def test_an_answer_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    model = tiny(family, tmp_path, sliding_window=64)
    rollout = TextRolloutConfig(dtype="fp32", kv_cache_memory=1 << 20, temperature=0.0)
    engine = TransformersEngine(
        EngineSettings(rollout=rollout, model=tmp_path, context=32),
        device=Ledger(),
        owner="rollout rank 0",
    )
    engine.move(Residency.WEIGHTS)
    engine.load(dict(model.named_parameters(remove_duplicate=False)), 0)
    engine.move(Residency.FULL)
    request = request_of(samples=2, longest=8)
    engine.submit(request)
    answers = []
    while engine.in_flight:
        answers += engine.step()
    for answer in answers:
        whole = torch.from_numpy(np.concatenate([request.tokens, answer.tokens])).long()
        expected = logprobs_of(model, whole)[-len(answer.tokens) :]
        torch.testing.assert_close(
            torch.from_numpy(answer.logprobs), expected.detach(), atol=1e-5, rtol=0
        )


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("gemma2", {}),
        ("nanochat", {}),
        ("deepseek_v3", {"n_routed_experts": 4}),
        ("gpt2", {}),
        ("lfm2", {}),
    ],
)
def test_what_cannot_be_trained_is_known(family: str, keys: dict[str, int]) -> None:
    saved = AutoConfig.for_model(family, **keys).to_dict()
    assert why_not_trained(saved, 32) is not None

"""A packed, split GRPO step makes the update that a plain padded one makes."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from rlplace.algo.engine_mismatch import importance_weights
from rlplace.algo.group_advantages import Outcomes, grpo
from rlplace.algo.losses import MEANS, Clip, Totals, lm_terms, token_weights
from rlplace.algo.packing import pack
from rlplace.tokens import Sample
from tests.reference_grpo import grpo_step
from tests.unit.algo.samples import sample

TEMPERATURE = 0.7
SAMPLES = [
    sample(group=number // 3, number=number % 3, prompt=1 + number // 3, learned=1 + number % 4, reward=number % 3 / 2)
    for number in range(9)
]


class Counting(nn.Module):
    """A causal language model: logits [*, L, V] from the running mean of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> SimpleNamespace:
        steps = torch.arange(1, input_ids.shape[-1] + 1)[:, None]
        return SimpleNamespace(logits=self.head(self.embed(input_ids).cumsum(-2) / steps))


def learned_logprobs(model: Counting, one: Sample) -> Tensor:
    tokens = torch.from_numpy(one.tokens).long()
    logits = model(tokens).logits[:-1] / TEMPERATURE
    return torch.log_softmax(logits, -1).gather(-1, tokens[1:, None])[:, 0][torch.from_numpy(one.mask[1:])]


def packed_step(model: Counting, optimizer: torch.optim.Optimizer, mean: str, tis_cap: float | None) -> float:
    """What ranks would do one after the other, gradients summed."""
    worth = grpo(Outcomes.of([SAMPLES[start : start + 3] for start in (0, 3, 6)])).float()
    totals = Totals(samples=len(SAMPLES), tokens=sum(s.response_tokens for s in SAMPLES), longest=4)
    packing = pack([len(s.tokens) for s in SAMPLES], ranks=2, token_budget=12)
    assert packing.micro_batches > 1
    total = 0.0
    for micro_batch in (m for rank in packing.ranks for m in rank):
        chosen = [SAMPLES[i] for i in micro_batch]
        lengths = torch.tensor([s.response_tokens for s in chosen])
        logprobs = torch.cat([learned_logprobs(model, s) for s in chosen])
        engine = torch.cat([torch.from_numpy(s.logprobs[s.mask]) for s in chosen])
        terms = lm_terms(
            logprobs=logprobs,
            entropies=torch.zeros_like(logprobs),
            old_logprobs=engine if tis_cap is None else logprobs.detach(),
            advantages=worth[list(micro_batch)].repeat_interleave(lengths),
            lengths=lengths,
            clip=Clip(low=0.2, high=0.28),
            importance=None if tis_cap is None else importance_weights(logprobs, engine, tis_cap),
        )
        loss = terms.loss(token_weights(MEANS[mean], lengths, totals))
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    return total


@pytest.mark.parametrize("mean", ["token", "sequence"])
@pytest.mark.parametrize("tis_cap", [None, 0.5])
def test_packed_step_is_the_plain_one(mean: str, tis_cap: float | None) -> None:
    torch.manual_seed(0)
    plain = Counting()
    packed = copy.deepcopy(plain)
    before = plain.head.weight.detach().clone()
    expected, norm = grpo_step(
        plain,
        torch.optim.AdamW(plain.parameters(), lr=1e-2),
        SAMPLES,
        clip_high=0.28,
        loss=mean,
        temperature=TEMPERATURE,
        tis_cap=tis_cap,
        max_grad_norm=0.05,
    )
    found = packed_step(packed, torch.optim.AdamW(packed.parameters(), lr=1e-2), mean, tis_cap)
    assert norm > 0.05  # the gradient is clipped, so its norm counts
    assert found == pytest.approx(expected, rel=1e-5)
    assert not torch.allclose(plain.head.weight, before, atol=1e-3)
    for mine, theirs in zip(packed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)

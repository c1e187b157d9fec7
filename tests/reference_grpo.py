"""GRPO as one would write it in an afternoon: one process, one padded batch, plain loops; what the actor is held to.

It shares no code with `rlplace.algo`. Letters: B samples, L tokens of the longest.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from rlplace.tokens import Sample


def grpo_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    samples: Sequence[Sample],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    loss: str = "token",
    temperature: float = 1.0,
    tis_cap: float | None = None,
    max_grad_norm: float = 1.0,
) -> tuple[float, float]:
    """One optimizer step on all `samples`; the loss, and the norm of the gradient before clipping.

    The old policy is the engine's as recorded; with `tis_cap`, it is `model` before the step, and the engine's
    log-probabilities go into the correction.
    """
    mask, engine, advantages = targets(samples)
    logprobs = token_logprobs(model, samples, temperature)
    old = engine if tis_cap is None else logprobs.detach()
    correction = 1.0 if tis_cap is None else torch.exp(old - engine).clamp(max=tis_cap)
    ratio = torch.exp((logprobs - old) * mask)
    unclipped = ratio * advantages[:, None]
    clipped = torch.clamp(ratio, 1 - clip_low, 1 + clip_high) * advantages[:, None]
    objective = torch.minimum(unclipped, clipped) * correction * mask
    total = objective.sum() / mask.sum() if loss == "token" else (objective.sum(1) / mask.sum(1)).mean()
    optimizer.zero_grad()
    (-total).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    return -total.item(), norm.item()


def token_logprobs(model: torch.nn.Module, samples: Sequence[Sample], temperature: float = 1.0) -> Tensor:
    """[B, L - 1] of each token but the first, given those before it; padding included."""
    ids = padded([s.tokens for s in samples]).long()
    attended = padded([torch.ones(len(s.tokens)) for s in samples]).long()
    logits = model(input_ids=ids, attention_mask=attended).logits[:, :-1] / temperature
    return torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]


def targets(samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """Mask and the engine's log-probabilities [B, L - 1], and GRPO's advantages [B]."""
    groups: dict[int, list[float]] = {}
    for s in samples:
        groups.setdefault(s.group, []).append(s.reward)
    advantages = []
    for s in samples:
        rewards = groups[s.group]
        deviation = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
        advantages.append((s.reward - statistics.mean(rewards)) / (deviation + 1e-6))
    mask = padded([s.mask for s in samples])[:, 1:].float()
    return mask, padded([s.logprobs for s in samples])[:, 1:], torch.tensor(advantages)


def padded(rows: Sequence[object]) -> Tensor:
    """[B, L], zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence([torch.as_tensor(row) for row in rows], batch_first=True)

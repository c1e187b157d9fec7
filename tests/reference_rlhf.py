"""GRPO, PPO with a critic and a reference as one would write them in an afternoon: padded batches, plain loops.

What actor and critic are compared with. It shares no code with `rlplace.algo`. Letters: B samples, L tokens of the
longest.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlplace.tokens import Sample


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    kl_coef: float = 0.1
    kl_in: str = "reward"
    kl_estimator: str = "k1"
    gamma: float = 1.0
    gae_lambda: float = 0.95
    clip_low: float = 0.2
    clip_high: float = 0.2
    value_clip: float | None = 0.2
    reward_clip: float | None = None
    max_grad_norm: float = 0.5


ESTIMATES = {
    "k1": lambda x: x,
    "k2": lambda x: x**2 / 2,
    "k3": lambda x: torch.exp(-x) - 1 + x,
}


def adamw(
    parameters: Sequence[Tensor], rules: dict[str, float]
) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters, lr=rules["lr"], eps=rules["eps"], weight_decay=0.0
    )


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Weights by name, as near as two orders of sums are."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name].float(),
            tensor.detach(),
            atol=2e-5,
            rtol=5e-4,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """Of transformers: causal models, and for the critic sequence classification with one label."""

    actor: torch.nn.Module
    critic: torch.nn.Module
    reference: torch.nn.Module
    actor_optimizer: torch.optim.Optimizer
    critic_optimizer: torch.optim.Optimizer


def rlhf_step(
    models: Models, samples: Sequence[Sample], rewards: Sequence[float], rules: Rules
) -> dict[str, float]:
    """One optimizer step of actor and critic on all `samples`; `rewards` by sample, all of them counted."""
    mask = responses_of(samples)
    with torch.no_grad():
        old = token_logprobs(models.actor, samples)
        frozen = token_logprobs(models.reference, samples)
        before = critic_values(models.critic, samples)
    kl = ESTIMATES[rules.kl_estimator](old - frozen) * mask
    advantages, returns = estimates(mask, before, kl, rewards, rules)

    value_loss = clipped_value_loss(
        critic_values(models.critic, samples), before, returns, mask, rules
    )
    step(models.critic_optimizer, value_loss, rules)

    logprobs = token_logprobs(models.actor, samples)
    policy_loss = clipped_policy_loss(logprobs, old, advantages, mask, rules)
    if rules.kl_in == "loss":
        apart = ESTIMATES[rules.kl_estimator](logprobs - frozen) * mask
        policy_loss = policy_loss + rules.kl_coef * apart.sum() / mask.sum()
    step(models.actor_optimizer, policy_loss, rules)
    return {
        "actor/loss": policy_loss.item(),
        "critic/value_loss": value_loss.item(),
        "actor/kl_reference": kl.sum().item() / len(samples),
    }


def grpo_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    samples: Sequence[Sample],
    rules: Rules,
    *,
    loss: str = "token",
    temperature: float = 1.0,
    tis_cap: float | None = None,
    tis_level: str = "token",
    tis_above: str = "cap",
    tis_floor: float = 0.0,
    surrogate: str = "clip",
) -> tuple[float, float]:
    """One optimizer step on all `samples`; the loss, and the norm of the gradient before clipping.

    The old policy is the engine's as recorded; with `tis_cap`, it is `model` before the step, and the engine's
    log-probabilities go into the correction.
    """
    mask, engine, advantages = targets(samples)
    logprobs = token_logprobs(model, samples, temperature)
    old = engine if tis_cap is None else logprobs.detach()
    correction = torch.ones_like(mask)
    if tis_cap is not None:
        apart = (old - engine) * mask
        correction = torch.exp(
            apart.sum(1, keepdim=True).expand_as(apart)
            if tis_level == "sequence"
            else apart
        )
        kept = (correction >= tis_floor) & (
            (correction <= tis_cap) | (tis_above == "cap")
        )
        correction = correction.clamp(max=tis_cap) * kept
    if surrogate == "cispo":
        weight = (
            torch.exp(logprobs - old)
            .detach()
            .clamp(1 - rules.clip_low, 1 + rules.clip_high)
        )
        objective = weight * advantages[:, None] * logprobs * correction * mask
    else:
        objective = (
            clipped(logprobs, old, advantages[:, None], mask, rules) * correction * mask
        )
    total = (
        objective.sum() / mask.sum()
        if loss == "token"
        else (objective.sum(1) / mask.sum(1)).mean()
    )
    return -total.item(), step(optimizer, -total, rules)


def responses_of(samples: Sequence[Sample]) -> Tensor:
    """[B, L - 1], 1 at response tokens."""
    return padded([s.mask for s in samples])[:, 1:].float()


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
    return (
        responses_of(samples),
        padded([s.logprobs for s in samples])[:, 1:],
        torch.tensor(advantages),
    )


def estimates(
    mask: Tensor, values: Tensor, kl: Tensor, rewards: Sequence[float], rules: Rules
) -> tuple[Tensor, Tensor]:
    """Advantages, whitened, and returns [B, L - 1], zero beside response tokens."""
    limit = rules.reward_clip
    scores = [
        reward if limit is None else max(-limit, min(limit, reward))
        for reward in rewards
    ]
    advantages, returns = torch.zeros_like(mask), torch.zeros_like(mask)
    for row, score in enumerate(scores):
        places = [i for i, response in enumerate(mask[row].tolist()) if response]
        following, ahead = 0.0, 0.0
        for place in reversed(places):
            reward = score if place == places[-1] else 0.0
            if rules.kl_in == "reward":
                reward -= rules.kl_coef * float(kl[row, place])
            value = float(values[row, place])
            delta = reward + rules.gamma * ahead - value
            following = delta + rules.gamma * rules.gae_lambda * following
            advantages[row, place], returns[row, place] = following, following + value
            ahead = value
    found = advantages[mask.bool()].tolist()
    mean, deviation = statistics.fmean(found), statistics.pstdev(found)
    return (advantages - mean) / (deviation + 1e-6) * mask, returns


def clipped_value_loss(
    values: Tensor, before: Tensor, returns: Tensor, mask: Tensor, rules: Rules
) -> Tensor:
    worse = (values - returns) ** 2
    if rules.value_clip is not None:
        near = before + (values - before).clamp(-rules.value_clip, rules.value_clip)
        worse = torch.maximum(worse, (near - returns) ** 2)
    return (0.5 * worse * mask).sum() / mask.sum()


def clipped(
    logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, rules: Rules
) -> Tensor:
    ratio = torch.exp((logprobs - old) * mask)
    return torch.minimum(
        ratio * advantages,
        ratio.clamp(1 - rules.clip_low, 1 + rules.clip_high) * advantages,
    )


def clipped_policy_loss(
    logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, rules: Rules
) -> Tensor:
    return -(clipped(logprobs, old, advantages, mask, rules) * mask).sum() / mask.sum()


def token_logprobs(
    model: torch.nn.Module, samples: Sequence[Sample], temperature: float = 1.0
) -> Tensor:
    """[B, L - 1] of each token but the first, given those before it; padding included."""
    ids, attended = _inputs(samples)
    logits = model(input_ids=ids, attention_mask=attended).logits[:, :-1] / temperature
    return torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]


def state_values(
    trunk: torch.nn.Module, head: Tensor, samples: Sequence[Sample]
) -> Tensor:
    """[B, L - 1] of the states before each token but the first, by a head [1, size]; padding included."""
    ids, attended = _inputs(samples)
    values: Tensor = (
        trunk(input_ids=ids, attention_mask=attended).last_hidden_state @ head.t()
    )[:, :-1, 0]
    return values


def critic_values(critic: torch.nn.Module, samples: Sequence[Sample]) -> Tensor:
    return state_values(critic.model, critic.score.weight, samples)


def padded(rows: Sequence[object]) -> Tensor:
    """[B, L], zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence(
        [torch.as_tensor(row) for row in rows], batch_first=True
    )


def _inputs(samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    return padded([s.tokens for s in samples]).long(), padded(
        [torch.ones(len(s.tokens)) for s in samples]
    ).long()


def step(optimizer: torch.optim.Optimizer, loss: Tensor, rules: Rules) -> float:
    """The norm of the gradient before clipping."""
    optimizer.zero_grad()
    loss.backward()
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, rules.max_grad_norm)
    optimizer.step()
    return norm.item()

"""Metrics of an iteration of a language model: its optimizer updates and the samples that it learned from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlplace.metrics import UNREWARDED, Metric, Metrics
from rlplace.models.tokenizer import Tokenizer
from rlplace.tokens import Sample

if TYPE_CHECKING:  # the driver imports this module too; torch is imported only in setup
    from rlplace.workers.training.optimizer import Update

_SHOWN = 2000  # characters at each end of a long text


def update_metrics(
    component: str, updates: Sequence[Update], *, learn_s: float
) -> Metrics:
    """Return the metrics of an iteration's optimizer updates: means over optimizer steps, learning rate, and tokens per
    second.

    All ranks return equal values.

    `component`: first part of the metrics' names. `learn_s`: seconds that the updates took.
    """
    steps = sum(update.steps for update in updates)
    stepped = [update for update in updates if update.mean is not None]
    metrics = {
        f"{component}/tokens_per_s": Metric(
            sum(update.tokens for update in updates) / learn_s, "min"
        ),
        f"{component}/lr": Metric(stepped[-1].lr if stepped else 0.0),
        f"{component}/optimizer_steps": Metric(steps),
        f"{component}/rank_imbalance": Metric(
            max(update.imbalance for update in updates)
        ),
        **skipped_metric(component, updates),
    }
    for update in stepped:
        for name, value in (update.mean or {}).items():
            before = metrics.get(f"{component}/{name}", Metric(0.0))
            metrics[f"{component}/{name}"] = Metric(
                before.value + value * (update.steps / steps)
            )
    # Only the first update compares with the weights that the iteration began with.
    return {
        **metrics,
        **updates[0].metrics,
    }


def skipped_metric(component: str, updates: Sequence[Update]) -> Metrics:
    """Return the number of optimizer steps that were skipped because of non-finite numbers, as a metric.

    Return an empty mapping if no step was skipped. `component`: first part of the metric's name.
    """
    skipped = tuple(note for update in updates for note in update.skipped)
    if skipped:
        return {f"{component}/skipped_steps": Metric(len(skipped), notes=skipped)}
    return {}


def as_text(
    groups: Sequence[Sequence[Sample]], most: int, tokenizer: Tokenizer
) -> Iterator[str]:
    """Yield up to `most` samples as JSON texts for people to read, spread evenly from the lowest to the highest reward.

    Each text has the prompt, the answer and numbers of the sample. The answer includes the environment's replies and
    the special tokens. `tokenizer`: tokenizer of the policy.
    """
    samples = sorted(
        (s for group in groups for s in group),
        key=lambda s: (s.reward, s.group, s.sample),
    )
    for at in sorted(
        {
            *np.linspace(0, len(samples) - 1, min(most, len(samples)))
            .round()
            .astype(int)
            .tolist()
        }
    ):
        sample = samples[at]
        start = samples[at].prompt_tokens
        asked, answered = (
            _clipped(tokenizer.decode(tokens, special=True))
            for tokens in (sample.tokens[:start], sample.tokens[start:])
        )
        numbers = {
            "group": sample.group,
            "sample": sample.sample,
            "reward": sample.reward,
        }
        told = {
            "tokens": sample.response_tokens,
            "truncated": sample.truncated,
            "prompt": asked,
            "answer": answered,
        }
        yield json.dumps(numbers | told, ensure_ascii=False)


def _clipped(text: str) -> str:
    left = len(text) - 2 * _SHOWN
    if left <= 0:
        return text
    return f"{text[:_SHOWN]}\n[{left:,} characters left out]\n{text[-_SHOWN:]}"


def sample_metrics(
    groups: Sequence[Sequence[Sample]],
    version: int,
    texts: Sequence[str] = (),
    learned: Sequence[Sequence[Sample]] | None = None,
) -> Metrics:
    """Return the metrics of the groups that the policy of `version` is about to learn from; empty if there are no
    samples.

    `groups`: groups of this rank, or on one rank the groups of all ranks; the metrics of the run are equal in both
    cases. `texts`: some samples as text, attached to a metric as notes. `learned`: the groups without samples that the
    algorithm leaves out; None: it leaves out none.
    """
    from rlplace.algo.advantages import carries_signal

    samples = [sample for group in groups for sample in group]
    if not samples:
        return {}
    lengths = [s.weight for s in samples]
    responses = [s.response_tokens for s in samples]
    of_learned = groups if learned is None else learned
    tokens_learned = sum(s.response_tokens for group in of_learned for s in group)
    # Age of each token: versions between its sampling and this update; 0 is on-policy.
    ages = [version - s.versions[s.mask] for s in samples]
    rewards = [s.reward for s in samples]
    named = sorted({name for sample in samples for name in sample.rewards})
    return {
        "actor/groups": Metric(len(groups), "sum"),
        "actor/groups_with_signal": _mean(
            [carries_signal([s.reward for s in group]) for group in groups]
        ),
        "actor/reward": _mean(rewards),
        "actor/reward_min": Metric(min(rewards), "min"),
        "actor/reward_max": Metric(max(rewards), "max"),
        "actor/samples": Metric(len(samples), "sum", notes=tuple(texts)),
        **unrewarded_metric("actor", samples),
        **{
            f"actor/reward/{name}": _mean(
                [s.rewards[name] for s in samples if name in s.rewards]
            )
            for name in named
        },
        "actor/tokens": Metric(sum(lengths), "sum"),
        "actor/tokens_learned": Metric(tokens_learned, "sum"),
        "actor/length": _mean(lengths),
        "actor/length_max": Metric(max(lengths), "max"),
        "actor/length_learned": _mean(responses),
        "actor/length_learned_max": Metric(max(responses), "max"),
        "actor/turns": _mean([s.turns for s in samples]),
        "actor/truncated_share": _mean([s.truncated for s in samples]),
        "actor/age": Metric(
            sum(int(a.sum()) for a in ages) / max(1, sum(responses)),
            weight=sum(responses),
        ),
        "actor/age_max": Metric(
            max((int(a.max()) for a in ages if len(a)), default=0), "max"
        ),
        "actor/age_mixed": _mean(
            [len(a) > 0 and int(a.min()) < int(a.max()) for a in ages]
        ),
    }


def unrewarded_metric(component: str, samples: Sequence[Sample]) -> Metrics:
    """Return the number of samples to which no reward applies, as a metric; an empty mapping if there are none.

    `component`: first part of the metric's name.
    """
    number = sum(not sample.rewards for sample in samples)
    if not number:
        return {}
    note = (
        f"{component}/{UNREWARDED}: no reward function applies to some answers, since each returns None for them; "
        "their reward counts as 0"
    )
    return {f"{component}/{UNREWARDED}": Metric(number, "sum", notes=(note,))}


def _mean(values: Sequence[float]) -> Metric:
    return Metric(sum(values) / len(values), weight=len(values))

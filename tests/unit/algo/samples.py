"""Samples for tests of advantages and metrics."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlplace.tokens import Sample


def sample(
    *,
    group: int = 0,
    number: int = 0,
    prompt: int = 3,
    response: int = 2,
    reward: float = 0.0,
    rewards: dict[str, float] | None = None,
    versions: Sequence[int] | None = None,
    truncated: bool = False,
    turns: int = 1,
    seed: int = 0,
) -> Sample:
    """A prompt and one answer of random tokens; `versions` are of the answer."""
    draw = np.random.default_rng([seed, group, number])
    answer = np.full(response, 0) if versions is None else np.asarray(versions)
    return Sample(
        group=group,
        sample=number,
        tokens=draw.integers(0, 11, prompt + response).astype(np.int32),
        mask=np.arange(prompt + response) >= prompt,
        logprobs=np.concatenate([np.zeros(prompt), -draw.random(response)]).astype(
            np.float32
        ),
        versions=np.concatenate([np.full(prompt, -1), answer]).astype(np.int32),
        reward=reward,
        rewards={} if rewards is None else rewards,
        turns=turns,
        truncated=truncated,
    )

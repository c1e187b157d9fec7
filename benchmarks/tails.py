"""What rounds that do not wait for their longest answers gain, by lengths that are drawn: no engine runs.

    python benchmarks/tails.py [--prompts 64] [--samples 8] [--spread 1.0]

Lengths are log-normal with the median 500 tokens, cut at 16,384; half of the variance is the prompt's, which it has
again when it is asked again. All answers are in flight from the start of a round, and each gets a token in every step.
*Steps* are what a round takes where a step takes as long for few answers as for many, *tokens* where in proportion.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from rlplace.workers.roles.tails import Tails

MEDIAN = 500
LONGEST = 16_384
CYCLES = 20


def measure(
    short_rounds: int, prompts: int, samples: int, spread: float
) -> tuple[float, float, float]:
    """Return steps and drawn tokens of an iteration, and the share of the drawn tokens that is learned."""
    tails = Tails(short_rounds, prompts, range(prompts))
    draw = np.random.default_rng(0)
    iterations = CYCLES * (short_rounds + 1)
    hard = np.random.default_rng(1).normal(
        size=(iterations + short_rounds) * prompts
    )  # by prompt
    steps = drawn = learned = 0
    for iteration in range(iterations):
        numbers = np.array([*tails.asked(iteration).values()])
        normal = np.sqrt(0.5) * (
            hard[numbers, None] + draw.normal(size=(len(numbers), samples))
        )
        lengths = np.minimum(MEDIAN * np.exp(spread * normal), LONGEST).astype(int)
        order = np.argsort(lengths.max(1))[
            :prompts
        ]  # of those that are whole when the round ends
        end = int(lengths[order].max())
        late = np.setdiff1d(np.arange(len(numbers)), order)
        tails.leave(iteration, numbers[late].tolist())
        steps += end
        drawn += int(np.minimum(lengths, end).sum())
        learned += int(lengths[order].sum())
    return steps / iterations, drawn / iterations, learned / drawn


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--spread", type=float, default=1.0)
    asked = parser.parse_args()
    whole = measure(0, asked.prompts, asked.samples, asked.spread)
    print(
        f"{'short_rounds':>12} {'steps':>8} {'ratio':>6} {'tokens':>9} {'ratio':>6} {'learned':>8}"
    )
    for short_rounds in (0, 1, 2, 4, 8, 16):
        steps, tokens, kept = measure(
            short_rounds, asked.prompts, asked.samples, asked.spread
        )
        by = f"{steps:8,.0f} {steps / whole[0]:6.2f} {tokens:9,.0f} {tokens / whole[1]:6.2f} {kept:8.0%}"
        print(f"{short_rounds:>12} {by}")


if __name__ == "__main__":
    main()

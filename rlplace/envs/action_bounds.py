"""Compares the bounds of continuous actions with the actions that an untrained policy tries.

Such a policy draws each element around 0, with the standard deviation exp(`initial_log_std`), 1 by default. The
simulator clips what is drawn to its bounds: of bounds of -2000 and 2000 it would see the middle alone, and of 100 and
200 the lower bound alone.
"""

from __future__ import annotations

import math

from rlplace.codes import problem
from rlplace.envs.contract import Actions, ContinuousActions

# Wider bounds are none: some simulators write the largest float32 for infinity
WIDEST = 1e30
# Half of a range, in standard deviations: the least and the most that is not remarked
_LEAST = 0.1
_MOST = 10.0


def action_remark(simulator: str, taken: Actions, log_std: float) -> str | None:
    """Return a text that says which bounds of actions do not suit an untrained policy, and how to scale the actions.

    `simulator`: its name. `taken`: the actions that it takes. `log_std`: log of the standard deviation of the policy.
    None: all bounds suit the policy. A range that is wide, narrow or far from 0 does not.
    """
    if not isinstance(taken, ContinuousActions):
        return None
    deviation = math.exp(log_std)
    for low, high in zip(taken.low, taken.high, strict=True):
        # Only a range with two ends can be scaled
        if not -WIDEST < low < high < WIDEST:
            continue
        half = (high - low) / 2
        error = None
        if half > _MOST * deviation:
            error = "wide"
        elif half < _LEAST * deviation:
            error = "narrow"
        if low > deviation or high < -deviation:
            error = "shifted"
        if error is not None:
            found = problem(
                "action-range",
                "env.id",
                error=error,
                simulator=simulator,
                low=f"{low:g}",
                high=f"{high:g}",
                deviation=f"{deviation:g}",
                share=f"{100 * deviation / half:.2g}",
            )
            return found.remark()
    return None

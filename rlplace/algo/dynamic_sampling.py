"""Which groups of answers are worth learning from, and how many more prompts to ask until there are enough.

Yu et al. 2025 (DAPO, arXiv:2503.14476), section 3.2: groups that are all right or all wrong have no advantage, so they
are left out and replaced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def carries_signal(rewards: Sequence[float]) -> bool:
    """Whether the answers of one group were not all worth the same; a group of one never carries any."""
    return bool(rewards) and min(rewards) < max(rewards)


def groups_to_ask(wanted: int, kept: int, seen: int) -> int:
    """How many more prompts to ask now: 0 once `kept` of the `seen` groups suffice.

    As many as the share kept so far lets hope for, by the rule of succession, but `wanted` at once at most: while
    nothing has been kept, asking more would only make the wait longer.
    """
    missing = max(0, wanted - kept)
    return min(wanted, math.ceil(missing * (seen + 2) / (kept + 1)))

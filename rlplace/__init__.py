"""rlplace: declarative placement for reinforcement learning."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlplace.models.policy import Policy

__version__ = "0.1.0"


def load_policy(path: str | Path, *, seed: int = 0) -> Policy:
    """Load the simulator policy of a run, a checkpoint or an exported folder; `policy.act(observations)` decides.

    `seed`: of actions that are drawn, `deterministic=False`. Imports torch, and makes the simulator once to see its
    spaces. Raises ConfigError.
    """
    from rlplace.models.policy import load_policy as load

    return load(path, seed=seed)

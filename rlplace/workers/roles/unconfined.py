"""A metric for missing protections of a machine on which a reward function runs the code of answers."""

from __future__ import annotations

from collections.abc import Sequence

from rlplace.envs.text.code.runner import missing_layers
from rlplace.envs.text.rewards import Reward
from rlplace.metrics import UNCONFINED, Metric, Metrics


def unconfined(component: str, rewards: Sequence[Reward]) -> Metrics:
    """Return the number of protections that this machine lacks, as a metric; {} if no reward runs code.

    `component`: first part of the metric's name. The screen shows the metric's note.
    """
    if not any(reward.written == "unit_tests" for reward in rewards):
        return {}
    missing = missing_layers()
    if not missing:
        return {}
    names = ", ".join(missing)
    note = (
        f"unit_tests runs code of answers without {names}, which a machine of {component} lacks: "
        "run it in a container"
    )
    metric = Metric(len(missing), "max", notes=(note,))
    return {f"{component}/{UNCONFINED}": metric}

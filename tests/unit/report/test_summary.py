"""The end of a run in numbers: who waited for whom."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.local import LocalChannel
from rlplace.comm.waiting import view
from rlplace.errors import ChannelTimeout
from rlplace.report.summary import Progress, summary, summary_text, waits_of


def test_a_summary_says_who_waited_for_whom_in_each_channel() -> None:
    actions, idle = (LocalChannel(ChannelSpec(name=name, capacity_items=4)) for name in ("actions", "idle"))
    for rank in (0, 1):
        actions.named(f"rollout rank {rank}").put("x", version=2)
    actions.advance(3)
    actions.named("env rank 0").get()
    with pytest.raises(ChannelTimeout):
        actions.named("env rank 1").get(key="never", timeout_s=0.001)
    waits = waits_of(view({"actions": actions, "idle": idle}))
    assert (waits["actions"]["producers"], waits["actions"]["consumers"]) == (["rollout"], ["env"])
    assert waits["actions"]["consumer_wait_s"] > 0 == waits["actions"]["producer_wait_s"]
    assert (waits["actions"]["items"], waits["actions"]["staleness_max"]) == (2, 1)
    waits["actions"] |= {"consumer_wait_s": 12.34, "producer_wait_s": 0.5}
    text = summary_text(summary(Progress(began=0.0), Path("runs/x")) | {"waits": waits})
    assert "waited     actions: env for rollout 12.3 s, rollout for env 0.5 s   summed over ranks" in text
    assert "idle" not in text


def test_a_summary_without_channels_says_nothing_of_waits() -> None:
    assert "waited" not in summary_text(summary(Progress(began=0.0), Path("runs/x")))

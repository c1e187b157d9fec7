"""How the ranks' numbers become one."""

from __future__ import annotations

import pytest

from rlplace.metrics import Metric, reduce_metrics


@pytest.mark.parametrize(("way", "value"), [("sum", 5.0), ("max", 4.0), ("min", 1.0)])
def test_plain_reductions_ignore_the_weight(way: str, value: float) -> None:
    ranks = [{"a": Metric(1.0, way, 9.0)}, {"a": Metric(4.0, way, 1.0)}]  # type: ignore[arg-type]
    assert reduce_metrics(ranks) == {"a": value}


def test_a_mean_is_weighted_by_what_each_rank_saw() -> None:
    assert reduce_metrics([{"a": Metric(1.0, weight=1)}, {"a": Metric(4.0, weight=3)}]) == {"a": 3.25}


@pytest.mark.parametrize("way", ["mean", "sum", "max", "min"])
def test_a_rank_that_saw_nothing_does_not_count(way: str) -> None:
    ranks = [{"a": Metric(float("nan"), way, 0)}, {"a": Metric(2.0, way, 5)}]  # type: ignore[arg-type]
    assert reduce_metrics(ranks) == {"a": 2.0}


def test_what_nobody_saw_is_left_out() -> None:
    assert reduce_metrics([{"a": Metric(0.0, weight=0)}, {"b": Metric(1.0)}]) == {"b": 1.0}


def test_a_name_need_not_be_on_every_rank() -> None:
    assert reduce_metrics([{"a": Metric(1.0), "b": Metric(2.0)}, {"b": Metric(4.0)}]) == {"a": 1.0, "b": 3.0}
    assert reduce_metrics([]) == {}


def test_ranks_must_agree_on_the_reduction() -> None:
    with pytest.raises(ValueError, match="metric a: reduced as max and sum"):
        reduce_metrics([{"a": Metric(1.0, "sum")}, {"a": Metric(1.0, "max")}])

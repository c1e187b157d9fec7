"""How the ranks' numbers become one, and how sizes are shown."""

from __future__ import annotations

import pytest

from rlplace.metrics import Metric, reduce_metrics
from rlplace.units import byte_unit, exact_bytes, show_bytes


@pytest.mark.parametrize(
    ("way", "value"), [("sum", 5.0), ("max", 4.0), ("min", 1.0), ("mean", 1.3)]
)
def test_only_a_mean_is_weighted_and_ranks_that_saw_nothing_do_not_count(
    way: str, value: float
) -> None:
    seen = [(1.0, 9.0), (4.0, 1.0), (float("nan"), 0.0)]
    ranks = [{"a": Metric(number, way, weight)} for number, weight in seen]
    assert reduce_metrics(ranks) == {"a": value}


def test_a_name_need_not_be_on_every_rank_and_is_left_out_without_data() -> None:
    assert reduce_metrics(
        [{"a": Metric(1.0), "b": Metric(2.0)}, {"b": Metric(4.0)}]
    ) == {"a": 1.0, "b": 3.0}
    assert reduce_metrics([{"a": Metric(0.0, weight=0)}, {"b": Metric(1.0)}]) == {
        "b": 1.0
    }
    assert reduce_metrics([]) == {}


def test_ranks_must_agree_on_the_reduction() -> None:
    with pytest.raises(ValueError, match="metric a: reduced as max and sum"):
        reduce_metrics([{"a": Metric(1.0, "sum")}, {"a": Metric(1.0, "max")}])


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1536, "1.5 KiB"),
        (-(3 << 20), "-3 MiB"),
        (80 << 30, "80 GiB"),
    ],
)
def test_sizes_are_shown_in_the_largest_unit_that_fits(size: int, text: str) -> None:
    assert show_bytes(size) == text
    assert exact_bytes(size) == (text if abs(size) < 1024 else f"{text} ({size})")


def test_a_table_has_the_unit_of_its_largest_entry() -> None:
    assert byte_unit(5 << 20) == (1 << 20, "MiB")
    assert byte_unit(5) == (1, "bytes")

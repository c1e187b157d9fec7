"""Numbers that a worker counts, put together until they are taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rlplace.errors import WorkerMisuse
from rlplace.metrics import Metric
from rlplace.workers.collected import Collected


def add(
    collected: Collected,
    name: str,
    value: Any,
    reduce: str = "mean",
    weight: float = 1.0,
) -> None:
    collected.add("env rank 0", "env", name, value, reduce, weight)


def test_numbers_of_one_name_are_put_together_as_they_are_reduced() -> None:
    collected = Collected()
    for value, weight in ((1.0, 1.0), (4.0, 2.0)):
        add(collected, "mean", value, weight=weight)
        add(collected, "other/sum", value, "sum")
        add(collected, "max", value, "max")
        add(collected, "min", value, "min")
    taken = collected.take()
    assert {name: metric.value for name, metric in taken.items()} == {
        "env/mean": 3.0,
        "other/sum": 5.0,
        "env/max": 4.0,
        "env/min": 1.0,
    }
    assert taken["env/mean"].weight == 3.0
    assert collected.take() == {}


def test_only_mappings_of_names_to_numbers_are_metrics() -> None:
    collected = Collected()
    for result in (None, {}, {1: 2.0}, {"text": "low"}, [0.5]):
        collected.add_result("env rank 0", "env", result)
    assert collected.take() == {}
    numbers = {"loss": 1, "env/n": Metric(2.0, "sum"), "done": True}
    collected.add_result("env rank 0", "env", numbers)
    assert collected.take() == {
        "env/loss": Metric(1.0),
        "env/n": Metric(2.0, "sum"),
        "env/done": Metric(1.0),
    }


def test_tensors_and_arrays_of_one_number_are_metrics() -> None:
    collected = Collected()
    numbers = {"loss": torch.tensor(0.5), "step": np.int64(3), "kl": np.array(2.0)}
    collected.add_result("actor rank 0", "actor", numbers)
    assert collected.take() == {
        "actor/loss": Metric(0.5),
        "actor/step": Metric(3.0),
        "actor/kl": Metric(2.0),
    }


def test_values_beside_numbers_are_ignored() -> None:
    collected = Collected()
    result = {"loss": 0.5, "text": "low", "all": torch.zeros(2)}
    collected.add_result("actor rank 0", "actor", result)
    assert collected.take() == {"actor/loss": Metric(0.5)}


def test_what_is_no_metric_is_refused_with_its_name() -> None:
    collected = Collected()
    add(collected, "steps", 1, "sum")
    for name, value, reduce in (
        ("loss", "low", "mean"),
        ("loss", 0.5, "median"),
        ("steps", 1, "mean"),
    ):
        with pytest.raises(WorkerMisuse, match=name) as refused:
            add(collected, name, value, reduce)
        assert refused.value.code == "bad-metric"

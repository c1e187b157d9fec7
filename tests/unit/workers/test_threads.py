"""Threads of torch in a worker."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rlplace.workers.threads import threads


@pytest.mark.parametrize(
    ("value", "expected"), [(None, 1), ("4", 4), ("4,2", 4), ("0", 1), ("many", 1)]
)
def test_threads_are_those_of_the_variable(
    value: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if value is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert threads() == expected


# Its torch was imported, and told to use three threads, before there were workers.
SCRIPT = """
import os
import torch
from rlplace import AcceleratorConfig, Cluster, PackedPlacementStrategy, Worker

torch.set_num_threads(3)
torch.ones(2, 2).mm(torch.ones(2, 2))
assert torch.get_num_threads() == 3


class Computing(Worker):
    def setup(self):
        self.at_setup = torch.get_num_threads()

    def threads(self):
        return self.at_setup, torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")

    def more(self):
        torch.set_num_threads(2)


accelerator = AcceleratorConfig(kind="emulated")
with Cluster(accelerators_per_node=2, accelerator=accelerator, launcher="inline") as cluster:
    group = Computing.create_group().launch(
        cluster, name="actor", placement_strategy=PackedPlacementStrategy(0, 1)
    )
    print(group.threads().wait())
    group.more().wait()
    print([threads for _, threads, _ in group.threads().wait()])
print(torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS"))
"""


@pytest.mark.parametrize(("value", "limit"), [(None, 1), ("2", 2)])
def test_inline_workers_are_limited_where_torch_was_there_before(
    value: str | None, limit: int
) -> None:
    variables = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    if value is not None:
        variables["OMP_NUM_THREADS"] = value
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    each = (limit, limit, str(limit))
    # What a worker asks for itself stays, and the script keeps its threads.
    assert done.stdout.splitlines() == [str([each, each]), "[2, 2]", f"3 {value}"]

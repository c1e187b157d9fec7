"""What a worker has given to `offload` comes and goes with its residency, equal to the bit and measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rlplace.errors import AcceleratorOutOfMemory, WorkerMisuse
from rlplace.placement.schedule import Residency
from rlplace.workers.launch.devices import EmulatedDevice, MemoryAccount
from rlplace.workers.launch.host import Done, Failure, GroupSpec, WorkerHost
from rlplace.workers.worker import Rendezvous, Worker
from tests.open_calls import slot_of

WEIGHTS = 4 * (3 * 2 + 2 + 5)  # bytes of a layer of 3 x 2 in fp32, and of a table of 5


class Learner(Worker):
    """Registers all that it has in `setup`."""

    def setup(self) -> None:
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.tables = {"rows": torch.arange(5.0)}
        self.offload(self.model, self.optimizer, self.tables)

    def learn(self) -> float:
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()
        return self.sum()

    def sum(self) -> float:
        tensors = [*self.model.parameters(), self.tables["rows"]]
        return sum(float(tensor.detach().sum()) for tensor in tensors)

    def register(self, thing: Any) -> Any:
        return self.offload(thing)


def host_of(memory: int) -> tuple[WorkerHost, EmulatedDevice]:
    slot = slot_of("actor")
    host = WorkerHost()
    device = EmulatedDevice(MemoryAccount([memory]), slot)
    spec = GroupSpec(
        name="actor", worker=Learner, config=None, slots=(slot,), channels={}
    )
    host.build(spec, slot, device, Rendezvous(host="", port=0))
    return host, device


def result(host: WorkerHost, method: str, *arguments: Any) -> Any:
    outcome = host.call(method, arguments, {})
    assert isinstance(outcome, Done), outcome
    return outcome.value


def error(host: WorkerHost, method: str, *arguments: Any) -> BaseException:
    outcome = host.call(method, arguments, {})
    assert isinstance(outcome, Failure)
    assert outcome.cause is not None
    return outcome.cause


def test_registered_state_follows_the_residency() -> None:
    host, device = host_of(10_000)
    result(host, "setup")
    assert device.held_bytes() == 0, "setup ends with residency OFF"
    report = result(host, "onload")
    assert (report.residency, report.accelerator_bytes) == (Residency.FULL, WEIGHTS)
    learned = result(host, "learn")
    gradients_and_state = 4 * 8 * 3 + 4 * 2  # gradients, two moments, two step counts
    assert device.held_bytes() == WEIGHTS + gradients_and_state
    report = result(host, "move", Residency.WEIGHTS)
    assert (report.accelerator_bytes, report.host_bytes) == (
        WEIGHTS,
        gradients_and_state,
    )
    assert result(host, "sum") == learned
    report = result(host, "offload")
    assert (report.accelerator_bytes, device.held_bytes()) == (0, 0)
    assert report.host_bytes == WEIGHTS + gradients_and_state
    report = result(host, "move", Residency.FULL)
    assert report.accelerator_bytes == device.held_bytes()
    assert result(host, "sum") == learned
    assert result(host, "learn") != learned, "the optimizer goes on"


def test_more_than_there_is_names_the_residents() -> None:
    host, _ = host_of(WEIGHTS + 20)
    result(host, "setup")
    result(host, "onload")
    full = error(host, "learn")
    assert isinstance(full, AcceleratorOutOfMemory)
    assert "actor weights 52 bytes" in str(full)


@pytest.mark.parametrize("thing", [[1, 2], "model", {}, {"a": torch.ones(1), "b": 2}])
def test_what_has_no_memory_on_an_accelerator_is_refused(thing: Any) -> None:
    host, _ = host_of(10_000)
    result(host, "setup")
    refused = error(host, "register", thing)
    assert isinstance(refused, WorkerMisuse)
    assert refused.code == "nothing-to-offload"


def test_tensors_of_a_mapped_file_leave_too(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(np.arange(8, dtype=np.float32).tobytes())
    mapped = torch.from_file(str(file), size=8, dtype=torch.float32)
    assert not mapped.untyped_storage().resizable()
    parameter = nn.Parameter(mapped[:4])
    tied = mapped[2:6]
    host, _ = host_of(1 << 20)
    result(host, "setup")
    result(host, "move", Residency.FULL)
    result(host, "register", {"a": parameter, "b": tied})
    result(host, "move", Residency.OFF)
    assert parameter.untyped_storage().nbytes() == 0
    result(host, "move", Residency.FULL)
    assert parameter.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert tied.tolist() == [2.0, 3.0, 4.0, 5.0]
    with torch.no_grad():
        parameter[2] = 7.0
    assert tied[0] == 7.0

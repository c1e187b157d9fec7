"""What all trained workers have in common, on one rank: what they refuse, release, account and leave behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlplace.errors import (
    AcceleratorOutOfMemory,
    DivergedError,
    NotResident,
    OutputError,
)
from rlplace.placement.schedule import Residency
from rlplace.workers.launch.devices import CudaDevice, Device
from tests.actor_ranks import (
    Scenario,
    first_iteration,
    learn,
    make_actor,
    optimizer_tensors,
    state_digest,
)
from tests.lm_ranks import (
    ADAM,
    LmScenario,
    give,
    iterate,
    made_up_samples,
    make_lm_worker,
)
from tests.worker_ranks import CAPACITY_BYTES, listen, rendezvous_at

OFF, WEIGHTS, FULL = Residency.OFF, Residency.WEIGHTS, Residency.FULL
Make = Callable[..., "Trained"]
ROTARY = (
    2 * 4 * 16
)  # bytes of the frequencies of a tiny language model, which it has twice


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A worker of one rank, and how to drive it."""

    worker: Any
    iterate: Callable[[], dict[str, Any]]
    diverge: Callable[[], dict[str, Any]]  # the same from numbers that are none
    buffer_bytes: int = 0  # beside the weights it sends


def policy(device: Device | None) -> Trained:
    scenario = Scenario(split=(6,))
    actor = make_actor(scenario, 0, rendezvous_at(listen()), device=device)
    good = first_iteration(scenario)
    bad = dataclasses.replace(good, rewards=np.full_like(good.rewards, np.inf))

    def iterate() -> dict[str, Any]:
        actor.move(FULL)
        return learn(actor, good)

    return Trained(worker=actor, iterate=iterate, diverge=lambda: learn(actor, bad))


def language_model(
    folder: Path, component: str, device: Device | None, **trained: object
) -> Trained:
    scenario = LmScenario(model=folder, component=component, trained=trained)
    worker = make_lm_worker(scenario, 0, rendezvous_at(listen()), device=device)
    groups = made_up_samples()
    poisoned = dataclasses.replace(
        groups[0][0], logprobs=np.full_like(groups[0][0].logprobs, np.nan)
    )
    bad = groups if component == "critic" else [(poisoned, *groups[0][1:]), *groups[1:]]
    return Trained(
        worker=worker,
        iterate=lambda: iterate(worker),
        diverge=lambda: iterate(
            worker, groups=bad, returns_factor=1e30
        ),  # whose square is none
        buffer_bytes=ROTARY,
    )


@pytest.fixture(
    params=["policy", "actor", "critic", "actor on the host", "critic on the host"]
)
def trained(request: pytest.FixtureRequest, qwen: Path) -> Iterator[Make]:
    """Makes a worker; one at a time, since a process has one default process group."""
    made: list[Any] = []

    def make(device: Device | None = None) -> Trained:
        component, _, on_host = request.param.partition(" ")
        optimizer = {"optimizer": ADAM | {"on_host": True}} if on_host else {}
        one = (
            policy(device)
            if component == "policy"
            else language_model(qwen, component, device, **optimizer)
        )
        made.append(one.worker)
        return one

    yield make
    for worker in made:
        worker.close()


def test_it_starts_off_and_refuses_to_compute(trained: Make, tmp_path: Path) -> None:
    worker = trained().worker
    calls = {
        "infer": (0, 0),
        "learn": (0, 0),
        "push_weights": (0,),
        "save_model": (str(tmp_path / "policy"),),
        "logprobs": ([1, 2],),
        "digest": (),
    }
    critic = worker.context.slot.component == "critic"
    # A critic refuses to learn what it has not inferred, and sends no weights; an actor here has nothing to infer.
    others = {"learn", "push_weights"} if critic else {"infer"}
    for method, arguments in calls.items():
        if hasattr(worker, method) and method not in others:
            with pytest.raises(
                NotResident,
                match=f"rank 0: {method} was called while the worker is off",
            ) as caught:
                getattr(worker, method)(*arguments)
            assert caught.value.code == "not-resident"
    worker.move(WEIGHTS)
    if critic:
        give(worker, made_up_samples())
        worker.infer(0, 0)
    with pytest.raises(NotResident, match="learn needs residency full"):
        worker.learn(0, 0)


def test_moves_release_what_they_say_and_bring_it_back_to_the_bit(
    trained: Make,
) -> None:
    made = trained()
    worker = made.worker
    made.iterate()
    digest, state = worker.digest(), state_digest(worker)
    tensors = [tensor for _, tensor in worker._model.whole_weights()]
    weights = sum(tensor.nbytes for tensor in tensors) + made.buffer_bytes
    on_host = worker._trainer.host_bytes > 0
    floats = [
        tensor.numel() for tensor in tensors if tensor.dtype == torch.float32
    ]  # the others are moments
    steps = len(worker._model.trained_shards())  # each with a count of them
    adam = (3 if on_host else 2) * 4 * sum(floats) + 4 * steps
    expected = {
        FULL: (weights, adam) if on_host else (weights + adam, 0),
        WEIGHTS: (weights, adam),
        OFF: (0, weights + adam),
    }
    for residency in (FULL, WEIGHTS, OFF, WEIGHTS, FULL, OFF, FULL):
        for _ in range(2):  # the second is free
            report = worker.move(residency)
            assert report.residency == residency == worker.residency
            assert (report.accelerator_bytes, report.host_bytes) == expected[residency]
            assert worker.context.device.held_bytes() == report.accelerator_bytes
    assert (worker.digest(), state_digest(worker)) == (digest, state)
    made.iterate()
    assert worker.context.device.held_bytes() == worker.move(FULL).accelerator_bytes, (
        "nothing stays gathered"
    )


@pytest.mark.parametrize("missing", ["optimizer state", "working memory of"])
def test_out_of_memory_names_what_did_not_fit(trained: Make, missing: str) -> None:
    made = trained()
    worker = made.worker
    weights = worker.move(WEIGHTS).accelerator_bytes
    full = worker.move(FULL).accelerator_bytes
    worker.move(OFF)
    if weights == full and missing == "optimizer state":
        return  # it is on the host
    room = weights if missing == "optimizer state" else full
    worker.context.device.acquire(CAPACITY_BYTES - room - 8, "another component")
    with pytest.raises(AcceleratorOutOfMemory, match=missing):
        made.iterate()
    worker.context.device.release("another component")
    assert worker.move(FULL).accelerator_bytes == full


def test_numbers_that_are_not_finite_are_an_error_and_no_step(trained: Make) -> None:
    made = trained()
    made.worker.move(FULL)
    before = made.worker.digest()
    with pytest.raises(
        DivergedError, match="iteration 1 is not a finite number"
    ) as caught:
        made.diverge()
    assert caught.value.code == "diverged"
    assert f"{made.worker.context.slot.component}.optimizer.lr" in str(caught.value)
    assert made.worker.digest() == before


def test_a_few_such_steps_may_be_skipped_and_change_nothing(trained: Make) -> None:
    made = trained()
    worker, component = made.worker, made.worker.context.slot.component
    made.iterate()
    worker._trainer._may_skip = 10
    state = [*worker._model.trained_shards(), *optimizer_tensors(worker)]
    before = [tensor.clone() for tensor in state]
    metrics = made.diverge()
    skipped = metrics[f"{component}/skipped_steps"]
    assert skipped.value == len(skipped.notes) >= 1
    assert skipped.notes[0].startswith(f"{component}: optimizer step ")
    assert skipped.notes[0].endswith("of rank 0")
    assert metrics[f"{component}/optimizer_steps"].value == 0
    with pytest.raises(DivergedError, match="10 times in a row before"):
        [made.diverge() for _ in range(11)]
    assert all(torch.equal(*pair) for pair in zip(before, state, strict=True))


def test_a_full_disk_keeps_the_older_policy(tmp_path: Path) -> None:
    actor = policy(None).worker
    actor.move(WEIGHTS)
    file = tmp_path / "policy.safetensors"
    file.write_bytes(b"an older one")
    (tmp_path / "policy.safetensors.part").symlink_to("/dev/full")
    with pytest.raises(OutputError) as caught:
        actor.save_model(str(file))
    actor.close()
    assert caught.value.code == "disk-full"
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [
        (file.name, b"an older one")
    ]


@pytest.mark.gpu
def test_a_gpu_learns_the_same_and_frees_its_memory(trained: Make) -> None:
    expected = trained()
    expected.iterate()
    weights = {
        name: tensor.clone() for name, tensor in expected.worker._model.whole_weights()
    }
    expected.worker.close()
    worker = (made := trained(CudaDevice())).worker
    made.iterate()
    for name, tensor in worker._model.whole_weights():
        torch.testing.assert_close(tensor.cpu(), weights[name], atol=5e-5, rtol=1e-3)
    held, resident = torch.cuda.memory_allocated(), worker.move(FULL).accelerator_bytes
    worker.move(OFF)
    assert held - torch.cuda.memory_allocated() >= resident > 0

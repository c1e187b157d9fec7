"""The memory ledger against a real GPU: what an actor of a real size holds, beside what the plan says of it.

    python -m benchmarks.gpu_ledger small|medium|large [--emulated]     as gpu_check runs them

Each case is a process of its own: one rank of the real actor, made-up samples, two iterations of learning, and the
accelerator left in between. Measured by torch's allocator: what is resident, the fullest moment of learning, what stays
after the offload; what the allocator reserves beside that; and, by the driver, what the process has beyond torch.

A prediction is missed where more is held than was predicted (2 %), or much less (25 %).
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu_measure import GIB, MIB, models_folder
from benchmarks.random_models import parameters, random_model
from rlplace.comm.ends import LocalChannel
from rlplace.placement.memory.demands import Part
from rlplace.placement.schedule import Residency
from rlplace.workers.arguments import SAMPLES, WEIGHTS
from rlplace.workers.launch.devices import (
    CudaDevice,
    Device,
    EmulatedDevice,
    MemoryAccount,
)
from tests.memory_peaks import LmJob, allocations, made_up
from tests.open_calls import slot_of
from tests.worker_ranks import context_of, listen, rendezvous_at, spec_of

LEAST = 0.98
MOST = 1.25  # of predicted over measured
SMALL_BYTES = 64 * MIB  # differences below are the allocator's rounding
CASE_S = 90.0  # longest that one case may take
ITERATIONS = 2  # the optimizer's state is made in the first step
_IMPORTED = (
    "rlplace.models.causal_lm",
    "rlplace.workers.training.lm_learner",
    "tests.memory_peaks",
)
_OUTSIDE = (
    Part.CONTEXT,
    Part.COMMUNICATOR,
)  # of the process, which torch does not count


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`trained`: keys of the actor's block. Samples come in groups of four, each of `prompt` + `answer` tokens."""

    name: str
    size: str  # of random_models.SIZES
    trained: Mapping[str, object]
    groups: int = 4
    prompt: int = 256
    answer: int = 768
    shared_prompts: bool = False
    budget_samples: int = 8  # of one micro-batch
    offloads: bool = (
        True  # also measure leaving and coming back, which pins as much host memory
    )


class Reading(NamedTuple):
    """Bytes of one case, in pairs of measured and predicted; seconds where a name ends in `_s`."""

    resident: tuple[int, int]  # measured, predicted
    peak: tuple[int, int]
    after_offload: tuple[int, int]
    # By torch's allocator while it learned: measured, and what the plan foresees beside the peak
    reserved_peak: int
    fragments: int
    outside: tuple[int, int]  # of the process, beyond what torch's allocator has
    moved: int  # by one offload
    offload_s: float
    onload_s: float
    learn_s: float
    tokens: int


def cases(group: str) -> Sequence[Case]:
    """Return the cases of one check: `small`, `medium` or `large` models; `emulated` ones are tiny."""
    return GROUPS[group]()


def _small() -> Sequence[Case]:
    usual = {"compute": "bf16", "checkpointing": True}
    case = functools.partial(Case, size="Qwen3-0.6B", trained=usual)
    return [
        case(name="0.6B, two micro-batches"),
        case(name="0.6B, one micro-batch", budget_samples=16),
        case(
            name="0.6B, nothing recomputed", trained={**usual, "checkpointing": False}
        ),
        case(
            name="0.6B, inputs of layers on the host",
            trained={**usual, "activation_offload": True},
        ),
        case(name="0.6B, prompts shared", shared_prompts=True, prompt=768, answer=256),
        case(
            name="0.6B, 8-bit Adam",
            trained={**usual, "optimizer": {"kind": "adamw_8bit"}},
        ),
        case(name="0.6B, LoRA", trained={**usual, "lora_rank": 16}),
    ]


def _medium() -> Sequence[Case]:
    usual = {"compute": "bf16", "checkpointing": True}
    masters = {**usual, "weights": "bf16", "optimizer": {"kind": "adamw_master"}}
    case = functools.partial(
        Case, size="Qwen3-1.7B", trained=usual, groups=2, budget_samples=4
    )
    return [
        case(name="1.7B, two micro-batches"),
        case(
            name="1.7B, bf16 weights and float32 masters",
            trained=masters,
            offloads=False,
        ),
    ]


def _large() -> Sequence[Case]:
    factors = {"compute": "bf16", "checkpointing": True, "lora_rank": 16}
    packed = {
        "compute": "bf16",
        "checkpointing": True,
        "optimizer": {"kind": "adamw_8bit"},
    }
    case = functools.partial(Case, groups=2, budget_samples=4, offloads=False)
    return [
        case(name="4B, LoRA", size="Qwen3-4B", trained=factors),
        case(name="4B, 8-bit Adam", size="Qwen3-4B", trained=packed),
        case(name="8B, LoRA", size="Qwen3-8B", trained=factors),
    ]


GROUPS: Mapping[str, Callable[[], Sequence[Case]]] = {
    "small": _small,
    "medium": _medium,
    "large": _large,
}


def emulated(case: Case) -> Case:
    """Return the same in the size of a CPU, which computes in float32."""
    trained = {**case.trained, "compute": "fp32", "weights": "fp32"}
    if trained.get("optimizer") == {"kind": "adamw_master"}:
        trained["optimizer"] = {"kind": "adamw"}
    answer = case.answer // 8
    prompt = case.prompt // 8
    return dataclasses.replace(
        case, size="emulated", trained=trained, prompt=prompt, answer=answer
    )


# ── one case, in a process of its own ────────────────────────────────────────────────────────────────────────────────


def measure(case: Case, folder: Path, on_cpu: bool) -> Reading:
    """Let one rank of the actor learn, and read what it holds."""
    unused = _device_bytes_used(on_cpu)  # before anything begins CUDA
    job = _job(case, folder, on_cpu)
    spec = job.spec
    (footprint,) = spec.case.ledger().footprints["actor"]
    channels = {name: LocalChannel(spec_of(name)) for name in (SAMPLES, WEIGHTS)}
    context = context_of(
        "actor", 0, 1, rendezvous_at(listen()), channels, device=_device(on_cpu)
    )
    worker: Any = spec.workers["actor"](spec.arguments["actor"], context)
    worker.setup()
    groups = made_up(
        4 * case.groups,
        job.prompt,
        job.answer,
        case.prompt if case.shared_prompts else 0,
    )
    reading = None
    for iteration in range(ITERATIONS):
        for group in groups:
            channels[SAMPLES].put(group, key="")
        began = time.perf_counter()
        worker.move(Residency.FULL)
        onload_s = time.perf_counter() - began
        resident = (
            worker.move(Residency.FULL).accelerator_bytes
            if on_cpu
            else torch.cuda.memory_allocated()
        )
        began = time.perf_counter()
        peak, reserved = _fullest(
            functools.partial(worker.learn, iteration, iteration), on_cpu, resident
        )
        learn_s = time.perf_counter() - began
        outside = (
            0
            if on_cpu
            else _device_bytes_used(on_cpu) - unused - torch.cuda.memory_reserved()
        )
        moved = 0
        offload_s = 0.0
        stays = 0
        if case.offloads:
            before = 0 if on_cpu else torch.cuda.memory_allocated()
            began = time.perf_counter()
            report = worker.move(Residency.OFF)
            offload_s = time.perf_counter() - began
            stays = (
                report.accelerator_bytes if on_cpu else torch.cuda.memory_allocated()
            )
            moved = report.host_bytes if on_cpu else before - stays
        # What torch reserves beside its tensors is not of their peak
        learning = sum(
            size
            for part, size in footprint.working["learn"].items()
            if part is not Part.FRAGMENTS
        )
        reading = Reading(
            resident=(resident, footprint.reported_bytes(Residency.FULL)),
            peak=(peak, footprint.reported_bytes(Residency.FULL) + learning),
            after_offload=(stays, footprint.reported_bytes(Residency.OFF)),
            reserved_peak=reserved,
            fragments=footprint.working["learn"].get(Part.FRAGMENTS, 0),
            outside=(
                outside,
                sum(footprint.held[Residency.OFF].get(part, 0) for part in _OUTSIDE),
            ),
            moved=moved,
            offload_s=offload_s,
            onload_s=onload_s,
            learn_s=learn_s,
            tokens=sum(len(sample.tokens) for group in groups for sample in group),
        )
    worker.close()
    assert reading is not None, "there is an iteration"
    return reading


def _job(case: Case, folder: Path, on_cpu: bool) -> LmJob:
    whole = case.prompt + case.answer
    budget = (
        {} if case.shared_prompts else {"token_budget": case.budget_samples * whole}
    )
    return LmJob(
        model=folder,
        prompts=case.groups,
        prompt=case.prompt,
        answer=case.answer,
        alike=case.shared_prompts,
        trained={**case.trained, **budget},
        kind="emulated" if on_cpu else "cuda",
        memory_bytes=64 * GIB
        if on_cpu
        else torch.cuda.get_device_properties(0).total_memory,
    )


def _device(on_cpu: bool) -> Device:
    if on_cpu:
        return EmulatedDevice(MemoryAccount([64 * GIB]), slot_of("actor"))
    return CudaDevice()


def _fullest(
    work: Callable[[], object], on_cpu: bool, resident: int
) -> tuple[int, int]:
    """Return the most bytes that are allocated, and reserved, while it works."""
    if on_cpu:
        with allocations() as made:
            work()
        return resident + made.peak_bytes, resident + made.peak_bytes
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def _device_bytes_used(on_cpu: bool) -> int:
    """Return what all processes have of the GPU, by its driver: to ask CUDA would begin a context."""
    if on_cpu:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0"
    asked = (
        "nvidia-smi",
        f"--id={visible}",
        "--query-gpu=memory.used",
        "--format=csv,noheader,nounits",
    )
    told = subprocess.run(
        asked, capture_output=True, text=True, check=True, timeout=30.0
    )
    return int(told.stdout) * MIB


# ── all cases of a check ─────────────────────────────────────────────────────────────────────────────────────────────


def main(group: str, on_cpu: bool) -> int:
    """Print measurements as gpu_check reads them; return how many were missed."""
    missed = list[str]()
    chosen = [emulated(case) for case in cases(group)] if on_cpu else cases(group)
    with models_folder() as folder:
        for case in chosen:
            model = Path(folder) / case.size
            if not model.exists():
                random_model(model, case.size)
            missed += _shown(case, model, on_cpu)
    print(f"{len(chosen)} cases, {len(missed)} missed")
    if missed:
        print("; ".join(missed), file=sys.stderr)
    return len(missed)


def _shown(case: Case, model: Path, on_cpu: bool) -> list[str]:
    """Measure one case and print its lines; return what was missed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    pool = ProcessPoolExecutor(1, mp_context=context)
    pending = pool.submit(measure, case, model, on_cpu)
    try:
        error = pending.exception(CASE_S)
    except TimeoutError as late:
        error = late
        _kill(pool)
    pool.shutdown()
    if error is not None:
        why = (
            f"not done after {CASE_S:g} s"
            if isinstance(error, TimeoutError)
            else type(error).__name__
        )
        print(f"@{case.name}\tdied\t-\tmissed", flush=True)
        print(
            f"{case.name}: {why}: {error}\n{error.__cause__ or ''}",
            file=sys.stderr,
            flush=True,
        )
        return [f"{case.name} died: {why}"]
    reading = pending.result()
    missed = [
        _row(f"{case.name}: resident", *reading.resident, on_cpu),
        _row(f"{case.name}: learning", *reading.peak, on_cpu),
    ]
    if case.offloads:
        missed.append(
            _row(f"{case.name}: after offload", *reading.after_offload, on_cpu)
        )
    if not on_cpu:
        missed.append(
            _row(f"{case.name}: context, beyond torch", *reading.outside, on_cpu)
        )
        share = reading.reserved_peak / reading.peak[0] - 1.0
        foreseen = reading.fragments / reading.peak[1]
        print(
            f"@{case.name}: reserved beyond allocated\t{100 * share:.1f} %\t{100 * foreseen:.1f} % + 4 % kept free\t",
            flush=True,
        )
    speed = f"{reading.tokens / reading.learn_s:,.0f} tokens/s"
    flops = (
        8.0 * parameters(case.size) * reading.tokens / reading.learn_s / 1e12
    )  # with what is recomputed
    print(
        f"@{case.name}: learned\t{speed}\t{flops:.0f} TFLOP/s of 8 P a token\t",
        flush=True,
    )
    if case.offloads and reading.moved:
        there, back = (
            reading.moved / GIB / s for s in (reading.offload_s, reading.onload_s)
        )
        print(
            f"@{case.name}: offload, onload\t{there:.1f}, {back:.1f} GiB/s\t{_gib(reading.moved)}\t",
            flush=True,
        )
    return [what for what in missed if what]


def _kill(pool: ProcessPoolExecutor) -> None:
    """End the process of a case that hangs: the pool itself would wait for it."""
    for process in list(pool._processes.values()):
        process.kill()


def _row(what: str, measured: int, predicted: int, on_cpu: bool) -> str:
    """Print one measurement; return it where it was missed."""
    apart = measured - predicted
    fine = abs(apart) < SMALL_BYTES or LEAST * measured <= predicted <= MOST * measured
    ratio = f" ({predicted / measured:.3f})" if measured else ""
    expected = f"{_gib(predicted)} predicted{ratio}"
    print(
        f"@{what}\t{_gib(measured)}\t{expected}\t{'' if fine or on_cpu else 'missed'}",
        flush=True,
    )
    if fine or on_cpu:
        return ""
    return f"{what}: {_gib(measured)}, {expected}"


def _gib(size: int) -> str:
    return f"{size / GIB:.3f} GiB"


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1], "--emulated" in sys.argv) else 0)

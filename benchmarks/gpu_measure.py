"""What the checks of a GPU have in common: the device, measurements and their lines, seconds, and how a try ends.

A try is a function that returns its figure. Lines that begin with `@` are measurements: what, measured, expected,
"" or "missed". With `--emulated` on the command line a CPU stands in for the GPU: the same lines run with smaller
sizes, but for those of CUDA itself, and nothing is compared.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping

import torch

from benchmarks.gpu_check import MODELS

ON_CPU = "--emulated" in sys.argv
DEVICE = torch.device("cpu" if ON_CPU else "cuda")
GIB = 1 << 30
MIB = 1 << 20
REPETITIONS = 5  # the best counts
_MATRIX = 256 if ON_CPU else 8192  # rows and columns

missed: list[str] = []  # measurements of this process that are out of bounds


def expect(
    what: str,
    measured: float,
    least: float | None = None,
    most: float | None = None,
    unit: str = "",
) -> None:
    """Print a measurement; one that is out of bounds makes the try fail at its end."""
    limits = (("at least", least), ("at most", most))
    bound = ", ".join(
        f"{word} {limit:g}{unit}" for word, limit in limits if limit is not None
    )
    fine = ON_CPU or (
        (least is None or measured >= least) and (most is None or measured <= most)
    )
    print(
        f"@{what}\t{measured:.3g}{unit}\t{'-' if ON_CPU else bound}\t{'' if fine else 'missed'}",
        flush=True,
    )
    if not fine:
        missed.append(f"{what} is {measured:.3g}{unit}, expected {bound}")


def show(what: str, measured: str, beside: str = "") -> None:
    """Print a measurement that has no bound. `beside`: what to compare it with."""
    print(f"@{what}\t{measured}\t{beside}\t", flush=True)


def miss(what: str, why: str) -> None:
    """Print something that is wrong and has no number; the try fails at its end."""
    print(f"@{what}\t{why}\t-\tmissed", flush=True)
    missed.append(f"{what}: {why}")


def try_named_on_command_line(tries: Mapping[str, Callable[[], str]]) -> None:
    """Run the try that the first word names, and print its figure; end with what was missed, if anything was."""
    print(tries[sys.argv[1]]())
    if missed:
        sys.exit("; ".join(missed))


def models_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder for models of real sizes: in memory where gpu_check has found room there."""
    return tempfile.TemporaryDirectory(dir=os.environ.get(MODELS))


def matrix_rate() -> float:
    """Return operations a second of a large product in bfloat16, on random numbers: on zeros it is faster."""
    left = torch.randn(_MATRIX, _MATRIX, device=DEVICE, dtype=torch.bfloat16)
    right = torch.randn(_MATRIX, _MATRIX, device=DEVICE, dtype=torch.bfloat16)
    left @ right  # the first one begins the library
    times = 1 if ON_CPU else 20  # one alone is too short for the clock
    seconds = best(lambda: [left @ right for _ in range(times)]) / times
    return 2.0 * _MATRIX**3 / seconds


def best(work: Callable[[], object], times: int = REPETITIONS) -> float:
    """Return the least seconds of several runs."""
    return min(seconds_of(work) for _ in range(times))


def seconds_of(work: Callable[[], object]) -> float:
    synchronize()
    began = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - began


def synchronize() -> None:
    """Wait until the GPU has done what it was given."""
    if not ON_CPU:
        torch.cuda.synchronize()

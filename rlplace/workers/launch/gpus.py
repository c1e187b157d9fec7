"""The GPUs of this machine: what they are and how much memory they have, without torch and without starting CUDA.

They are numbered as nvidia-smi and Ray number them, by their place on the bus; workers number them alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rlplace.placement.machines.topology import Run

QUERY = "nvidia-smi --query-gpu=name,memory.total,uuid --format=csv,noheader,nounits"
LIST_S = 10.0  # a driver that nothing keeps loaded takes seconds to answer
_MIB = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU. What is not known stays empty."""

    uuid: str = ""
    product: str = ""
    memory_bytes: int = 0  # of the board: what the driver keeps, about 1 %, is not for CUDA, torch and vLLM


def list_gpus(deadline_s: float = LIST_S) -> tuple[Gpu, ...]:
    """List all GPUs of this machine; only counted where nvidia-smi is absent, fails, is late or not understood."""
    return _described(deadline_s) or (Gpu(),) * _count()


def _count() -> int:
    return sum(1 for _ in Path("/proc/driver/nvidia/gpus").glob("*")) or len(list(Path("/dev").glob("nvidia[0-9]*")))


def _described(deadline_s: float) -> tuple[Gpu, ...]:
    with tempfile.TemporaryFile() as out:  # a pipe would have to be read to its end, which may never come
        try:
            process = subprocess.Popen(QUERY.split(), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.DEVNULL)
        except OSError:
            return ()
        try:
            code = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the driver, it cannot even be killed
                process.wait(1.0)
            return ()
        out.seek(0)
        return parse(out.read().decode(errors="replace")) if code == 0 else ()


def parse(text: str) -> tuple[Gpu, ...]:
    """The answer to QUERY, a line each; none at all where a line is not as asked, since numbers would shift."""
    gpus: list[Gpu] = []
    for line in filter(str.strip, text.splitlines()):
        fields = [field.strip() for field in line.rsplit(",", 2)]
        if len(fields) != 3 or not fields[2].startswith("GPU-"):
            return ()
        product, mib, uuid = fields
        known = int(mib) * _MIB if mib.isdecimal() else 0  # [N/A] where it is the machine's own memory
        gpus.append(Gpu(uuid=uuid, product=product.removeprefix("NVIDIA "), memory_bytes=known))
    return tuple(gpus)


def visible(gpus: Sequence[Gpu], names: str | None) -> tuple[Gpu, ...]:
    """What `names`, CUDA_VISIBLE_DEVICES, leaves of them, in its order: numbers, or beginnings of UUIDs.

    CUDA reads it up to the first name that does not exist. Of a MIG slice, only that it is there is known.
    """
    if names is None:
        return tuple(gpus)
    left: list[Gpu] = []
    for name in map(str.strip, names.split(",")):
        gpu = _named(gpus, name)
        if gpu is None or len(left) == len(gpus):
            break
        left.append(gpu)
    return tuple(left)


def _named(gpus: Sequence[Gpu], name: str) -> Gpu | None:
    if name.isdecimal():
        return gpus[int(name)] if int(name) < len(gpus) else None
    if name.startswith("MIG-") or (name.startswith("GPU-") and not any(gpu.uuid for gpu in gpus)):
        return Gpu()
    return next((gpu for gpu in gpus if name.startswith("GPU-") and gpu.uuid.startswith(name)), None)


def runs_of(gpus: Sequence[Gpu]) -> tuple[Run, ...]:
    """Group neighbours that are alike."""
    alike = itertools.groupby(gpus, key=lambda gpu: (gpu.product, gpu.memory_bytes))
    return tuple(
        Run(count=sum(1 for _ in group), product=product, memory_bytes=size) for (product, size), group in alike
    )

"""The machines of a job, as declared or as Ray reports them, and this machine's GPUs in PCI bus order.

This module does not import torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlplace.codes import config_error, problem
from rlplace.config.blocks.machines import (
    AcceleratorConfig,
    ClusterConfig,
    NodeConfig,
    RayConfig,
)
from rlplace.errors import ClusterError, PlacementError, Source, source_of
from rlplace.extras import install_command
from rlplace.placement.machines.topology import Run, Topology, declare_topology
from rlplace.units import counted

if TYPE_CHECKING:
    from rlplace.placement.language.slots import Slot
    from rlplace.workers.launch.reservation import Machine

QUERY = "nvidia-smi --query-gpu=name,memory.total,uuid --format=csv,noheader,nounits"
LIST_S = 10.0  # an idle driver without persistence mode takes seconds to answer
_LOOK_S = 1.0  # interval between two checks for missing machines
_MIB = 1 << 20


def declared_topology(
    config: ClusterConfig, sources: Mapping[str, Source] | None = None
) -> Topology:
    """Return the topology that the `cluster` block of a config declares.

    `sources`: file and line of each config key, for errors. The value `auto` is filled in from this machine. With
    `ray.machines: true`, the nodes are those of the running Ray cluster. Otherwise the nodes need not exist: the
    launcher checks them later. Raise ClusterError, PlacementError or ConfigError.
    """
    if config.ray.machines:
        return _met_topology(config, sources or {})
    if config.nodes:
        kind = "emulated" if config.accelerator.kind == "emulated" else "cuda"
        budget = config.accelerator.memory if kind == "emulated" else 0
        nodes = [
            dataclasses.replace(node, memory=node.memory or budget)
            for node in config.nodes
        ]
        total = config.num_nodes if config.num_nodes > 1 else None
        each = (
            None
            if config.accelerators_per_node == "auto"
            else config.accelerators_per_node
        )
        return declare_topology(nodes, kind, total, sources, each)
    return count_topology(
        config.num_nodes,
        config.accelerators_per_node,
        config.accelerator,
        local=config.ray.address is None,
    )


def _met_topology(config: ClusterConfig, sources: Mapping[str, Source]) -> Topology:
    """Return the topology of the running Ray cluster at `ray.address`.

    `sources`: file and line of each config key, for errors. Raise ConfigError if `config` has no address or declares
    `nodes` as well, ClusterError if the cluster has no GPU although the config requires GPUs.
    """
    if config.ray.address is None:
        key = "cluster.ray.address"
        raise config_error(
            "missing-key",
            key,
            error="ray-address",
            source=source_of(key, sources),
        )
    if config.nodes:
        source = source_of("cluster.nodes", sources)
        raise config_error("machines-twice", "cluster.nodes", source=source)
    machines = _machines_of(config.ray)
    gpus = [int(machine.total.get("GPU", 0)) for machine in machines]
    kind = config.accelerator.kind
    if kind == "auto":
        kind = "cuda" if any(gpus) else "emulated"
    each = (
        None if config.accelerators_per_node == "auto" else config.accelerators_per_node
    )
    counts = (
        gpus
        if kind == "cuda"
        else [each or config.accelerator.emulated_per_node] * len(machines)
    )
    if not any(counts):
        key = "cluster.accelerator.kind"
        raise ClusterError(
            problem(
                "too-few-accelerators",
                key,
                "cuda",
                error="without-gpu",
                address=config.ray.address,
                count=len(machines),
            )
        )
    memory = config.accelerator.memory if kind == "emulated" else 0
    nodes = [
        NodeConfig(
            accelerators=count,
            product=m.product if kind == "cuda" else "",
            memory=memory,
        )
        for m, count in zip(machines, counts, strict=True)
    ]
    total = config.num_nodes if config.num_nodes > 1 else None
    return declare_topology(nodes, kind, total, sources, each, by="the Ray cluster")


def _machines_of(ray: RayConfig) -> list[Machine]:
    """Connect to a running Ray cluster, and return its machines.

    Raise ClusterError if the cluster cannot be reached, ConfigError if Ray is not installed.
    """
    from rlplace.workers.ray_launch.session import RaySession

    session = RaySession(ray)
    try:
        session.start()
        return session.machines()
    except ModuleNotFoundError as error:
        raise config_error(
            "missing-library",
            "cluster.ray.machines",
            "machines: true",
            error="ray",
            module=error.name,
            command=install_command("run"),
        ) from error
    finally:
        session.close()


def await_machines(
    ray: RayConfig, slots: Sequence[Slot], topology: Topology, wait_s: float
) -> None:
    """Wait until a running Ray cluster has the machines and accelerators that `slots` use, at most `wait_s` seconds.

    `ray`: settings with the cluster's address. `topology`: the planned nodes. Raise ClusterError or PlacementError if a
    machine or its accelerators are still missing after `wait_s`.
    """
    from rlplace.workers.launch.reservation import check_size, node_uses
    from rlplace.workers.ray_launch.session import RaySession

    session = RaySession(ray)
    until = time.monotonic() + wait_s
    try:
        session.start()
        while True:
            try:
                return check_size(
                    node_uses(slots, topology), session.machines(), session.address
                )
            except (ClusterError, PlacementError):
                if time.monotonic() >= until:
                    raise
            time.sleep(_LOOK_S)
    finally:
        session.close()


def count_topology(
    num_nodes: int,
    accelerators_per_node: int | Literal["auto"],
    accelerator: AcceleratorConfig,
    *,
    local: bool,
) -> Topology:
    """Return a topology of equal nodes.

    `accelerators_per_node`: a number, or "auto" for all visible GPUs of this machine, or without GPUs the emulated
    accelerators of `accelerator`. `local`: whether the nodes are this machine. If true, raise ClusterError if this
    machine has too few GPUs. If false and a number is given, product name and memory of the GPUs stay unknown;
    otherwise they are those of this machine's GPUs.
    """
    kind = accelerator.kind
    gpus = () if kind == "emulated" else visible_gpus()
    found = len(gpus)
    if kind == "auto":
        kind = "cuda" if found else "emulated"
    count = accelerators_per_node
    if count == "auto":
        count = found if kind == "cuda" else accelerator.emulated_per_node
    if kind == "cuda" and (count == 0 or (local and count > found)):
        error = "no-gpu-here"
        if found:
            error = "fewer-gpus"
        few = problem(
            "too-few-accelerators",
            "cluster.accelerators_per_node",
            str(accelerators_per_node),
            error=error,
            asked=count or "some",
            gpus=counted(found, "GPU"),
            found=found,
        )
        raise ClusterError(few)
    if kind == "emulated":
        return Topology.uniform(num_nodes, count, kind, accelerator.memory)
    topology = Topology.uniform(num_nodes, count, kind)
    if not local and accelerators_per_node != "auto":
        return topology
    runs = runs_of(gpus[:count])
    product = " + ".join(run.product for run in runs if run.product)
    least = min(run.memory_bytes for run in runs)
    mixed = runs if len(runs) > 1 else ()
    return Topology(
        tuple(
            dataclasses.replace(n, product=product, memory_bytes=least, runs=mixed)
            for n in topology.nodes
        )
    )


# ── GPUs of this machine ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU of this machine.

    `product`: product name. `memory_bytes`: all memory of the GPU. An unknown text is empty, and an unknown size is 0.
    """

    uuid: str = ""
    product: str = ""
    memory_bytes: int = 0  # of the board; the driver keeps about 1 % that CUDA, torch and vLLM cannot use


def visible_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES lets this process use. This takes at most LIST_S seconds."""
    return visible(list_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def list_gpus(deadline_s: float = LIST_S) -> tuple[Gpu, ...]:
    """Return all GPUs of this machine, in the order of nvidia-smi.

    `deadline_s`: the most seconds to wait for nvidia-smi. If nvidia-smi is missing, fails, is too slow or prints
    something unexpected, only the number of GPUs is known: return that many `Gpu()` without values.
    """
    described: tuple[Gpu, ...] = ()
    # Output goes to a file: a pipe might never be closed.
    with (
        tempfile.TemporaryFile() as out,
        contextlib.suppress(OSError),
    ):
        process = subprocess.Popen(
            QUERY.split(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.DEVNULL,
        )
        try:
            if process.wait(deadline_s) == 0:
                out.seek(0)
                described = parse(out.read().decode(errors="replace"))
        except subprocess.TimeoutExpired:
            process.kill()
            # A process that is stuck in the driver cannot even be killed.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
    in_proc = sum(1 for _ in Path("/proc/driver/nvidia/gpus").glob("*"))
    return described or (Gpu(),) * (
        in_proc or len(list(Path("/dev").glob("nvidia[0-9]*")))
    )


def parse(text: str) -> tuple[Gpu, ...]:
    """Return the GPUs in `text`, the output of the command QUERY, which has one line for each GPU.

    Return an empty tuple if any line has an unexpected form, because the numbers of the later GPUs would be wrong.
    """
    gpus: list[Gpu] = []
    for line in filter(str.strip, text.splitlines()):
        fields = [field.strip() for field in line.rsplit(",", 2)]
        if len(fields) != 3 or not fields[2].startswith("GPU-"):
            return ()
        product, mib, uuid = fields
        # nvidia-smi writes [N/A] if the GPU uses the machine's own memory.
        known = int(mib) * _MIB if mib.isdecimal() else 0
        gpus.append(
            Gpu(uuid=uuid, product=product.removeprefix("NVIDIA "), memory_bytes=known)
        )
    return tuple(gpus)


def visible(gpus: Sequence[Gpu], names: str | None) -> tuple[Gpu, ...]:
    """Return those of `gpus` that CUDA_VISIBLE_DEVICES makes visible, in the order of `names`.

    `names`: value of CUDA_VISIBLE_DEVICES, a list of GPU numbers or beginnings of UUIDs; None: all `gpus` are visible.
    As in CUDA, names after the first unknown name are ignored. A MIG slice is returned as a `Gpu()` without values.
    """
    if names is None:
        return tuple(gpus)
    left: list[Gpu] = []
    for name in map(str.strip, names.split(",")):
        if name.isdecimal():
            gpu = gpus[int(name)] if int(name) < len(gpus) else None
        elif name.startswith("MIG-") or (
            name.startswith("GPU-") and not any(gpu.uuid for gpu in gpus)
        ):
            gpu = Gpu()
        else:
            gpu = next(
                (
                    gpu
                    for gpu in gpus
                    if name.startswith("GPU-") and gpu.uuid.startswith(name)
                ),
                None,
            )
        if gpu is None or len(left) == len(gpus):
            break
        left.append(gpu)
    return tuple(left)


def runs_of(gpus: Sequence[Gpu]) -> tuple[Run, ...]:
    """Return the GPUs as runs: each run is a sequence of neighbouring GPUs with the same product name and memory."""
    alike = itertools.groupby(gpus, key=lambda gpu: (gpu.product, gpu.memory_bytes))
    return tuple(
        Run(count=sum(1 for _ in group), product=product, memory_bytes=size)
        for (product, size), group in alike
    )

"""The machines of a job: what the config declares, and what a program in place of nvidia-smi answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlplace.config.blocks.machines import AcceleratorConfig, ClusterConfig, RayConfig
from rlplace.errors import ClusterError
from rlplace.placement.machines.topology import Run, Topology
from rlplace.workers.launch.machines import (
    Gpu,
    declared_topology,
    list_gpus,
    parse,
    runs_of,
    visible,
)

GIB = 1 << 30
ALIKE = "NVIDIA H100 80GB HBM3, 81920, GPU-1a\nNVIDIA H100 80GB HBM3, 81920, GPU-1b\n"
MIXED = ALIKE + "NVIDIA L4, 23552, GPU-2c\n"
H100_A, H100_B, L4 = (
    Gpu(uuid="GPU-1a", product="H100 80GB HBM3", memory_bytes=80 * GIB),
    Gpu(uuid="GPU-1b", product="H100 80GB HBM3", memory_bytes=80 * GIB),
    Gpu(uuid="GPU-2c", product="L4", memory_bytes=23 * GIB),
)


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder on PATH, alone, where a test puts its nvidia-smi; this machine's own is not found."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def install(folder: Path, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def answering(folder: Path, text: str) -> None:
    """It answers to exactly one question."""
    (folder / "answer").write_text(text)
    question = "--query-gpu=name,memory.total,uuid --format=csv,noheader,nounits"
    read = f'while read -r line; do echo "$line"; done < {folder}/answer'
    install(folder, f'[ "$*" = "{question}" ] || exit 2\n{read}')


def topology_of(**changes: object) -> Topology:
    return declared_topology(
        ClusterConfig(
            component_placement={},
            **{"accelerator": AcceleratorConfig(kind="cuda"), **changes},
        )
    )


def test_products_and_memory_are_asked_for(smi: Path) -> None:
    answering(smi, MIXED)
    assert list_gpus() == (H100_A, H100_B, L4)


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("No devices were found", ()),
        ("NVIDIA L4, 23034\n", ()),
        (
            ALIKE + "Unable to determine the device handle, for GPU1, Unknown Error\n",
            (),
        ),
        ("NVIDIA L4, 23034, 0000:01:00.0\n", ()),
        ("\n", ()),
        (
            "NVIDIA GB10, [N/A], GPU-3d\n",
            (Gpu(uuid="GPU-3d", product="GB10", memory_bytes=0),),
        ),  # not its own memory
    ],
)
def test_what_is_not_as_asked_is_left_out(text: str, gpus: tuple[Gpu, ...]) -> None:
    assert parse(text) == gpus


@pytest.mark.parametrize(
    "script", [None, "exit 9", "echo NVIDIA-SMI has failed", "exec sleep 600"]
)
def test_without_an_answer_they_are_only_counted(
    script: str | None, smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script is not None:
        monkeypatch.setenv("PATH", f"{smi}:/usr/bin:/bin")  # for sleep
        install(smi, script)
    assert set(list_gpus(deadline_s=0.05)) <= {Gpu()}


@pytest.mark.parametrize(
    ("names", "left"),
    [
        (None, (H100_A, H100_B, L4)),
        ("", ()),
        ("2,0", (L4, H100_A)),
        ("GPU-2c , GPU-1b", (L4, H100_B)),
        ("GPU-2", (L4,)),  # the beginning of a UUID is enough
        ("0,GPU-9,1", (H100_A,)),  # CUDA stops at the first that does not exist
        ("MIG-1c", (Gpu(),)),
        ("all", ()),
        ("0,9,1", (H100_A,)),
        (" 1 , 2 ", (H100_B, L4)),
        ("-1", ()),
    ],
)
def test_visible_devices_by_number_and_uuid(
    names: str | None, left: tuple[Gpu, ...]
) -> None:
    assert visible((H100_A, H100_B, L4), names) == left


def test_gpus_that_are_only_counted_are_visible_by_any_name() -> None:
    assert visible((Gpu(),) * 4, "GPU-8f2e,MIG-1c") == (Gpu(),) * 2
    assert visible((), "0") == ()


def test_runs_are_neighbours_that_are_alike() -> None:
    big, small = (
        Run(count=1, product="H100 80GB HBM3", memory_bytes=80 * GIB),
        Run(count=1, product="L4", memory_bytes=23 * GIB),
    )
    assert runs_of((H100_A, L4, H100_B)) == (big, small, big)


def test_counted_nodes_have_what_this_machine_has(smi: Path) -> None:
    answering(smi, ALIKE)
    nodes = topology_of(num_nodes=2).nodes
    assert {(n.accelerators, n.product, n.memory_bytes, n.runs) for n in nodes} == {
        (2, "H100 80GB HBM3", 80 * GIB, ())
    }


def test_two_products_are_two_runs_and_the_least_memory(smi: Path) -> None:
    answering(smi, MIXED)
    (node,) = topology_of().nodes
    assert (node.accelerators, node.product, node.memory_bytes) == (
        3,
        "H100 80GB HBM3 + L4",
        23 * GIB,
    )
    assert [(run.count, run.memory_bytes) for run in node.runs] == [
        (2, 80 * GIB),
        (1, 23 * GIB),
    ]
    (fewer,) = topology_of(accelerators_per_node=2).nodes
    assert (fewer.memory_bytes, fewer.runs) == (80 * GIB, ())


def test_only_what_is_visible_is_counted(
    smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(smi, MIXED)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-2c")
    (node,) = topology_of().nodes
    assert (node.accelerators, node.product, node.memory_bytes) == (1, "L4", 23 * GIB)


def test_of_another_cluster_a_given_count_says_nothing_about_memory(smi: Path) -> None:
    answering(smi, ALIKE)
    elsewhere = RayConfig(address="auto")
    assert (
        topology_of(accelerators_per_node=8, ray=elsewhere).nodes[0].memory_bytes == 0
    )
    assert topology_of(ray=elsewhere).nodes[0].memory_bytes == 80 * GIB, (
        "auto: its nodes are like this one"
    )


def test_emulated_accelerators_have_the_memory_of_the_config(smi: Path) -> None:
    install(smi, f": > {smi}/asked")
    emulated = AcceleratorConfig(kind="emulated", memory=123)
    topology = topology_of(num_nodes=2, accelerators_per_node=3, accelerator=emulated)
    assert topology.num_accelerators == 6
    assert {(n.kind, n.memory_bytes) for n in topology.nodes} == {("emulated", 123)}
    assert topology_of(accelerator=emulated).num_accelerators == 8
    assert not (smi / "asked").exists()


def test_more_gpus_than_there_are() -> None:
    with pytest.raises(ClusterError) as refused:
        topology_of(accelerators_per_node=4096)
    assert refused.value.code == "too-few-accelerators"
    assert refused.value.problem.got == "4096"

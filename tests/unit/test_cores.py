"""Cores are counted alike everywhere: by affinity, and by quotas of both versions of cgroups."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rlplace
from rlplace import cores
from rlplace.cli import doctor
from rlplace.cores import usable_cores
from rlplace.foresight import observe
from rlplace.stopwatch import Stopwatch

ROOT = Path(__file__).parents[2]
MANY = set(range(16))
V1, V2 = "3:cpuset:/\n1:cpu,cpuacct:/slurm/job_1\n0::/\n", "0::/slurm/job_1/step\n"


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: MANY)


def system(root: Path, groups: str, limits: dict[str, str]) -> Path:
    """Write a system's files: the cgroups of a process, and limits by path below /sys/fs/cgroup."""
    for path, text in {
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{p}": t for p, t in limits.items()},
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("groups", "limits", "cores"),
    [
        ("", {}, 16),
        (V2, {"slurm/job_1/step/cpu.max": "max 100000\n"}, 16),
        (V2, {"slurm/job_1/step/cpu.max": "400000 100000\n"}, 4),
        (
            V2,
            {
                "slurm/job_1/step/cpu.max": "max 100000\n",
                "slurm/cpu.max": "300000 100000\n",
            },
            3,
        ),
        (
            V2,
            {"cpu.max": "250000 100000\n"},
            2,
        ),  # of a container, whose path is one of the host
        (V2, {"cpu.max": "50000 100000\n"}, 1),
        (V2, {"cpu.max": "6400000 100000\n"}, 16),
        (
            V1,
            {
                "cpu,cpuacct/slurm/job_1/" + name: text
                for name, text in (
                    ("cpu.cfs_quota_us", "-1\n"),
                    ("cpu.cfs_period_us", "100000\n"),
                )
            },
            16,
        ),
        (
            V1,
            {
                "cpu,cpuacct/slurm/job_1/" + name: text
                for name, text in (
                    ("cpu.cfs_quota_us", "500000\n"),
                    ("cpu.cfs_period_us", "100000\n"),
                )
            },
            5,
        ),
        (
            V1,
            {
                "cpu/" + name: text
                for name, text in (
                    ("cpu.cfs_quota_us", "200000\n"),
                    ("cpu.cfs_period_us", "100000\n"),
                )
            },
            2,
        ),
    ],
)
def test_the_least_limit_counts(
    groups: str, limits: dict[str, str], cores: int, tmp_path: Path
) -> None:
    assert usable_cores(system(tmp_path, groups, limits)) == cores


def test_the_affinity_is_one_of_them() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
    code += "from rlplace.cores import usable_cores; print(usable_cores())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "1\n"


def test_all_who_count_cores_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (doctor, observe, sys.modules[Stopwatch.__module__]):
        monkeypatch.setattr(module, "usable_cores", lambda: 7)
    assert doctor.machine()["cores"].startswith("7")
    assert observe.machine()["cores"] == 7


def test_nobody_counts_them_otherwise() -> None:
    """A count of its own knows only one of the limits."""
    others = {"cpu_count", "sched_getaffinity", "process_cpu_count"}
    package = Path(rlplace.__file__).parent
    found = set()
    for file in package.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if not any(name in text for name in others):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and node.attr in others:
                found.add(str(file.relative_to(package)))
    assert found == {"cores.py"}


def stat(process: int, parent: int, ticks: tuple[int, int, int, int]) -> str:
    middle = " ".join(["0"] * 9)
    worked = " ".join(map(str, ticks))
    return f"{process} (a (strange) name) S {parent} {middle} {worked} 20 0 1\n"


def test_what_a_machine_and_a_family_of_processes_have_worked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hertz = os.sysconf("SC_CLK_TCK")
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "stat").write_text("cpu  100 20 30 9999 50 3 4 10 0 0\ncpu0 1 2 3\n")
    for process, parent, ticks in (
        (7, 1, (10, 5, 100, 50)),  # user, kernel, and the same of children that ended
        (8, 7, (1, 1, 0, 0)),
        (9, 8, (2, 0, 0, 0)),
        (10, 1, (1000, 0, 0, 0)),
    ):
        (proc / str(process)).mkdir()
        (proc / str(process) / "stat").write_text(stat(process, parent, ticks))
    assert cores.worked_s([7], tmp_path) * hertz == 169
    # A process counts once, and one that has ended not at all.
    assert cores.worked_s([7, 8, 99], tmp_path) * hertz == 169
    monkeypatch.setattr(os, "cpu_count", lambda: cores.usable_cores(tmp_path))
    worked = cores.machine_worked_s(tmp_path)
    assert worked is not None
    assert worked * hertz == 100 + 20 + 30 + 3 + 4 + 10
    monkeypatch.setattr(os, "cpu_count", lambda: 1000)
    assert cores.machine_worked_s(tmp_path) is None

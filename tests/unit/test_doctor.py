"""What `rlplace doctor` finds: GPUs of a program in place of nvidia-smi, versions, and why a config does not run."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest

from rlplace.cli import doctor
from rlplace.cli.doctor import Library, Verdict, examine, libraries, machine, render
from rlplace.comm.shared_memory import folder
from rlplace.config import compose
from rlplace.errors import ClusterError
from rlplace.extras import version_of
from rlplace.runtime.prepare import prepare_composed
from tests.absent import needs


def answering(place: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    (place / "nvidia-smi").write_text(
        "\n".join(["#!/bin/sh", *(f"echo {line}" for line in lines), ""])
    )
    (place / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(place))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_gpus_that_are_alike_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = (
        "NVIDIA L40S, 46068, GPU-1a",
        "NVIDIA L4, 23552, GPU-2c",
        "NVIDIA L40S, 46068, GPU-1b",
    )
    answering(tmp_path, monkeypatch, *cards)
    assert machine()["GPUs"].splitlines() == ["2 x L40S, 45 GiB", "1 x L4, 23 GiB"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert machine()["GPUs"] == "1 x L4, 23 GiB"


def test_the_driver_and_the_cuda_of_torch_are_read_from_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version: 12.2.0\n"
    (tmp_path / "version").write_text(line)
    monkeypatch.setattr(doctor, "DRIVER", tmp_path / "version")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('imported')")
    (tmp_path / "torch" / "version.py").write_text(
        "__version__ = '2.13.0'\ncuda: Optional[str] = '12.8'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    found = machine()
    assert (found["driver"], found["CUDA of torch"]) == ("570.86.15", "12.8")


def test_models_are_those_with_a_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b", "a", "empty"):
        (tmp_path / "models" / name).mkdir(parents=True)
    for name in ("b", "a"):
        (tmp_path / "models" / name / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    assert machine()["models"] == f"{tmp_path / 'models'}: a, b"


def test_versions_are_compared_with_what_is_wanted() -> None:
    assert Library(name="torch", wanted="==2.13.0", found="2.13.0+cpu").fits
    assert Library(name="torch", wanted="==2.13.0", found=None).fits
    other = Library(name="torch", wanted="==2.13.0", found="2.12.1")
    assert not other.fits
    shown = render(
        {"cores": "2"}, [other], [Verdict(config="cartpole", problem=None)]
    ).splitlines()
    assert (
        "  warning: torch 2.12.1 is not torch==2.13.0: pip install 'torch==2.13.0'"
        in shown
    )
    assert shown[-1] == "  cartpole   runs"


@needs("rlplace")
def test_libraries_are_those_of_runs() -> None:
    found = {library.name: library for library in libraries()}
    assert dataclasses.replace(found["hydra-core"], found="1.3.8").fits
    assert not dataclasses.replace(found["hydra-core"], found="1.4.0").fits
    assert found["torch"].found == version_of("torch")
    assert {"rlplace", "mypy", "mkdocs"} & set(found) == set()


@needs("ray", "gymnasium")
def test_a_config_that_can_only_be_planned_has_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    problem = examine("rlhf_ppo_colocated").problem
    assert problem is not None
    assert (problem.code, problem.key) == ("plan-only", "env.task")
    verdict = Verdict(config="rlhf_ppo_colocated", problem=problem)
    shown = render({}, [], [verdict]).splitlines()
    assert "can only be planned: env.task is required in a run" in shown[-2]
    assert shown[-1].endswith("plan rlhf_ppo_colocated")
    assert examine("hybrid_ppo").problem is None


def test_declared_machines_that_are_not_here_are_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (composed,) = compose.with_hydra(["rlhf_ppo_colocated"])
    with pytest.raises(ClusterError) as caught:
        doctor._check_machine(prepare_composed(composed))
    assert caught.value.code == "cluster-too-small"


@needs("ray", "gymnasium")
def test_shared_memory_is_part_of_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with monkeypatch.context() as full:
        full.setattr(folder, "free_bytes", lambda path: 1)
        problem = examine("hybrid_ppo").problem
    assert problem is not None
    assert problem.code == "shm-too-small"
    monkeypatch.setattr(doctor, "SHARED_MEMORY", tmp_path / "gone")
    problem = examine("hybrid_ppo").problem
    assert problem is not None
    assert (problem.code, problem.got) == ("shm-folder", str(tmp_path / "gone"))


def without(monkeypatch: pytest.MonkeyPatch, *libraries: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in libraries else find(name),
    )


@needs("gymnasium")
def test_without_ray_threads_of_one_process_run_what_they_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    without(monkeypatch, "ray", "zmq", "psutil")
    assert examine("cartpole").problem is None, "it is inline as it is shipped"
    verdict = examine("hybrid_ppo")
    assert (
        verdict.inline == "cluster.launcher=inline cluster.component_placement.actor=0"
    )
    assert "  hybrid_ppo   runs without Ray: cluster.launcher=inline" in render(
        {"cores": "2"}, [], [verdict]
    )
    without(monkeypatch, "ray", "torch")
    assert not examine("hybrid_ppo").runs, "torch is needed by threads, too"


@needs("ray", "torch")
def test_a_simulator_without_gymnasium_does_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    without(monkeypatch, "gymnasium")
    problem = examine("cartpole").problem
    assert problem is not None
    assert (problem.code, problem.key) == ("missing-library", "env.id")


def test_versions_that_were_not_tried_are_told_with_what_they_may_mean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        doctor,
        "installed",
        lambda: {"Python": "3.14.0", "torch": "2.11.0a0+nv25.11", "ray": "2.48.0"},
    )
    assert list(doctor.notes()) == ["Python", "ray"]
    shown = render({"cores": "2"}, [], [Verdict(config="cartpole", problem=None)])
    assert "  not tried: ray 2.48.0 (2.49.0 to " in shown
    assert "Ray is started its own way" in shown
    assert "rlplace itself is not installed here" in shown


def test_a_format_that_does_not_exist_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert doctor.main(["--format", "jsn"]) == 2
    assert "fix: --format json" in capsys.readouterr().err


@needs("ray")
def test_one_command_makes_all_models_of_a_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlplace.config.model_folder.CLONE", tmp_path)
    problem = examine("rlhf_tiny").problem
    assert problem is not None
    assert problem.fix == "scripts/get_model tiny && scripts/get_model tiny_reward"

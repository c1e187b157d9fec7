"""The real bundle, made and unpacked: a machine with a torch of its own and no network plans, trains and has vLLM.

The machine is an environment with what such machines have (benchmarks/bundle.py), in a network namespace of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.gpu_check import CHECKS

ROOT = Path(__file__).parents[2]
MIB = 2**20
HAS = """
    torch==2.11.0 transformers==5.17.0 numpy>=2.3 accelerate==1.15.0 peft==0.21.2 safetensors tensorboard psutil rich
    requests aiohttp imageio click filelock packaging protobuf msgpack pyyaml attrs cloudpickle jinja2 pillow einops
    sentencepiece tiktoken prometheus-client regex opencv-python-headless py-cpuinfo six ninja numba grpcio urllib3
    uvloop scipy pandas pyarrow pytest pytest-timeout hypothesis
"""
NO_NETWORK = (
    "dns error",
    "failed to lookup address",
    "Could not connect",
    "Connection refused",
    "timed out",
)
SEALED = [
    "unshare",
    "--net",
    "--",
    "sh",
    "-c",
    'ip link set lo up && exec "$@"',
    "sealed",
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def done(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | variables
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the machine: with its libraries, and none that a bundle brings."""
    if shutil.which("unshare") is None or done([*SEALED, "true"]).returncode:
        pytest.skip(
            "no network namespace can be made here: that takes root, or the capability CAP_SYS_ADMIN"
        )
    environment = tmp_path_factory.mktemp("machine") / "venv"
    version = "{}.{}".format(*sys.version_info)
    uv = [sys.executable, "-m", "uv"]
    made = done([*uv, "venv", "--python", version, str(environment)])
    assert made.returncode == 0, made.stderr
    found = done(
        [
            *uv,
            "pip",
            "install",
            "--python",
            str(environment / "bin/python"),
            *HAS.split(),
        ]
    )
    if any(words in found.stderr for words in NO_NETWORK):
        pytest.skip(
            f"no package registry can be reached: {found.stderr.strip().splitlines()[-1]}"
        )
    assert found.returncode == 0, found.stderr
    return environment / "bin/python"


@pytest.fixture(scope="module")
def packages(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made in parts that can be carried, and unpacked on the machine."""
    carried, target = (
        tmp_path_factory.mktemp("carried"),
        tmp_path_factory.mktemp("target"),
    )
    version = "{}.{}".format(*sys.version_info)
    for groups, part_mib, parts in ((["base", "ray"], 55, 1), (["vllm"], 56, 2)):
        words = [
            "--python-version",
            version,
            "--part-mib",
            str(part_mib),
            "--to",
            str(carried),
            *groups,
        ]
        made = done([str(ROOT / "scripts/bundle"), *words])
        assert made.returncode == 0, made.stderr
        sizes = [
            part.stat().st_size for part in carried.glob(f"{'-'.join(groups)}.zip*")
        ]
        assert len(sizes) == parts, sizes
        assert max(sizes) <= part_mib * MIB
    installed = done(
        [*SEALED, "bash", str(carried / "install.sh"), str(target), str(python)]
    )
    assert installed.returncode == 0, installed.stderr
    return target


@pytest.fixture
def there(python: Path, packages: Path) -> Callable[..., str]:
    """Runs Python on the machine; returns what it prints."""

    def run(*words: str) -> str:
        path = f"{ROOT}{os.pathsep}{packages}"
        ran = done(
            [*SEALED, str(python), *words],
            PYTHONPATH=path,
            HF_HUB_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1",
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    return run


def test_what_the_groups_bring_is_imported_from_them(
    there: Callable[..., str], packages: Path
) -> None:
    names = (
        "hydra",
        "omegaconf",
        "pydantic",
        "zmq",
        "gymnasium",
        "mujoco",
        "ray",
        "vllm",
    )
    program = f"import {', '.join(names)}\nfor each in ({', '.join(names)}): print(each.__file__)"
    files = [
        line
        for line in there("-c", program).splitlines()
        if line.endswith("__init__.py")
    ]
    assert len(files) == len(names)
    assert all(Path(file).is_relative_to(packages) for file in files)


def test_a_run_by_ray_trains(there: Callable[..., str], tmp_path: Path) -> None:
    words = [
        "hybrid_ppo",
        "cluster.accelerator.kind=emulated",
        "runner.total_iterations=1",
    ]
    assert "dry run: the plan holds" in there(
        "-m", "rlplace.train", *words, "dry_run=true"
    )
    assert "env steps" in there(
        "-m", "rlplace.train", *words, f"runner.output_dir={tmp_path}"
    )


def test_the_engine_of_vllm_is_imported_beside_the_stub(
    there: Callable[..., str],
) -> None:
    """Without a GPU it cannot be built."""
    program = """
import importlib.metadata
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.worker import gpu_model_runner, gpu_worker
from vllm.v1.worker.gpu import model_runner
import xgrammar
print(importlib.metadata.version("vllm"), xgrammar.__doc__.split(",")[0])
"""
    assert there("-c", program).splitlines()[-1] == "0.26.0 A stub in place of xgrammar"


# Of these, --emulated runs every line that needs no GPU. vLLM for GPUs cannot be built without one.
CHECKED = [check.name for check in CHECKS if not {"vllm", "pytest"} & set(check.needs)]


def test_the_check_of_gpus_runs_start_to_end_by_the_interpreter_that_is_there(
    python: Path, packages: Path, tmp_path: Path
) -> None:
    """No network, nothing installed: each check says what it learned, and none fails."""
    file = tmp_path / "found.jsonl"
    words = ["--python", str(python), "--emulated", "--json", str(file), *CHECKED]
    checked = done(
        [*SEALED, str(ROOT / "scripts/gpu_check"), *words], PYTHONPATH=str(packages)
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    found = {
        told["check"]: told
        for told in map(json.loads, file.read_text(encoding="utf-8").splitlines())
    }
    assert list(found) == CHECKED
    assert {
        name: told["errors"] for name, told in found.items() if told["result"] != "ok"
    } == {}
    silent = [name for name, told in found.items() if not told["figure"]]
    assert silent == []

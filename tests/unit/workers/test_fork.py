"""The template process and its forks, without Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlplace.workers.ray_launch import fork

LIMIT_S = 30.0
SCRIPT = """
import json, os, sys
import numpy
print(json.dumps({
    "pid": os.getpid(), "group": os.getpgid(0), "parent": os.getppid(), "folder": os.getcwd(),
    "arguments": sys.argv[1:],
    "asked": os.environ.get("ASKED"), "mine": os.environ.get("MINE"), "forked": os.environ.get("RLPLACE_FORKED"),
    "beside": sys.path[0], "drawn": numpy.random.random(), "loaded": "fractions" in sys.modules,
}))
"""


@contextmanager
def template(door: Path, *modules: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, fork.__file__, "--template", str(door), *modules]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MINE": "template"}
    door.parent.mkdir()
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
    ) as process:
        yield process


def ask(door: Path, script: Path, folder: Path) -> dict[str, object]:
    command = [sys.executable, "-I", "-S", fork.__file__, "--client", str(door), str(script), "one", "two"]
    environment = {name: value for name, value in os.environ.items() if name != "MINE"} | {"ASKED": "yes"}
    answer = subprocess.run(command, capture_output=True, env=environment, cwd=folder, timeout=LIMIT_S, check=True)
    return dict(json.loads(answer.stdout))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "worker.py").write_text(SCRIPT)
    return tmp_path / "scripts" / "worker.py"


def wait_for(door: Path) -> None:
    until = time.monotonic() + LIMIT_S
    while not door.exists():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_forks_are_what_was_asked_for(tmp_path: Path, script: Path) -> None:
    door = tmp_path / "own" / "door"
    with template(door, "fractions", "numpy", "no_such_module") as process:
        wait_for(door)
        first, second = ask(door, script, tmp_path), ask(door, script, tmp_path)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(LIMIT_S) == 0
    assert not door.parent.exists()
    for each in (first, second):
        assert each["parent"] == process.pid
        assert each["group"] == each["pid"], "what ends the group of one ends no other"
        assert (each["arguments"], each["folder"]) == (["one", "two"], str(tmp_path))
        assert (each["asked"], each["mine"], each["forked"]) == ("yes", None, "1")
        assert (each["beside"], each["loaded"]) == (str(script.parent), True)
    assert first["pid"] != second["pid"]
    assert first["drawn"] != second["drawn"], "each has random numbers of its own"


def test_without_a_template_the_client_becomes_the_worker(tmp_path: Path, script: Path) -> None:
    found = ask(tmp_path / "nothing", script, tmp_path)
    assert (found["arguments"], found["asked"], found["forked"]) == (["one", "two"], "yes", None)


@pytest.mark.parametrize(
    ("module", "source", "why"),
    [
        pytest.param(
            "starts_a_thread",
            "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n",
            "importing starts_a_thread starts threads (1)",
            id="thread",
        ),
        pytest.param(
            "torch",
            "import os, types\nown = os.getpid()\n"
            "cuda = types.SimpleNamespace(is_initialized=lambda: False, _is_in_bad_fork=lambda: os.getpid() != own)\n",
            "an import has initialized CUDA",
            id="cuda",
        ),
    ],
)
def test_a_template_that_may_not_fork_says_why_and_its_clients_become_workers(
    tmp_path: Path, script: Path, module: str, source: str, why: str
) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / f"{module}.py").write_text(source)
    door = tmp_path / "own" / "door"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(tmp_path / "modules"), prepend=os.pathsep)
        with template(door, module) as process:
            found = ask(door, script, tmp_path)
            _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert why in errors
    assert found["forked"] is None

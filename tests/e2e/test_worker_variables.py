"""`cluster.env_vars` in whole runs: with threads, with a Ray of the run's own, and with one that is joined."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from rlplace.config.worker_variables import _OF_WORKERS
from tests.e2e.namespaces import RAY
from tests.e2e.training import INLINE, SMALL, Finished, placed, train

SECRET = "s3cr3t-of-this-test"
SMALLEST = (
    "env.id=tests.gyms:Telling-v0",
    "runner.stop_at_return=null",
    "runner.total_iterations=1",
)
GIVEN = (
    "cluster.env_vars={HF_HOME: /data/hf, MY_SWITCH: null, MY_TOKEN: null, OMP_NUM_THREADS: 2}",
)


def told(
    output: Path, *overrides: str, environment: Mapping[str, str]
) -> tuple[Finished, list[dict[str, str]]]:
    """Run an iteration; return what its env worker had as variables at import, and when it made its simulators."""
    file = output / "told.json"
    run = train(
        "hybrid_ppo",
        output / "runs",
        *SMALLEST,
        f"+env.kwargs.file={file}",
        *overrides,
        env=environment,
    )
    return run, json.loads(file.read_text(encoding="utf-8")) if file.exists() else []


def shell(**more: str) -> dict[str, str]:
    """A shell's variables without those of libraries: vLLM sets some in this process where it is imported."""
    ours = [
        name
        for name in os.environ
        if _OF_WORKERS.fullmatch(name) or name.startswith("MY_")
    ]
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return kept | {"MY_SWITCH": "on", "MY_TOKEN": SECRET} | more


def nothing_is_shown(run: Finished) -> None:
    """Check that the secret is in no file of the run and in nothing that it printed."""
    assert run.folder is not None
    assert SECRET not in run.out + run.err
    files = [file for file in run.folder.rglob("*") if file.is_file()]
    assert [file.name for file in files if SECRET.encode() in file.read_bytes()] == []
    assert "MY_TOKEN" in (run.folder / "config.yaml").read_text(encoding="utf-8")


def are_given(run: Finished, variables: Mapping[str, str]) -> None:
    assert run.code == 0, run.err
    assert variables["HF_HOME"] == "/data/hf"
    assert variables["MY_SWITCH"] == "on"
    assert variables["MY_TOKEN"] == SECRET
    assert variables["OMP_NUM_THREADS"] == "2"
    nothing_is_shown(run)


@pytest.mark.slow
def test_workers_that_are_threads_have_them(tmp_path: Path) -> None:
    run, (_, later) = told(
        tmp_path, *INLINE, *placed("0", "0", "1"), *GIVEN, environment=shell()
    )
    are_given(run, later)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("start_by", ["fork", "plain"])
def test_workers_of_a_ray_that_the_run_starts_have_them(
    tmp_path: Path, start_by: str
) -> None:
    words = (*SMALL, *placed("0-1", "0", "1"), *GIVEN, f"cluster.ray.start={start_by}")
    run, (_, later) = told(tmp_path, *words, environment=shell(ELSE="inherited"))
    are_given(run, later)
    assert later["ELSE"] == "inherited"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A `ray start --head` in a shell without these variables."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        command: Sequence[str] = [
            *(
                str(RAY),
                "start",
                "--head",
                "--block",
                f"--port={port}",
                "--num-cpus=1",
                f"--temp-dir={folder}",
            ),
            *(
                "--node-ip-address=127.0.0.1",
                "--include-dashboard=false",
                "--object-store-memory=100000000",
            ),
        ]
        without = {
            name: value for name, value in shell().items() if not name.startswith("MY_")
        }
        head = subprocess.Popen(
            command,
            env=without,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert head.stdout is not None
        assert any("Ray runtime started" in line for line in head.stdout)
        yield f"127.0.0.1:{port}"
        head.terminate()
        head.communicate(timeout=60)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("start_by", ["fork", "plain"])
def test_workers_of_a_ray_that_is_joined_have_those_that_are_named(
    tmp_path: Path, start_by: str, address: str
) -> None:
    words = (
        *SMALL,
        *placed("0-1", "0", "1"),
        f"cluster.ray.address={address}",
        f"cluster.ray.start={start_by}",
    )
    run, (at_import, later) = told(
        tmp_path, *words, *GIVEN, environment=shell(HF_ENDPOINT="https://mirror")
    )
    are_given(run, later)
    assert at_import["HF_HOME"] == "/data/hf", (
        "what libraries read when they are imported"
    )
    assert "HF_ENDPOINT" not in later
    assert (
        "set here, and not for the workers: HF_ENDPOINT; 'cluster.env_vars={HF_ENDPOINT: null}' gives them"
        in run.out
    )


def test_one_that_is_missing_or_secret_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    words = (*INLINE, *placed("0", "0", "1"))
    run, _ = told(
        tmp_path,
        *words,
        "cluster.env_vars={NOT_SET_ANYWHERE: null}",
        environment=shell(),
    )
    assert run.code == 2
    assert "[env-var-missing]" in run.err
    assert "export NOT_SET_ANYWHERE=..." in run.err
    written, _ = told(
        tmp_path,
        *words,
        f"cluster.env_vars={{MY_TOKEN: {SECRET}}}",
        environment=shell(),
    )
    assert written.code == 2
    assert "[secret-in-config]" in written.err
    assert SECRET not in written.out + written.err
    assert run.folder is written.folder is None

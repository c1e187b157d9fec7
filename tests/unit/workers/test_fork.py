"""The template process and its forks, without Ray."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlplace.workers.ray_launch import fork
from rlplace.workers.ray_launch.template import Template

LIMIT_S = 30.0
IMPATIENT = """
import os, sys
sys.path.insert(0, sys.argv[1])
import fork
del sys.path[0]
fork._SENT_S = fork._ANSWER_S = 1.0
getattr(fork, sys.argv[2].removeprefix("--"))(sys.argv[3], sys.argv[4:])
os._exit(0)
"""
PROGRAM = (fork.__file__,)
HURRIED = (
    "-c",
    IMPATIENT,
    str(Path(fork.__file__).parent),
)  # the same with short limits
SCRIPT = """
import gc, json, os, sys
import numpy
print(json.dumps({
    "pid": os.getpid(), "group": os.getpgid(0), "parent": os.getppid(), "folder": os.getcwd(),
    "arguments": sys.argv[1:], "oom": int(open("/proc/self/oom_score_adj").read()),
    "asked": os.environ.get("ASKED"), "mine": os.environ.get("MINE"), "forked": os.environ.get("RLPLACE_FORKED"),
    "beside": sys.path[0], "drawn": numpy.random.random(), "loaded": "fractions" in sys.modules,
    "hidden": sys.modules.get("pyarrow", "") is None,
    "tried": "tried" in sys.modules, "collects": gc.isenabled(),
}))
"""


@contextmanager
def template(
    door: Path, *modules: str, program: Sequence[str] = PROGRAM
) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MINE": "template"}
    door.parent.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(door))
        listening.listen()
        command = [
            sys.executable,
            *program,
            "--template",
            str(listening.fileno()),
            *modules,
        ]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            pass_fds=[listening.fileno()],
            text=True,
        )
    with process:
        yield process


def ask(
    door: Path,
    script: Path,
    folder: Path,
    program: Sequence[str] = PROGRAM,
    **options: Any,
) -> dict[str, object]:
    command = [
        sys.executable,
        "-I",
        "-S",
        *program,
        "--client",
        str(door),
        str(script),
        "one",
        "two",
    ]
    environment = {
        name: value for name, value in os.environ.items() if name != "MINE"
    } | {"ASKED": "yes"}
    with (
        tempfile.TemporaryFile() as answer
    ):  # not a pipe, whose end a silent template would keep open
        subprocess.run(
            command,
            stdout=answer,
            env=environment,
            cwd=folder,
            timeout=LIMIT_S,
            check=True,
            **options,
        )
        answer.seek(0)
        return dict(json.load(answer))


STARTS = (
    "import subprocess, sys; started = subprocess.Popen(sys.argv[1:]); "
    "print(started.pid, flush=True); started.wait()"
)
LASTS = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)"


@contextmanager
def client_of(
    door: Path, script: Path
) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A client, and the process that has started it, as a server of Ray does."""
    command = [sys.executable, "-I", "-S", *PROGRAM, "--client", str(door), str(script)]
    with subprocess.Popen(
        [sys.executable, "-c", STARTS, *command], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        client = psutil.Process(int(server.stdout.readline()))
        try:
            yield server, client
        finally:
            for process in (client, server):
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def test_a_client_that_waits_ends_with_the_server_of_ray_that_has_started_it(
    script: Path, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(str(tmp_path / "door"))
        silent.listen()
        with client_of(tmp_path / "door", script) as (server, client):
            link, _ = silent.accept()
            assert fork.receive(link)[0]["arguments"] == [str(script)]
            server.kill()
            client.wait(LIMIT_S / 3)
            link.close()


def test_a_fork_ends_with_the_server_of_ray_whose_client_it_is_of(
    script: Path, tmp_path: Path
) -> None:
    script.write_text(LASTS)
    door = tmp_path / "template" / "door"
    with template(door) as process:
        with client_of(door, script) as (server, client):
            assert server.stdout is not None
            forked = psutil.Process(int(server.stdout.readline()))
            server.kill()
            client.wait(LIMIT_S / 3)
            forked.wait(LIMIT_S / 3)
        process.communicate()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "worker.py").write_text(SCRIPT)
    return tmp_path / "scripts" / "worker.py"


def test_forks_are_what_was_asked_for(tmp_path: Path, script: Path) -> None:
    door = tmp_path / "own" / "door"
    with template(door, "fractions", "numpy", "no_such_module") as process:
        first = ask(door, script, tmp_path)
        second = ask(
            door,
            script,
            tmp_path,
            preexec_fn=lambda: Path("/proc/self/oom_score_adj").write_text("777"),
        )
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(LIMIT_S) == 0
    for each in (first, second):
        assert each["parent"] == process.pid
        assert each["group"] == each["pid"], "what ends the group of one ends no other"
        assert (each["arguments"], each["folder"]) == (["one", "two"], str(tmp_path))
        assert (each["asked"], each["mine"], each["forked"]) == ("yes", None, "1")
        assert (each["beside"], each["loaded"], each["hidden"]) == (
            str(script.parent),
            True,
            True,
        )
    assert (first["oom"], second["oom"]) == (
        int(Path("/proc/self/oom_score_adj").read_text()),
        777,
    )
    assert first["pid"] != second["pid"]
    assert first["drawn"] != second["drawn"], "each has random numbers of its own"


def test_without_a_template_the_client_becomes_the_worker(
    tmp_path: Path, script: Path
) -> None:
    found = ask(tmp_path / "nothing", script, tmp_path)
    assert (found["arguments"], found["asked"], found["forked"]) == (
        ["one", "two"],
        "yes",
        None,
    )


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


SERIAL = "try:\n    import ray\nexcept ImportError:\n    pass\nelse:\n    raise SystemExit('ray')\n"
WITH_THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"


@pytest.mark.parametrize(
    ("source", "forked_with"),
    [
        pytest.param(SERIAL, True, id="fits"),
        pytest.param(WITH_THREAD, False, id="starts a thread"),
        pytest.param("import os\nos.abort()\n", False, id="dies"),
    ],
)
def test_a_template_does_without_large_modules_with_which_it_may_not_fork(
    tmp_path: Path, script: Path, source: str, forked_with: bool
) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "tried.py").write_text(source)
    door = tmp_path / "own" / "door"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(tmp_path / "modules"), prepend=os.pathsep)
        with template(door, "fractions", fork.TRIED, "tried") as process:
            found = ask(door, script, tmp_path)
            again = ask(door, script, tmp_path)
            _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    for each in (found, again):
        assert (each["forked"], each["loaded"], each["tried"]) == (
            "1",
            True,
            forked_with,
        )
        assert (each["parent"] == process.pid) is not forked_with
        assert each["collects"]
    assert (f"{fork.LEFT_OUT}tried\n" in errors) is not forked_with


def test_a_template_says_without_which_modules_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tried.py").write_text(WITH_THREAD)
    monkeypatch.syspath_prepend(tmp_path)
    partial = Template(["fractions"], tried=["tried"])
    whole = Template(["fractions"], tried=["statistics"])
    until = time.monotonic() + LIMIT_S
    while (left_out := partial.left_out()) is None:
        assert time.monotonic() < until
        time.sleep(0.05)
    why = "importing tried starts threads (1), which a fork would lack"
    assert left_out == f"{fork.LEFT_OUT}tried: {why}"
    assert (partial.why_not(), whole.left_out()) == (None, None)
    partial.stop()
    whole.stop()
    assert partial.left_out() is None


def test_set_up_is_the_client_at_once_or_what_ray_has(
    tmp_path: Path, script: Path
) -> None:
    (script.parent / "setup_worker.py").write_text("import sys\nprint(*sys.argv[1:])\n")
    door = tmp_path / "own" / "door"
    client = f"{sys.executable} -I -S {fork.__file__} --client {door}"

    def started(**context: object) -> str:
        words = [
            str(script),
            "one",
            f"--serialized-runtime-env-context={json.dumps(context)}",
            "--language=PYTHON",
        ]
        command = [sys.executable, fork.__file__, *words]
        return subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_S
        ).stdout

    with template(door) as process:
        found = json.loads(
            started(py_executable=client, env_vars={}, command_prefix=[])
        )
        assert (found["arguments"], found["parent"]) == (["one"], process.pid)
        assert process.stdin is not None
        process.stdin.close()
    for others in (
        {"py_executable": sys.executable},
        {"py_executable": client, "env_vars": {"A": "1"}},
        {},
    ):
        assert started(**others).startswith(
            f"{script} one --serialized-runtime-env-context="
        )


def test_what_ray_was_kept_from_importing_workers_import() -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "pyarrow", None)
        fork.ray_is_set_up()
        assert "pyarrow" not in sys.modules
        patched.setitem(sys.modules, "pyarrow", json)
        fork.ray_is_set_up()
        assert sys.modules["pyarrow"] is json


def connected(door: Path) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.settimeout(LIMIT_S)
    link.connect(str(door))
    return link


def test_a_client_that_stops_in_the_middle_does_not_block_the_others(
    tmp_path: Path, script: Path
) -> None:
    door = tmp_path / "own" / "door"
    with template(door, program=HURRIED) as process:
        with connected(door) as silent, connected(door) as stopped:
            stopped.sendall(b' {"arguments": [')
            assert ask(door, script, tmp_path)["parent"] == process.pid
            assert (silent.recv(1), stopped.recv(1)) == (b"", b""), (
                "they become workers themselves"
            )
        assert process.stdin is not None
        process.stdin.close()


def test_a_client_without_an_answer_becomes_the_worker(
    tmp_path: Path, script: Path
) -> None:
    door = tmp_path / "door"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(str(door))
        silent.listen()
        found = ask(door, script, tmp_path, program=HURRIED)
    assert (found["arguments"], found["forked"]) == (["one", "two"], None)


def test_no_fork_runs_for_a_client_that_has_gone(tmp_path: Path, script: Path) -> None:
    door = tmp_path / "own" / "door"
    reading, writing = os.pipe()
    asked = {
        "arguments": [str(script)],
        "environment": dict(os.environ),
        "folder": str(tmp_path),
    }
    with template(door) as process, open(reading) as output:
        with connected(door) as gone:
            socket.send_fds(gone, [b" "], [0, writing, writing])
            gone.sendall(json.dumps(asked).encode() + b"\0")
        os.close(writing)
        assert output.read() == "", "all that could write have ended without a word"
        assert ask(door, script, tmp_path)["parent"] == process.pid
        assert process.stdin is not None
        process.stdin.close()


def test_a_template_may_say_more_than_a_pipe_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "talks.py").write_text(
        "import sys\nprint('x' * 200_000, file=sys.stderr)\nsys.exit('the end')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    talking = Template(["talks"])
    until = time.monotonic() + LIMIT_S
    while (why := talking.why_not()) is None:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert why == "the end"


def test_a_fork_ends_with_its_client(tmp_path: Path, script: Path) -> None:
    script.write_text("import time\nprint('runs', flush=True)\ntime.sleep(600)\n")
    door = tmp_path / "own" / "door"
    command = [
        sys.executable,
        "-I",
        "-S",
        fork.__file__,
        "--client",
        str(door),
        str(script),
    ]
    with template(door) as process:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == "runs\n"
            client.kill()
            assert client.stdout.read() == "", (
                "the fork, which has it open as well, has ended"
            )
        assert process.stdin is not None
        process.stdin.close()


OWNER = """
import sys
from rlplace.workers.ray_launch.template import Template
owned = Template(["fractions"])
print(owned._door.parent, owned._process.pid, flush=True)
if sys.stdin.readline():
    owned.stop()
print("stopped", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_nothing_of_a_template_outlives_its_owner(end: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        folder, pid = owner.stdout.readline().split()
        assert Path(folder).exists()
        if end == "killed":
            owner.kill()
        else:
            owner.stdin.write("stop\n")
            owner.stdin.flush()
            assert owner.stdout.readline() == "stopped\n"
            assert not Path(folder).exists()
            owner.stdin.close()
    until = time.monotonic() + LIMIT_S
    while Path(folder).exists() or Path("/proc", pid).exists():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize("tried", [[], [fork.TRIED]])
@pytest.mark.parametrize("when", ["before", "during"])
def test_a_template_ends_with_its_driver_also_while_it_imports(
    tmp_path: Path, when: str, tried: list[str]
) -> None:
    """The import of a module takes as long as the test may; the driver is the other end of the standard input."""
    begun = tmp_path / "begun"
    (tmp_path / "never_imported.py").write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(begun)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(tmp_path / "door"))
        process = subprocess.Popen(
            [
                sys.executable,
                fork.__file__,
                "--template",
                str(door.fileno()),
                *tried,
                "never_imported",
            ],
            stdin=subprocess.PIPE,
            pass_fds=[door.fileno()],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )
        try:
            assert process.stdin is not None
            while when == "during" and not (begun.exists() and begun.read_text()):
                assert process.poll() is None
            process.stdin.close()
            process.wait(60.0)
            if begun.exists():
                assert not Path("/proc", begun.read_text()).exists()
        finally:
            process.kill()
            process.wait()

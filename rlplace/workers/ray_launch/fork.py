"""Start workers as forks of a template process that has imported their modules. Runs alone, without rlplace.

::

    fork.py --template: imports, waits ◀── fork.py --client: what Ray starts in place of Python; hands over its
        └── fork: becomes the worker           arguments, environment and descriptors 0-2, waits for the end

A fork is a Ray actor like any other, with a process and logs of its own; its death ends no other process. The template
must have one thread and no CUDA; if the imports break this rule, or the template has ended, the client becomes the
worker itself.

Ray starts `setup_worker.py` first, which imports Ray only to execute the client. A Ray that is started here starts this
file in its place: it is the client at once, or executes `setup_worker.py` for any other worker.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

# Variables for Ray processes only: Ray modules read at import which job they belong to. Ray imports the last two in
# each worker.
_OF_RAY = (
    "ray",
    "rlplace.workers.ray_launch.actors",
    "ray._common.pydantic_compat",
    "starlette.datastructures",
)
# Ray imports pyarrow in each worker to register table serialization, which is not used here. The import takes 0.1 s and
# memory, and starts threads, so it must not happen in the template.
_NOT_FOR_RAY = "pyarrow"
# Separates the modules that the template imports from those that only a fork of it tries to import
TRIED = "--tried"
# Begins the line of the error output that names the modules without which a template does
LEFT_OUT = "the template does without "
FORKED = "RLPLACE_FORKED"  # set in the environment of a fork
_OOM_SCORE = "/proc/self/oom_score_adj"
_CHUNK = 1 << 16  # bytes
_CONTEXT = "--serialized-runtime-env-context="
_LANGUAGE = "--language="  # an argument that setup_worker.py reads
_SENT_S = 5.0  # deadline for a client to send its request; other clients wait meanwhile
# deadline for the template's answer, whose imports may take long; Ray waits 60 s for a worker
_ANSWER_S = 45.0


def template(listening: str, modules: list[str]) -> None:
    """Run the template process: import the modules, then make one fork for each client, until standard input ends.

    `listening`: file descriptor, as a text, of an inherited socket at which clients connect. `modules`: names of the
    modules to import; those after `TRIED` are imported if this process can then still be forked. Exit with a message if
    this process cannot be forked safely, because the imports of the others have started threads or initialized CUDA.
    """
    at = modules.index(TRIED) if TRIED in modules else len(modules)
    tried = modules[at + 1 :]
    # Imports make many objects and little garbage; collections would take a fifth of the time.
    gc.disable()
    with socket.socket(fileno=int(listening)) as door:
        with ends_with_input():
            load(modules[:at])
        if not tried or not served_by_fork(door, tried):
            serve(door)


def served_by_fork(door: socket.socket, modules: list[str]) -> bool:
    """Fork this process. The fork imports `modules` and serves the clients until standard input ends.

    Return False, and write a line to the error output, if the fork has ended early, because it could not be forked in
    turn. `door`: socket at which clients connect.
    """
    # A new program inherits an ignored SIGCHLD, with which waitpid would fail.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if not child:
        # Ray may be imported only with the variables of a Ray process. vLLM can do without it.
        with ends_with_input(), kept_out("ray"):
            load(modules)
        serve(door)
        os._exit(0)
    ended_well = os.waitpid(child, 0)[1] == 0
    if not ended_well:
        # The fork may have left it switched on
        flags = fcntl.fcntl(sys.stdin, fcntl.F_GETFL)
        fcntl.fcntl(sys.stdin, fcntl.F_SETFL, flags & ~os.O_ASYNC)
        sys.stderr.write(f"{LEFT_OUT}{', '.join(modules)}\n")
        sys.stderr.flush()
    return ended_well


@contextlib.contextmanager
def kept_out(name: str) -> Iterator[None]:
    """Context manager in which importing the module `name` raises ImportError, unless it has been imported before."""
    kept = name not in sys.modules
    if kept:
        sys.modules[name] = None  # type: ignore[assignment]  # cannot be imported
    try:
        yield
    finally:
        if kept:
            del sys.modules[name]


@contextlib.contextmanager
def ends_with_input() -> Iterator[None]:
    """Context manager in which the system ends this process when the other end of its standard input is closed.

    The other end closes when the driver ends or is killed. The body of the `with` statement imports modules for some
    seconds. It does not read the standard input, so it would not notice the end of the driver.
    """
    descriptor = sys.stdin.fileno()
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    # A new program inherits an ignored signal.
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC)
    # It may have been closed before: nothing is ever written to it.
    if select.select([descriptor], [], [], 0)[0]:
        sys.exit()
    try:
        yield
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


def serve(door: socket.socket) -> None:
    ready = False
    while sys.stdin not in select.select([door, sys.stdin], [], [])[0]:
        link, _ = door.accept()
        with link:
            link.settimeout(_SENT_S)
            asked, descriptors = receive(link)
            if asked and not ready:
                os.environ.update(asked["environment"])
                with ends_with_input():
                    load(_OF_RAY)
                signal.signal(signal.SIGCHLD, signal.SIG_IGN)
                # A collection would write to all pages, and none would stay shared with the forks.
                gc.freeze()
                gc.enable()
                ready = True
            if asked and not os.fork():
                door.close()
                become(link, descriptors, **asked)
        for descriptor in descriptors:
            os.close(descriptor)


def load(modules: tuple[str, ...] | list[str]) -> None:
    for name in modules:
        # The worker that needs the module reports the error.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
        if len(threads := os.listdir("/proc/self/task")) > 1:
            sys.exit(
                f"importing {name} starts threads ({len(threads) - 1}), which a fork would lack"
            )
    if "torch" in sys.modules and _in_a_fork(sys.modules["torch"].cuda._is_in_bad_fork):
        sys.exit("an import has initialized CUDA, which a fork cannot use")


def _in_a_fork(holds: Callable[[], bool]) -> bool:
    """Fork this process, call `holds` in the child process, and return its result.

    torch tells only in a forked process whether CUDA was initialized before the fork.
    """
    # A new program inherits an ignored SIGCHLD, with which waitpid would fail.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if not (child := os.fork()):
        os._exit(holds())
    return os.waitpid(child, 0)[1] != 0


def receive(link: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a client's request, and the file descriptors that the client has sent with it.

    Return an empty request if the client has ended or is too slow. `link`: connection to the client.
    """
    message = b""
    descriptors = list[int]()
    with contextlib.suppress(OSError):
        message, descriptors, _, _ = socket.recv_fds(link, _CHUNK, 3)
        while not message.endswith(b"\0") and (more := link.recv(_CHUNK)):
            message += more
    return json.loads(message[:-1] if message.endswith(b"\0") else "{}"), descriptors


def become(
    link: socket.socket,
    descriptors: list[int],
    arguments: list[str],
    environment: dict[str, str],
    folder: str,
) -> None:
    """Turn this new fork into the worker: take over the client's descriptors and environment, run the script, and exit.

    `link`: connection to the client. `descriptors`: standard input, output and error of the client. `arguments`: the
    script and its arguments. `environment`, `folder`: environment and working folder of the client.
    """
    # Ray kills what is left of the process group of a process that ends.
    os.setpgid(0, 0)
    link.settimeout(None)
    try:
        link.send(b"!")
        score = link.recv(_CHUNK)
    except OSError:
        score = b""
    # The client has given up: it is gone, or it became the worker itself.
    if not score:
        os._exit(0)
    threading.Thread(target=end_with, args=(link,), daemon=True).start()
    # Lowering the OOM score needs privileges.
    with (
        contextlib.suppress(PermissionError),
        open(_OOM_SCORE, "wb") as own,
    ):
        own.write(score)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment, **{FORKED: "1"})
    os.chdir(folder)
    if _NOT_FOR_RAY not in sys.modules:
        sys.modules[_NOT_FOR_RAY] = None  # type: ignore[assignment]  # cannot be imported, until `ray_is_set_up`
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(arguments[0]))
    # NumPy seeds its global generator at import, so all forks would share the seed.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    runpy.run_path(arguments[0], run_name="__main__")
    sys.exit()


def ray_is_set_up() -> None:
    """Allow imports of pyarrow again, which a fork has prevented while Ray was set up in it."""
    if sys.modules.get(_NOT_FOR_RAY, "") is None:
        del sys.modules[_NOT_FOR_RAY]


def end_with(link: socket.socket) -> None:
    """Wait until the client at the other end of `link` ends, then end this process.

    If the worker is late, Ray kills only the client, because Ray does not know the fork before the worker has
    registered.
    """
    with contextlib.suppress(OSError):
        link.recv(1)
    os._exit(1)


def client(path: str, arguments: list[str]) -> None:
    """Ask the template for a fork, and wait until the fork ends. If there is no template, run the worker in this
    process.

    `path`: socket of the template. `arguments`: the worker's script and its arguments. Client and fork also end when
    the Ray server that has started the client ends.
    """
    asked = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
    }
    server = _server_of_ray()
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link,
    ):
        link.settimeout(_ANSWER_S)
        link.connect(path)
        socket.send_fds(link, [b" "], [0, 1, 2])
        link.sendall(json.dumps(asked).encode() + b"\0")
        if _answer(link, server, _ANSWER_S):
            # Ray raises the OOM score of workers so that they are killed before Ray itself.
            with open(_OOM_SCORE, "rb") as own:
                link.sendall(own.read())
            # Returns when the fork ends.
            _answer(link, server, None)
            return
    os.execv(sys.executable, [sys.executable, *arguments])


def _server_of_ray() -> list[int]:
    """Return a list with one file descriptor, which becomes readable when the parent process ends.

    The parent process is the Ray server. Return an empty list if Linux is older than 5.3.
    """
    try:
        return [os.pidfd_open(os.getppid())]
    except OSError:
        return []


def _answer(link: socket.socket, server: list[int], timeout_s: float | None) -> bytes:
    """Wait for one byte on `link`, and return it. Return an empty value if the connection has ended.

    `server`: result of `_server_of_ray`; if the Ray server ends during the wait, this process exits. `timeout_s`: the
    most seconds to wait; None: no limit. Raise TimeoutError at the deadline.
    """
    either: list[Any] = [link, *server]
    ready = select.select(either, [], [], timeout_s)[0]
    if not ready:
        raise TimeoutError
    if link not in ready:
        os._exit(1)
    return link.recv(1)


def set_up(script: str, arguments: list[str]) -> None:
    """Start the worker that Ray wants: as a client of the template if Ray's arguments say so, else by Ray's
    setup_worker.py.

    `script`: script of Ray that runs a worker. `arguments`: arguments that Ray has passed for it.
    """
    contexts = [
        json.loads(word.removeprefix(_CONTEXT))
        for word in arguments
        if word.startswith(_CONTEXT)
    ]
    wanted = {
        name: value for context in contexts for name, value in context.items() if value
    }
    command = shlex.split(wanted.pop("py_executable", ""))
    if "--client" in command and __file__ in command and not wanted:
        client(
            command[-1],
            [
                script,
                *(
                    word
                    for word in arguments
                    if not word.startswith((_CONTEXT, _LANGUAGE))
                ),
            ],
        )
    else:
        setup_worker = os.path.join(os.path.dirname(script), "setup_worker.py")
        os.execv(sys.executable, [sys.executable, setup_worker, script, *arguments])


if __name__ == "__main__":
    # The folder of this file would hide other modules of the same names.
    del sys.path[0]
    role, place, *rest = sys.argv[1:]
    if role == "--template":
        template(place, rest)
    elif role == "--client":
        client(place, rest)
    else:
        set_up(role, [place, *rest])
    # Skips the interpreter's teardown, which takes seconds.
    os._exit(0)

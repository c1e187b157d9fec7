"""The watch over Ray's own processes; processes and sockets are real, and stand for those of Ray."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import threading
from collections.abc import Iterator

import psutil
import pytest

from rlplace.errors import RayDied
from rlplace.workers.launch.group import Call, wait_until
from rlplace.workers.ray_launch import servers
from rlplace.workers.ray_launch.servers import Head, Servers, Started, watched
from rlplace.workers.ray_launch.templates import wait_ready
from tests.open_calls import slot_of

NAMES = ("gcs_server", "raylet", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
# Stands for a process of Ray: shows its name, and ends with the exit code that it reads.
_STANDS = (
    'exec -a "$0" bash -c "read -r code; exit \\$code" "$0" --log_dir=/tmp/ray/logs'
)


@pytest.fixture
def processes() -> Iterator[dict[str, subprocess.Popen[str]]]:
    with contextlib.ExitStack() as ended:
        found = {}
        for name in NAMES:
            found[name] = subprocess.Popen(
                ["bash", "-c", f"echo up; {_STANDS}", name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            ended.enter_context(found[name])
            ended.callback(found[name].kill)
        for name, process in found.items():
            assert process.stdout is not None
            process.stdout.readline()
            seen = psutil.Process(process.pid)
            while seen.cmdline()[:1] != [name]:
                pass
        yield found


@pytest.fixture
def started(
    processes: dict[str, subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> Started:
    monkeypatch.setattr(servers, "LOOK_S", 0.0)
    return Started([psutil.Process(each.pid) for each in processes.values()])


def killed(process: subprocess.Popen[str]) -> None:
    process.kill()
    _await_end(process)


def _await_end(process: subprocess.Popen[str]) -> None:
    """Wait until a process is dead, without asking how it ended."""
    seen = psutil.Process(process.pid)
    while seen.status() != psutil.STATUS_ZOMBIE:
        pass


def test_a_dead_raylet_ends_the_run_at_once(
    started: Started, processes: dict[str, subprocess.Popen[str]]
) -> None:
    watch = Servers(started)
    watch.check()
    killed(processes["raylet"])
    with pytest.raises(RayDied) as died:
        watch.check()
    text = str(died.value)
    assert text.startswith("cluster.ray: the raylet of the Ray")
    assert f"process {processes['raylet'].pid}, SIGKILL" in text
    assert "/tmp/ray/logs" in text
    assert not died.value.calls_go_on
    # The run saves.
    watch.check()


def test_a_raylet_that_ends_by_itself_has_lost_an_agent(
    started: Started, processes: dict[str, subprocess.Popen[str]]
) -> None:
    killed(processes["ray::DashboardAgent"])
    assert started.death() is None, "the raylet ends with it, and then the workers"
    pipe = processes["raylet"].stdin
    assert pipe is not None
    pipe.write("0\n")
    pipe.flush()
    _await_end(processes["raylet"])
    death = started.death()
    assert death is not None
    text = death.problem.render()
    assert "as it does when one of its agents has died" in text
    assert "its agents are DashboardAgent, RuntimeEnvAgent" in text
    assert "exit code 0" in text


def test_calls_may_end_after_the_death_of_the_gcs(
    started: Started,
    processes: dict[str, subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = Servers(started)
    killed(processes["gcs_server"])
    watch.check()
    with pytest.raises(RayDied, match="the GCS of the Ray") as died:
        watch.check(idle=True)
    assert died.value.calls_go_on
    # What is raised once is not raised again while the run saves.
    watch.check(idle=True)
    monkeypatch.setattr(servers, "PATIENCE_S", 0.0)
    watch = Servers(started)
    with pytest.raises(RayDied):
        watch.check()


def stopped(process: subprocess.Popen[str]) -> None:
    """Stop a process, and wait until it is stopped."""
    seen = psutil.Process(process.pid)
    seen.suspend()
    while seen.status() != psutil.STATUS_STOPPED:
        pass


def continued(process: subprocess.Popen[str]) -> None:
    seen = psutil.Process(process.pid)
    seen.resume()
    while seen.status() == psutil.STATUS_STOPPED:
        pass


def looks_for(watch: Servers, seconds: float, clock: list[float]) -> None:
    """Look twice a second, as a driver that waits for a call does."""
    for _ in range(int(2 * seconds)):
        clock[0] += 0.5
        watch.check()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(servers.time, "monotonic", lambda: now[0])
    return now


def test_a_raylet_that_stands_still_is_named_and_calls_may_end(
    clock: list[float],
    started: Started,
    processes: dict[str, subprocess.Popen[str]],
) -> None:
    watch = Servers(started)
    stopped(processes["raylet"])
    with pytest.raises(RayDied) as died:
        looks_for(watch, 15.0, clock)
    assert clock[0] <= 1015.0
    text = str(died.value)
    assert "the raylet of the Ray that this run has started stands still" in text
    assert f"process {processes['raylet'].pid}, state T for 8 s" in text
    assert "SIGSTOP" in text
    assert died.value.calls_go_on
    # The run saves.
    looks_for(watch, 10.0, clock)
    continued(processes["raylet"])


def test_a_raylet_that_goes_on_ends_no_run(
    clock: list[float],
    started: Started,
    processes: dict[str, subprocess.Popen[str]],
) -> None:
    watch = Servers(started)
    for _ in range(3):
        stopped(processes["raylet"])
        looks_for(watch, 7.0, clock)
        continued(processes["raylet"])
        looks_for(watch, 1.0, clock)
    # It has been stopped for long enough, and goes on before the running calls have to end.
    stopped(processes["raylet"])
    looks_for(watch, 9.0, clock)
    continued(processes["raylet"])
    looks_for(watch, 60.0, clock)
    assert watch.death() is None


def test_a_driver_that_was_stopped_with_its_raylet_has_not_seen_it_stand_still(
    clock: list[float],
    started: Started,
    processes: dict[str, subprocess.Popen[str]],
) -> None:
    """As when a scheduler suspends all processes of a job: the driver may be the first to go on."""
    watch = Servers(started)
    stopped(processes["raylet"])
    clock[0] += 3600.0
    looks_for(watch, 5.0, clock)
    continued(processes["raylet"])
    assert watch.death() is None


def test_a_busy_raylet_does_not_stand_still(
    clock: list[float],
    started: Started,
    processes: dict[str, subprocess.Popen[str]],
) -> None:
    """The processes only wait, so nothing can be seen of them but that they are not stopped."""
    looks_for(Servers(started), 600.0, clock)


@pytest.mark.parametrize(
    ("name", "shown"),
    [("gcs_server", "GCS"), ("ray::RuntimeEnvAgent", "agent for environments")],
)
def test_what_only_starts_workers_ends_a_run_that_starts_one(
    clock: list[float],
    started: Started,
    processes: dict[str, subprocess.Popen[str]],
    name: str,
    shown: str,
) -> None:
    watch = Servers(started)
    stopped(processes[name])
    looks_for(watch, 60.0, clock)
    assert not watch.answers(starting=True)
    with pytest.raises(RayDied) as died:
        watch.check(idle=True, starting=True)
    assert f"the {shown} of the Ray" in str(died.value)
    assert "a worker has to be started" in str(died.value)
    continued(processes[name])
    clock[0] += 0.5
    assert watch.answers(starting=True)


def test_what_workers_do_not_need_may_stand_still(
    clock: list[float],
    started: Started,
    processes: dict[str, subprocess.Popen[str]],
) -> None:
    watch = Servers(started)
    stopped(processes["ray::DashboardAgent"])
    looks_for(watch, 60.0, clock)
    watch.check(idle=True, starting=True)
    assert watch.answers(starting=True)
    continued(processes["ray::DashboardAgent"])


def test_saving_has_a_limit(
    started: Started,
    processes: dict[str, subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(servers, "ENDING_S", 0.0)
    watch = Servers(started)
    killed(processes["raylet"])
    for _ in range(2):
        with pytest.raises(RayDied):
            watch.check()


def test_waits_for_calls_and_for_ray_end_with_the_error() -> None:
    class Died(Exception):
        pass

    def interrupt() -> None:
        raise Died

    call = Call(slot_of("env"), "run")
    call.interrupt = interrupt
    with pytest.raises(Died):
        wait_until([call], 600.0, "ALL_COMPLETED")
    with pytest.raises(Died):
        wait_ready(lambda seconds: False, 600.0, interrupt)


def test_a_joined_ray_is_watched_by_its_address(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(servers, "HEAD_LOOK_S", 0.0)
    monkeypatch.setattr(servers, "SILENT_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        head = Head(address)
        assert head.death() is None
    with caplog.at_level(logging.WARNING, "rlplace"):
        assert head.death() is None
        assert head.death() is None
    # Said once
    assert caplog.text.count("has not answered for 0 s") == 1
    assert address in caplog.text
    monkeypatch.setattr(servers, "HEAD_GONE_S", 0.0)
    death = head.death()
    assert death is not None
    assert "once Ray's head runs again" in death.problem.render()
    assert death.calls_go_on


def wait_for_answer(watch: Servers, clock: list[float]) -> None:
    """As a start of workers waits."""
    while not watch.answers(starting=True):
        watch.check(idle=True, starting=True)
        clock[0] += 0.5


def test_a_head_that_accepts_and_does_not_answer_is_named_where_a_worker_starts(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    clock: list[float],
) -> None:
    """So does a GCS that stands still. Ray's calls would wait for it; runs that start no worker go on."""
    monkeypatch.setattr(servers, "_CONNECT_S", 0.02)
    with socket.create_server(("127.0.0.1", 0), backlog=500) as listening:
        watch = Servers(Head(f"127.0.0.1:{listening.getsockname()[1]}"))
        looks_for(watch, 60.0, clock)
        began = clock[0]
        with (
            caplog.at_level(logging.WARNING, "rlplace"),
            pytest.raises(RayDied, match="has not answered for 30 s"),
        ):
            wait_for_answer(watch, clock)
        assert clock[0] == began + 30.0
    assert caplog.text.count("has not answered for 10 s") == 1
    assert caplog.text.count("[ray-died]") == 1


@pytest.mark.parametrize("answer", [b"\0", b""])
def test_a_head_that_answers_or_closes_the_connection_lives(answer: bytes) -> None:
    """A GCS that wants TLS closes connections without it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            link, _ = listening.accept()
            with link:
                link.recv(1)
                link.sendall(answer)

        head = Head(f"127.0.0.1:{listening.getsockname()[1]}")
        thread = threading.Thread(target=serve)
        thread.start()
        assert head.answers()
        thread.join()
    # Nothing listens any more.
    assert not head.answers()


def test_a_head_that_answers_again_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "HEAD_LOOK_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    head = Head(f"127.0.0.1:{port}")
    assert head.death() is None
    with socket.create_server(("127.0.0.1", port)):
        assert head.death() is None
    monkeypatch.setattr(servers, "HEAD_GONE_S", 60.0)
    assert head.death() is None, "its silence counts from now"


def test_nothing_is_watched_where_nothing_is_seen() -> None:
    assert watched([], None) is None
    assert watched([], "127.0.0.1:1") is not None

"""Writing checkpoints: whole or not at all, whatever ends the process; what is kept; the lock of a run."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlplace.checkpoints import report_failed, report_written
from rlplace.checkpoints.find import find, verify
from rlplace.checkpoints.store import Saver, Store, in_use, lock
from rlplace.errors import ConfigError, OutputError
from tests.checkpoint_writer import PATIENCE_S, RANKS, contents, save, write_ranks

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "hybrid_ppo" / "2026-11-22_10-00-00"
    folder.mkdir(parents=True)
    return folder


def kept(run: Path) -> list[str]:
    return sorted(f.name for f in (run / "checkpoints").iterdir())


def commit(store: Store, part: Path, *, timeout_s: float = PATIENCE_S) -> None:
    store.commit(part, contents(), timeout_s=timeout_s, cancelled=threading.Event())


def test_a_checkpoint_has_what_was_written_and_nothing_else(run: Path) -> None:
    saved = save(Store(run, keep_last=2, keep_best=0), 12, score=3.5)
    found = find(str(run), run.parent)
    assert found == saved
    assert (found.iteration, found.version, found.score, found.run) == (
        12,
        12,
        3.5,
        run,
    )
    assert (dict(found.ranks), dict(found.libraries)) == (RANKS, {"rlplace": "0.1.0"})
    verify(found)
    there = sorted(
        str(f.relative_to(found.folder)) for f in found.folder.rglob("*") if f.is_file()
    )
    shards = ["actor/shard_0.bin", "actor/shard_1.bin", "env/shard_0.bin"]
    assert there == sorted(
        [*shards, "config.yaml", "plan.json", "run.json", "manifest.json"]
    )
    assert sorted(found.files) == sorted(set(there) - {"manifest.json"})
    assert found.text("config.yaml") == "seed: 1\n"
    assert (run / "checkpoints" / "latest").read_text() == "000012\n"


def test_the_newest_are_kept_and_the_best_beside_them(run: Path) -> None:
    store = Store(run, keep_last=2, keep_best=2)
    for iteration, score in enumerate([1.0, 9.0, None, float("nan"), 5.0, 2.0, 8.0], 1):
        save(store, iteration, score=score)
    assert kept(run) == ["000002", "000005", "000006", "000007", "latest"]


def test_what_an_earlier_attempt_saved_later_goes_when_the_run_is_resumed_before_it(
    run: Path,
) -> None:
    store = Store(run, keep_last=3, keep_best=1)
    for iteration in (2, 4, 6, 8):
        save(store, iteration, score=float(iteration))
    save(store, 6)
    assert kept(run) == ["000002", "000004", "000006.1", "latest"]
    newest = find("auto", run.parent)
    assert newest is not None
    assert (newest.folder.name, newest.iteration) == ("000006.1", 6)


def test_a_damaged_checkpoint_counts_as_none_that_is_kept(run: Path) -> None:
    store = Store(run, keep_last=2, keep_best=0)
    for iteration in (1, 2):
        save(store, iteration)
    (run / "checkpoints" / "000002" / "plan.json").unlink()
    save(store, 3)
    assert kept(run) == ["000001", "000002", "000003", "latest"]


@pytest.mark.parametrize(
    ("report", "why"),
    [("OSError: no such device", "no such device"), ("", "the disk is full")],
)
def test_a_rank_that_fails_fails_the_checkpoint_at_once_and_not_the_last_one(
    run: Path, report: str, why: str
) -> None:
    """A report that is empty is of a disk that had no room for it."""
    store = Store(run, keep_last=1, keep_best=0)
    save(store, 1)
    part = store.begin(2, RANKS)
    write_ranks(part)
    (part / "actor" / "rank_00001.json").unlink()
    report_failed(part / "actor", 1, report)
    with pytest.raises(
        OutputError, match="actor rank_00001 could not write its part"
    ) as error:
        commit(store, part)
    assert error.value.code == "checkpoint-not-written"
    assert why in str(error.value)
    assert kept(run) == ["000001", "latest"]


def test_a_rank_that_is_late_is_named(run: Path) -> None:
    store = Store(run, keep_last=1, keep_best=0)
    part = store.begin(2, RANKS)
    (part / "actor" / "a.bin").write_bytes(b"a")
    report_written(part / "actor", 0, ["a.bin"])
    with pytest.raises(
        OutputError, match="actor has 2 ranks, and not all have written within"
    ):
        commit(store, part, timeout_s=0.1)


def test_a_file_that_lost_bytes_since_its_rank_reported_is_noticed(run: Path) -> None:
    store = Store(run, keep_last=1, keep_best=0)
    part = store.begin(2, RANKS)
    write_ranks(part)
    os.truncate(part / "env" / "shard_0.bin", 17)
    with pytest.raises(
        OutputError, match=r"env/shard_0\.bin was written with 5,000 bytes and has 17"
    ):
        commit(store, part)
    assert kept(run) == []


def test_saving_goes_on_behind_the_run_and_says_how_it_ended(run: Path) -> None:
    store = Store(run, keep_last=1, keep_best=0)
    saver = Saver(store, timeout_s=PATIENCE_S)
    assert saver.poll() is None
    part = store.begin(1, RANKS)
    saver.start(part, contents())
    assert saver.poll() is None
    assert saver.busy
    write_ranks(part)
    saved = saver.finish(PATIENCE_S)
    assert saved is not None
    assert saved.error is None
    assert saved.checkpoint == find("auto", run.parent)
    assert not saver.busy

    saver.start(store.begin(2, RANKS), contents())
    given_up = saver.finish(0.1)  # no rank writes
    assert given_up is not None
    assert given_up.checkpoint is None
    assert "it was given up before it was whole" in str(given_up.error)
    assert kept(run) == ["000001", "latest"]


def test_what_the_disk_holds_is_given_up_and_the_next_one_is_saved(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, stuck, left = (
        Store(run, keep_last=2, keep_best=0),
        threading.Event(),
        threading.Event(),
    )
    saver = Saver(store, timeout_s=PATIENCE_S)
    commit_now = store.commit

    def held(*arguments: Any, **named: Any) -> Any:
        stuck.wait(PATIENCE_S)
        left.set()
        raise OutputError.of(run, OSError(5, "Input/output error"))

    monkeypatch.setattr(store, "commit", held)
    saver.start(store.begin(1, RANKS), contents())
    given_up = saver.finish(0.1)
    assert given_up is not None
    assert "not written within 0.1 s" in str(given_up.error)
    monkeypatch.setattr(store, "commit", commit_now)
    part = store.begin(2, RANKS)
    write_ranks(part)
    saver.start(part, contents())
    stuck.set()
    assert left.wait(PATIENCE_S)
    saved = saver.finish(PATIENCE_S)
    assert saved is not None
    assert saved.error is None
    assert kept(run) == ["000002", "latest"]


def saver_thread() -> threading.Thread:
    (thread,) = (
        thread for thread in threading.enumerate() if thread.name == "checkpoint"
    )
    return thread


def test_what_is_committed_is_not_given_up_while_others_are_removed(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlplace.checkpoints.store._GIVE_UP_S", 0.1)
    store, removing, free = (
        Store(run, keep_last=1, keep_best=0),
        threading.Event(),
        threading.Event(),
    )
    save(store, 1)
    retain = store.retain

    def slowly(newest: Any) -> None:
        removing.set()
        free.wait(PATIENCE_S)
        retain(newest)

    monkeypatch.setattr(store, "retain", slowly)
    saver = Saver(store, timeout_s=PATIENCE_S)
    part = store.begin(2, RANKS)
    write_ranks(part)
    saver.start(part, contents())
    assert removing.wait(PATIENCE_S)
    saved, thread = saver.finish(0.1), saver_thread()
    assert saved is not None
    assert saved.checkpoint is not None
    assert (saved.checkpoint.folder.name, saved.error, saver.busy) == (
        "000002",
        None,
        False,
    )
    free.set()
    thread.join(PATIENCE_S)
    assert kept(run) == ["000002", "latest"]


def test_what_is_committed_after_it_was_given_up_removes_none(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlplace.checkpoints.store._GIVE_UP_S", 0.1)
    store, free = Store(run, keep_last=1, keep_best=0), threading.Event()
    save(store, 1)
    commit_now = store.commit

    def held(*arguments: Any, **named: Any) -> Any:
        free.wait(PATIENCE_S)
        return commit_now(*arguments, **named)

    monkeypatch.setattr(store, "commit", held)
    saver = Saver(store, timeout_s=PATIENCE_S)
    part = store.begin(2, RANKS)
    write_ranks(part)
    saver.start(part, contents())
    saved, thread = saver.finish(0.1), saver_thread()
    assert saved is not None
    assert saved.checkpoint is None
    free.set()
    thread.join(PATIENCE_S)
    assert kept(run) == ["000001", "000002", "latest"]


def test_killed_at_any_moment_a_run_keeps_a_whole_checkpoint(run: Path) -> None:
    """40 deaths by SIGKILL: 8 at set moments, the others at drawn ones."""
    command = [sys.executable, "-m", "tests.checkpoint_writer", str(run), "40"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    moments = done.stdout.splitlines()
    assert len(moments) == 40
    states = {
        re.sub(r"[0-9]+", "N", line.split("| left")[1]).strip() for line in moments
    }
    assert states >= {"", "N.part"}, (
        "deaths while a checkpoint was written, and between two"
    )


def in_a_fork(work: Callable[[], None]) -> int:
    """The exit code of `work` in a process of its own, whose limits and user are its own."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  a fork must not run the tests that follow
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def refused(save_next: Callable[[], object], *told: str) -> Callable[[], None]:
    def work() -> None:
        with pytest.raises(OutputError) as error:
            save_next()
        assert [text for text in told if text not in str(error.value)] == []

    return work


def test_a_disk_without_room_leaves_the_last_whole_checkpoint(run: Path) -> None:
    store = Store(run, keep_last=1, keep_best=0)
    first = save(store, 1)
    part = store.begin(2, RANKS)
    write_ranks(part)

    def without_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        refused(lambda: commit(store, part), "cannot write", "000002.part", "fix: ")()

    assert in_a_fork(without_room) == 0
    assert find("auto", run.parent) == first
    assert kept(run) == ["000001", "latest"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can write as another user")
def test_a_folder_that_cannot_be_written_leaves_the_last_whole_checkpoint(
    run: Path,
) -> None:
    store = Store(run, keep_last=1, keep_best=0)
    first = save(store, 1)
    for folder in (run / "checkpoints", *list(run.parents)[:-2]):
        folder.chmod(0o755)

    def as_nobody() -> None:
        os.seteuid(65534)
        refused(
            lambda: store.begin(2, RANKS),
            "cannot write: Permission denied",
            "000002.part",
        )()
        refused(
            lambda: lock(run).__enter__(), "cannot write: Permission denied", "run.lock"
        )()

    assert in_a_fork(as_nobody) == 0
    assert find("auto", run.parent) == first


def test_a_second_run_in_the_folder_is_refused_until_the_first_is_dead(
    run: Path,
) -> None:
    holding = (
        "import sys, time; from pathlib import Path; from rlplace.checkpoints.store import lock\n"
        "with lock(Path(sys.argv[1])):\n    print('locked', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", holding, str(run)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(ConfigError) as error, lock(run):
            pass
        assert error.value.codes == ("run-in-use",)
        assert f"process {other.pid} on {os.uname().nodename} writes in it" in str(
            error.value
        )
    finally:
        other.kill()
        other.communicate()
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        try:
            with lock(run):
                assert f"process {os.getpid()} " in (run / "run.lock").read_text()
            return
        except ConfigError:
            time.sleep(0.05)
    pytest.fail("the lock outlived its process")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_flock_is_named_and_the_run_goes_on(
    run: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with lock(run) as warning:
        assert warning is not None
        text = warning.render()
    assert "its file system has no flock" in text
    assert os.strerror(number) in text
    assert "bytes are free" not in text
    assert not in_use(run)


def test_a_lock_that_is_granted_has_no_warning(run: Path) -> None:
    with lock(run) as warning:
        assert warning is None


def test_an_error_of_the_run_itself_passes_through_the_lock(run: Path) -> None:
    with pytest.raises(FileNotFoundError), lock(run):
        raise FileNotFoundError("something else")
    with lock(run):
        pass

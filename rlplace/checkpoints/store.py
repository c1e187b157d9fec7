"""The checkpoints of one run: written in a `.part` folder, renamed when all is on the disk, old ones removed."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import math
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from rlplace.checkpoints import FileRecord, failed, record_of, write_whole, written
from rlplace.checkpoints.checkpoint import MANIFEST, Checkpoint, read
from rlplace.checkpoints.find import FOLDER, PART, folders_of
from rlplace.checkpoints.locks import lock_file
from rlplace.codes import config_error, problem
from rlplace.errors import ConfigError, OutputError, Problem, RlplaceError

LOCK = "run.lock"
# Key of the errors about a checkpoint that is not written
_KEY = "checkpoint"

_POLL_S = 0.05  # between two looks for the reports of ranks
_GIVE_UP_S = 1.0  # that a cancelled thread has to end


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What the driver adds to the state that components write: texts, and entries of the manifest.

    `ranks`: component -> number of its ranks. `texts`: name of a file -> its content. `version`: the policy version.
    `score`: score of the policy, to compare checkpoints; None: unknown. `libraries`: library -> its version.
    """

    ranks: Mapping[str, int]  # of each component that writes its state
    texts: Mapping[str, str]  # config.yaml, plan.json, run.json
    version: int  # of the policy
    # Higher is better. A checkpoint whose score is None or not finite is never among the best.
    score: float | None
    libraries: Mapping[str, str]


class Store:
    """Writes the checkpoints of a run, one at a time, and removes old ones.

    Only the process that has locked the run uses it.
    """

    def __init__(self, run: Path, *, keep_last: int, keep_best: int) -> None:
        self._run = run
        self._folder = run / FOLDER
        self._keep_last = keep_last
        self._keep_best = keep_best

    def begin(self, iteration: int, components: Iterable[str]) -> Path:
        """Make the folder in which a checkpoint is written, with a folder in it for each component. Return the folder.

        Folders of earlier checkpoints that were never completed are removed. Raises OutputError.
        """
        for left in self._folder.glob(f"*{PART}"):
            # A late rank may still write into the folder. Then the folder is removed at the next checkpoint.
            shutil.rmtree(left, ignore_errors=True)

        # A second attempt at an iteration has a number behind its name.
        name = f"{iteration:06}"
        attempt = 0
        while (self._folder / name).exists():
            attempt += 1
            name = f"{iteration:06}.{attempt}"
        part = self._folder / f"{name}{PART}"
        try:
            part.mkdir(parents=True)
            for component in components:
                (part / component).mkdir()
        except OSError as error:
            raise OutputError.of(part, error) from error
        return part

    def commit(
        self,
        part: Path,
        contents: Contents,
        *,
        timeout_s: float,
        cancelled: threading.Event,
    ) -> Checkpoint:
        """Wait until all ranks have written, turn the folder `part` into a valid checkpoint, and return the checkpoint.

        `timeout_s`: the most seconds to wait for the ranks. `cancelled`: ends the wait when it is set. Raises
        OutputError if the checkpoint cannot be completed; `part` is then removed, and the other checkpoints are
        unchanged.
        """
        try:
            files = self._collect(part, contents, timeout_s, cancelled)
            return self._publish(part, contents, files)
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            raise OutputError.of(part, error) from error
        except OutputError:
            shutil.rmtree(part, ignore_errors=True)
            raise

    def _collect(
        self,
        part: Path,
        contents: Contents,
        timeout_s: float,
        cancelled: threading.Event,
    ) -> dict[str, FileRecord]:
        """Wait until all ranks have written. Return path below `part` -> record, for the files of all components.

        `timeout_s`: the most seconds to wait. `cancelled`: ends the wait when it is set. Raises OutputError and
        OSError.
        """
        deadline_s = time.monotonic() + timeout_s
        files = dict[str, FileRecord]()
        for component, ranks in contents.ranks.items():
            found = _written(part, component, ranks)
            while found is None:
                _check_failed(part, contents.ranks)
                if time.monotonic() > deadline_s:
                    late = problem(
                        "checkpoint-not-written",
                        _KEY,
                        str(part),
                        error="ranks-late",
                        component=component,
                        ranks=ranks,
                        timeout_s=timeout_s,
                    )
                    raise OutputError(late)
                if cancelled.wait(_POLL_S):
                    raise OutputError(_not_written(part, "given-up"))
                found = _written(part, component, ranks)
            for name, record in found.items():
                files[f"{component}/{name}"] = record

        # Check that the files still have the sizes that their ranks have reported.
        for name, record in files.items():
            size = (part / name).stat().st_size
            if size != record.bytes:
                changed = problem(
                    "checkpoint-not-written",
                    _KEY,
                    str(part),
                    error="changed",
                    name=name,
                    written=record.bytes,
                    size=size,
                )
                raise OutputError(changed)
        return files

    def _publish(
        self, part: Path, contents: Contents, files: Mapping[str, FileRecord]
    ) -> Checkpoint:
        """Write the driver's files into the folder `part`, rename the folder, and return the checkpoint.

        Raises OSError. All files are on the disk before the folder gets its final name. `files`: path below `part` ->
        record, for the files of all components.
        """
        # The reports of the ranks are in the manifest from now on.
        for component in contents.ranks:
            for report in (part / component).glob("rank_*.json"):
                report.unlink()
        for name, text in contents.texts.items():
            write_whole(part / name, text)
        score = contents.score
        if score is not None and not math.isfinite(score):
            score = None
        texts = {name: record_of(part / name) for name in contents.texts}
        checkpoint = Checkpoint(
            folder=part.with_suffix(""),
            iteration=int(part.name.partition(".")[0]),
            version=contents.version,
            score=score,
            ranks=dict(contents.ranks),
            libraries=dict(contents.libraries),
            files={**files, **texts},
            saved_at=datetime.now(UTC),
        )
        write_whole(part / MANIFEST, checkpoint.manifest())
        for folder, _, _ in os.walk(part, topdown=False):
            _sync(Path(folder))
        # From here on the checkpoint is valid.
        part.rename(checkpoint.folder)
        _sync(self._folder)
        _sync(self._run)
        return checkpoint

    def retain(self, newest: Checkpoint) -> None:
        """Make the file `latest` name the checkpoint `newest`; keep the newest and the best checkpoints; remove others.

        Other checkpoints of the same or a later iteration than `newest` are from before the run was resumed at an
        earlier iteration, so they are removed. Damaged checkpoints are kept, because their score is not known. Raises
        OutputError.
        """
        try:
            try:
                write_whole(self._folder / "latest", newest.folder.name + "\n")
            finally:  # on a full disk too: this makes room
                self._remove(self._surplus(newest))
        except OSError as error:
            raise OutputError.of(self._folder, error) from error

    def adopt(self, copy: Checkpoint) -> Checkpoint:
        """Copy a whole checkpoint from another folder, make it one of this run, and return it. Raises OutputError."""
        part = self.begin(copy.iteration, ())
        try:
            shutil.copytree(copy.folder, part, dirs_exist_ok=True)
            for folder, _, names in os.walk(part, topdown=False):
                for name in names:
                    _sync_file(Path(folder) / name)
                _sync(Path(folder))
            part.rename(part.with_suffix(""))
            _sync(self._folder)
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            raise OutputError.of(part, error) from error
        return dataclasses.replace(copy, folder=part.with_suffix(""))

    def _surplus(self, newest: Checkpoint) -> list[Path]:
        """Return the folders of the checkpoints that `retain` removes."""
        others: list[Checkpoint] = []  # newest first
        for folder in folders_of(self._run):
            if folder != newest.folder:
                with contextlib.suppress(ConfigError):
                    others.append(read(folder))
        earlier = [c for c in others if c.iteration < newest.iteration]
        # The newest checkpoint is kept too, so one fewer of the other checkpoints is kept.
        kept = earlier[: self._keep_last - 1]
        rest = earlier[self._keep_last - 1 :]
        scored = [c for c in rest if c.score is not None]
        scored.sort(key=lambda c: (c.score or 0.0, c.iteration), reverse=True)
        best = scored[: self._keep_best]
        return [c.folder for c in others if c not in kept and c not in best]

    def _remove(self, folders: Iterable[Path]) -> None:
        for folder in folders:
            part = folder.with_name(folder.name + PART)
            folder.rename(part)  # a half-removed one must not be taken for whole
            _sync(self._folder)
            shutil.rmtree(part)


def _sync(folder: Path) -> None:
    """Wait until the names of a folder's files are on the disk. Raises OSError."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _sync_file(file: Path) -> None:
    """Wait until the content of a file is on the disk. Raises OSError."""
    opened = os.open(file, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _check_failed(part: Path, components: Iterable[str]) -> None:
    """Raise OutputError if a rank of one of `components` has reported that it could not write its files.

    `part`: the checkpoint's folder.
    """
    for component in components:
        failure = failed(part / component)
        if failure is not None:
            rank, why = failure
            if not why:
                # The rank had no room to write the reason.
                why = str(OutputError.of(part, OSError(errno.ENOSPC, "")))
            refused = problem(
                "checkpoint-not-written",
                _KEY,
                str(part),
                error="rank",
                component=component,
                rank=rank,
                reason=why,
            )
            raise OutputError(refused)


def _written(part: Path, component: str, ranks: int) -> dict[str, FileRecord] | None:
    """Return name -> record of all files that the ranks of a component have written; None until all have.

    `part`: the checkpoint's folder. Raises OutputError for a report that cannot be read.
    """
    try:
        return written(part / component, ranks)
    except ValueError as error:
        unread = problem(
            "checkpoint-not-written", _KEY, str(part), error="report", reason=error
        )
        raise OutputError(unread) from error


def _not_written(part: Path, error: str) -> Problem:
    """Return the problem of a checkpoint that was not completed. `error`: name of one of the texts of this problem."""
    return problem("checkpoint-not-written", _KEY, str(part), error=error)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The result of saving a checkpoint.

    `checkpoint`: the whole checkpoint; None if it was not completed. `error`: the error, or None. With a checkpoint and
    an error, the checkpoint is whole, but old checkpoints could not be removed.
    """

    checkpoint: Checkpoint | None
    error: RlplaceError | None


class Saver:
    """Completes one checkpoint at a time in a thread.

    An error of writing is part of the result and is not raised, so the run goes on even if a checkpoint cannot be
    written.
    """

    def __init__(self, store: Store, *, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None
        self._saved: list[Saved] = []  # by the thread; the last one counts

    @property
    def busy(self) -> bool:
        """Whether a checkpoint was started and its result was not returned yet by `poll` or `finish`."""
        return self._thread is not None

    def start(self, part: Path, contents: Contents) -> None:
        """Start the thread that waits for the ranks and completes the checkpoint in the folder `part`."""
        assert not self.busy, "one checkpoint is written at a time"
        self._cancelled = threading.Event()
        self._saved = []
        arguments = (part, contents, self._cancelled, self._saved)
        self._thread = threading.Thread(
            target=self._save, args=arguments, name="checkpoint", daemon=True
        )
        self._thread.start()

    def poll(self) -> Saved | None:
        """Return the result of saving, without waiting. Each result is returned only once.

        Return None while the checkpoint is being written, and if no checkpoint was started.
        """
        return self._take(0.0)

    def finish_within(self, timeout_s: float) -> Saved | None:
        """Wait at most `timeout_s` seconds for the checkpoint that is being written, and return the result.

        Return None if it is not complete by then; it goes on being written.
        """
        return self._take(timeout_s)

    def finish(self, timeout_s: float) -> Saved | None:
        """Wait at most `timeout_s` seconds for the checkpoint that is being written, and return the result.

        If the checkpoint is not complete by then, cancel it. Return None if no checkpoint was started.
        """
        saved = self._take(timeout_s)
        if saved is not None or not self.busy:
            return saved
        self._cancelled.set()
        saved = self._take(_GIVE_UP_S)
        if saved is not None:
            return saved

        # The thread waits for the disk and is left behind. A checkpoint that the thread may still commit is whole, and
        # the thread removes no old checkpoint.
        self._thread = None
        if self._saved:  # it is committed, and others are still being removed
            return self._saved[-1]
        late = problem(
            "checkpoint-not-written", _KEY, error="late", timeout_s=timeout_s
        )
        return Saved(checkpoint=None, error=OutputError(late))

    def _take(self, timeout_s: float) -> Saved | None:
        """Wait at most `timeout_s` seconds for the thread, and return its result. Each result is returned only once.

        Return None if the thread has not ended, and if no thread was started.
        """
        if self._thread is None:
            return None
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return None
        self._thread = None
        return self._saved[-1]

    def _save(
        self,
        part: Path,
        contents: Contents,
        cancelled: threading.Event,
        saved: list[Saved],
    ) -> None:
        """Complete the checkpoint in the folder `part`, remove old checkpoints, and append the result to `saved`.

        Runs in the thread. The result is appended as soon as the checkpoint is complete, and again at the end.
        `cancelled`: ends the wait for ranks when it is set.
        """
        checkpoint = None
        error: RlplaceError | None = OutputError(_not_written(part, "bug"))
        try:
            checkpoint = self._store.commit(
                part, contents, timeout_s=self._timeout_s, cancelled=cancelled
            )
            # Append the result before old checkpoints are removed, since `finish` may not wait for the removal.
            saved.append(Saved(checkpoint=checkpoint, error=None))
            # After a cancellation no old checkpoint is removed: the run may resume from an older one.
            if not cancelled.is_set():
                self._store.retain(checkpoint)
            error = None
        except RlplaceError as raised:
            error = raised
        finally:
            saved.append(Saved(checkpoint=checkpoint, error=error))


@contextlib.contextmanager
def lock(run: Path) -> Iterator[Problem | None]:
    """Return a context manager that locks a run's folder for this process.

    The system releases the lock if the process dies. The `with` block gets None, or a warning if the folder cannot be
    locked because its file system has no flock. Raises ConfigError if another process has locked the folder, and
    OutputError if the folder cannot be written.
    """
    try:
        file, without = _locked(run)
    except OSError as error:
        raise OutputError.of(run / LOCK, error) from error
    with file:
        if without is None:
            yield None
        else:
            reason = without.strerror or str(without)
            yield problem(
                "run-not-locked", "runner.output_dir", str(run), reason=reason
            )


def in_use(run: Path) -> bool:
    """Return whether a process has locked the run; False if the lock file cannot be read."""
    try:
        with open(run / LOCK, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _locked(run: Path) -> tuple[TextIO, OSError | None]:
    """Lock the lock file of a run, write the number of this process into it, and return the open file.

    Also return the error of a file system without flock; None if the file is locked. Raises ConfigError if another
    process has locked the run, and OSError.
    """
    file = open(run / LOCK, "a+", encoding="utf-8")  # noqa: SIM115  `lock` closes it
    try:
        without = lock_file(file)
    except BlockingIOError as error:
        file.seek(0)
        raise _in_use(run, file.read().strip()) from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file, without


def _in_use(run: Path, by: str) -> ConfigError:
    writer = by or "a process"
    return config_error("run-in-use", "resume", str(run), writer=writer)

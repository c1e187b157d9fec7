"""Write a rank's checkpoint files in a background thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from rlplace.checkpoints import report_failed, report_written
from rlplace.codes import config_error
from rlplace.errors import ConfigError, OutputError
from rlplace.workers.worker import WorkerContext

# longest wait of a closing worker; files that are not reported by then belong to no checkpoint
_CLOSE_S = 5.0


class FilesBehind:
    """Writes a rank's files of a checkpoint in a background thread, one checkpoint after the other.

    It reports in the checkpoint's folder whether the files are complete. After an error, the checkpoint is reported as
    failed, and the worker continues: the run keeps the earlier checkpoint. Owns the thread.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._thread: threading.Thread | None = None

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the files that are being written are complete, if there are any.

        `timeout_s`: the most seconds to wait; None: without a deadline.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)

    def start(self, folder: Path, write: Callable[[], Iterable[str]]) -> None:
        """Wait until the earlier checkpoint is written, and then call `write` in a background thread.

        `folder`: folder of the checkpoint. `write`: creates this rank's files in `folder`, flushed to disk, and returns
        their names.
        """
        self.wait()
        name = f"{self._context.owner} writes {folder.name}"
        self._thread = threading.Thread(
            target=self._write, args=(folder, write), name=name, daemon=True
        )
        self._thread.start()

    def _write(self, folder: Path, write: Callable[[], Iterable[str]]) -> None:
        rank = self._context.rank
        try:
            report_written(folder, rank, write())
        except Exception as error:  # noqa: BLE001  # whatever it is, the driver says it: the thread has no caller
            text = (
                str(OutputError.of(folder, error))
                if isinstance(error, OSError)
                else f"{type(error).__name__}: {error}"
            )
            self._context.log.warning("cannot save: %s", text)
            try:
                report_failed(folder, rank, text)
            # Usually the disk is full, but it still has room for the file name of a report.
            except OSError:
                with contextlib.suppress(OSError):
                    (folder / f"rank_{rank:05}.failed").touch()

    def close(self) -> None:
        self.wait(_CLOSE_S)


def other_state(component: str, got: str, expected: str) -> ConfigError:
    return config_error(
        "other-state",
        "resume",
        got,
        error="worker",
        component=component,
        expected=expected,
    )


def unreadable_state(component: str, path: Path, error: BaseException) -> ConfigError:
    return config_error(
        "checkpoint-damaged",
        "resume",
        str(path),
        error="unreadable",
        component=component,
        kind=type(error).__name__,
        reason=error,
    )

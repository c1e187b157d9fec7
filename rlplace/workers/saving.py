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
    """Writes one checkpoint after the other and reports each. Owns the thread.

    Errors are reported too and do not end the worker: the run continues and keeps the earlier checkpoint.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._thread: threading.Thread | None = None

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the checkpoint that is being written, if any."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def start(self, folder: Path, write: Callable[[], Iterable[str]]) -> None:
        """Start writing: `write` creates this rank's files in `folder`, flushed to disk, and returns their names."""
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

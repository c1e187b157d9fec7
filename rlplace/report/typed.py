"""Records with what a run can be repeated: its command, the folder of the command, and the output on the terminal."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rlplace.checkpoints import write_whole
from rlplace.json_text import parsed
from rlplace.workers.launch.output import Above

COMMAND = "command.json"
SCREEN = "screen.txt"
_CODES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")  # of colours and of the cursor
_GIT_S = 5.0
# The user and password, or the token, of an address such as postgresql://me:secret@host/runs
_PASSWORD = re.compile(r"(?<=://)[^/?#\s'\"]+@")


def without_passwords(text: str) -> str:
    """Return `text` with `***` in place of the user and password of each address."""
    return _PASSWORD.sub("***@", text)


class Typed:
    """Records a command and its output on the terminal, during the `with` statement.

    If the command makes several runs, the record is written into the folder of each run.
    """

    def __init__(self, text: str) -> None:
        """Prepare the record. `text`: the command line as it was typed."""
        self._text = text
        self._words: Sequence[str] = ()
        self._began = ""
        # Folder of the run under way, and the file of its output
        self._folder: Path | None = None
        self._file: TextIO | None = None
        # Output until the file is open
        self._shown: list[str] = []
        self._writing = threading.Lock()

    def __enter__(self) -> Typed:
        self._before = sys.stdout, sys.stderr
        sys.stdout = Noted(sys.stdout, self)
        sys.stderr = Noted(sys.stderr, self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.stdout, sys.stderr = self._before
        self.job(())

    def job(self, words: Sequence[str]) -> None:
        """Begin the record of a new run of this command. From now on, output belongs to this run.

        `words`: the words of the command line from which the run's config is composed.
        """
        with self._writing:
            if self._file is not None:
                self._file.close()
            self._words = words
            self._began = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            self._folder = None
            self._file = None
            self._shown = []

    def into(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Add this command to the record in a run's folder, and copy its output into a file in that folder.

        The output so far is written at once, later output when it comes. `facts`: properties of this machine, name ->
        value, written together with the command. A second call for the same folder has no effect. Raises OSError.
        """
        if folder == self._folder:
            return
        self._folder = folder
        here = Path.cwd()
        overrides = []
        for word in self._words:
            if "=" in word and not word.startswith("-"):
                overrides.append(without_passwords(word.lstrip("+")))
        entry = {
            "typed": without_passwords(self._text),
            "overrides": overrides,
            "folder": str(here),
            "began": self._began,
            "commit": commit_of(here),
            **facts,
        }
        entries = [*commands(folder), entry]
        write_whole(folder / COMMAND, json.dumps(entries, indent=1) + "\n")

        # The output so far, then all that follows.
        file = open(  # noqa: SIM115  its user closes it
            folder / SCREEN,
            "a",
            buffering=1,
            encoding="utf-8",
            errors="backslashreplace",
        )
        with self._writing:
            file.write("".join(self._shown))
            self._file = file
            self._shown = []

    def note(self, text: str) -> None:
        """Add a piece of output to the record, without terminal codes. Errors of the disk are ignored."""
        plain = _CODES.sub("", text)
        with self._writing, contextlib.suppress(OSError, ValueError):
            if self._file is None:
                self._shown.append(plain)
            else:
                self._file.write(plain)


class Noted(Above):
    """A standard stream that also adds everything written to it to the record of a `Typed`."""

    def __init__(self, below: TextIO, by: Typed) -> None:
        self._below = below
        self._by = by

    @property
    def below(self) -> TextIO:
        return self._below

    def over(self, stream: TextIO) -> Noted:
        """Return `stream`, wrapped so that its text is added to the same record as the text of this stream."""
        return Noted(stream, self._by)

    def write(self, text: str, /) -> int:
        self._by.note(text)
        return super().write(text)


def commands(folder: Path) -> list[dict[str, Any]]:
    """Return the recorded commands of a run, oldest first; an empty list if the record is missing or damaged."""
    try:
        found = parsed((folder / COMMAND).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    if isinstance(found, list):
        return [each for each in found if isinstance(each, dict)]
    return []


def commit_of(folder: Path) -> dict[str, Any] | None:
    """Return the git commit of a folder (`id`), and whether tracked files differ from the commit (`changed`).

    Return None if git does not find a commit.
    """

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *words],
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},  # only looks
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_GIT_S,
            check=True,
        ).stdout.strip()

    try:
        return {
            "id": git("log", "-1", "--format=%H"),
            "changed": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return None


def as_typed(program: str, words: Sequence[str]) -> str:
    """Return the command line for `program` with the arguments `words`, quoted for a shell."""
    return f"{program} {shlex.join(words)}".rstrip()

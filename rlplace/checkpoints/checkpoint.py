"""One checkpoint: its manifest, and whether every file is as it was written. Nothing here changes a checkpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

from rlplace import codes
from rlplace.checkpoints import FileRecord, record_of
from rlplace.errors import ConfigError, Problem
from rlplace.json_text import parsed, parsed_object

FORMAT = 1  # of the manifest; a later one may have other files
MANIFEST = "manifest.json"
# The texts of a checkpoint.
CONFIG = "config.yaml"
PLAN = "plan.json"
RUN = "run.json"
# Code of damaged files; the fix is added where other checkpoints are known.
DAMAGED = "checkpoint-damaged"

_THREADS = 8  # that hash files at once


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint.

    `iteration`: the number of iterations that were done. `version`: the policy version. `score`: score of the policy,
    to compare checkpoints; None: unknown. `ranks`: component -> number of its ranks. `libraries`: library -> its
    version. `files`: path below `folder` -> record, for all files except the manifest. `saved_at`: when it was saved;
    None: written by an older version. `notes`: texts about newer checkpoints that are not used. `chosen`: lines of
    text that say why the run of this checkpoint was taken, and which other runs there are.
    """

    folder: Path
    iteration: int  # number of iterations before it
    version: int  # of the policy
    score: float | None  # higher is better; None where nothing was measured
    ranks: Mapping[str, int]  # of each component that wrote its state
    libraries: Mapping[str, str]  # their versions
    files: Mapping[str, FileRecord]
    saved_at: datetime | None = None  # with a time zone
    notes: tuple[str, ...] = ()  # newer ones that were passed over, and why
    chosen: tuple[str, ...] = ()  # empty if there was no choice

    @property
    def run(self) -> Path:
        """The folder of the run that wrote the checkpoint."""
        return self.folder.parent.parent

    def text(self, name: str) -> str:
        """Return the text of config.yaml, plan.json or run.json. `name`: the name of the file."""
        return (self.folder / name).read_text(encoding="utf-8")

    def values(self, name: str) -> dict[str, Any]:
        """Return the content of a JSON file in the checkpoint, such as run.json. `name`: the name of the file.

        Raises ConfigError if the file cannot be read.
        """
        file = self.folder / name
        try:
            return parsed_object(file.read_bytes().decode("utf-8"))
        except (OSError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise codes.config_error(
                DAMAGED, "resume", str(file), error="text", reason=reason
            ) from error

    def manifest(self) -> str:
        """Return the text of the checkpoint's manifest, which is JSON."""
        values: dict[str, Any] = {"format": FORMAT}
        for field in dataclasses.fields(self):
            if field.name not in ("folder", "notes", "chosen", "saved_at"):
                values[field.name] = getattr(self, field.name)
        if self.saved_at is not None:
            values["saved_at"] = self.saved_at.isoformat()
        files = {}
        for name, record in sorted(self.files.items()):
            files[name] = dataclasses.asdict(record)
        values["files"] = files
        return json.dumps(values, indent=1, allow_nan=False) + "\n"


def read(folder: Path, key: str = "resume") -> Checkpoint:
    """Return the checkpoint in a folder, after a check that all files have the sizes that the manifest says.

    `key`: the config key or argument that errors name. Raises ConfigError with every file whose size differs, and
    OSError for files that cannot be read.
    """
    manifest = folder / MANIFEST
    if not manifest.exists():
        raise codes.config_error(DAMAGED, key, str(manifest), error="no-manifest")
    try:
        values = parsed_object(manifest.read_bytes().decode("utf-8"))
        # A later format may have other keys, so it is checked before all others.
        form = values["format"]
        if type(form) is not int or form < 1:
            raise ValueError(f"its format is {form!r}, and not {FORMAT}")
        if form > FORMAT:
            raise _newer(key, manifest, form)
        checkpoint = _checkpoint(folder, values)
    except ConfigError:
        raise
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        reason = f"{type(error).__name__}: {error}"
        raise codes.config_error(
            DAMAGED, key, str(manifest), error="manifest", reason=reason
        ) from error
    # Sizes only: hashes take as long as reading all files, see `changed_files`.
    problems = []
    for name, record in checkpoint.files.items():
        problem = _size_problem(key, folder / name, record)
        if problem is not None:
            problems.append(problem)
    if problems:
        raise ConfigError(problems)
    return checkpoint


def _checkpoint(folder: Path, values: Mapping[str, Any]) -> Checkpoint:
    """Return the checkpoint that a manifest describes. `values`: the content of the manifest, decoded from JSON.

    Raises ValueError, KeyError, TypeError or AttributeError if the values are not those of a manifest.
    """
    files = {}
    for name, record in values["files"].items():
        size = int(record["bytes"])
        sha256 = str(record["sha256"])
        files[_inside(name)] = FileRecord(bytes=size, sha256=sha256)
    ranks = {str(component): int(count) for component, count in values["ranks"].items()}
    _check_files(ranks, files)
    # The folder's name begins with the iteration, by which checkpoints are sorted.
    iteration = int(values["iteration"])
    named = folder.name.partition(".")[0]
    if named.isdecimal() and int(named) != iteration:
        raise ValueError(f"its iteration is {iteration}, and its folder is {named}")
    score = values["score"]
    if score is not None:
        score = float(score)
    libraries = values["libraries"].items()
    return Checkpoint(
        folder=folder,
        iteration=iteration,
        version=int(values["version"]),
        score=score,
        ranks=ranks,
        libraries={str(name): str(version) for name, version in libraries},
        files=files,
        saved_at=_time(values),
    )


def saved_at(folder: Path) -> datetime | None:
    """Return the time in the manifest of a checkpoint; None if there is no manifest, no time, or no valid JSON.

    Raises OSError if the manifest exists and cannot be read.
    """
    try:
        return _time(parsed((folder / MANIFEST).read_bytes()))
    except (
        FileNotFoundError,
        ValueError,
        TypeError,
        AttributeError,
    ):
        return None


def _time(values: Mapping[str, Any]) -> datetime | None:
    """Return the time at which a checkpoint was saved, from the values of its manifest; None if they have no time.

    Raises ValueError or TypeError if the value is no time with a time zone.
    """
    written = values.get("saved_at")
    if written is None:
        return None
    time = datetime.fromisoformat(written)
    if time.tzinfo is None:
        raise ValueError(f"{written!r} has no time zone")
    return time


def _check_files(ranks: Mapping[str, int], files: Collection[str]) -> None:
    """Check that a manifest lists files, and that they are of components that it names.

    Raises ValueError if there are no files, or if files are of a component that has no ranks. `ranks`: component ->
    number of its ranks. `files`: paths below the checkpoint's folder.
    """
    if not files:
        raise ValueError("it lists no file")
    written = {name.partition("/")[0] for name in files if "/" in name}
    for component in sorted(written - ranks.keys()):
        raise ValueError(f"it lists files of {component}, which has no ranks")


def _inside(name: str) -> str:
    """Return `name`, a path in a manifest, unchanged.

    Raises ValueError if the path leads outside of the checkpoint's folder.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{name!r} is outside of the checkpoint")
    return name


def _size_problem(key: str, file: Path, record: FileRecord) -> Problem | None:
    """Return the problem of a file that is missing, or whose size differs from its record; None without a problem.

    `key`: the config key or argument that the problem is about.
    """
    expected = record.bytes
    if not file.is_file():
        return codes.problem(
            DAMAGED, key, str(file), error="missing", expected=expected
        )
    found = file.stat().st_size
    if found == expected:
        return None
    error = "longer"
    if found < expected:
        error = "cut-off"
    return codes.problem(
        DAMAGED, key, str(file), error=error, expected=expected, found=found
    )


def changed_files(checkpoint: Checkpoint, key: str = "resume") -> list[Problem]:
    """Return a problem for each file whose SHA-256 differs from the manifest. All files are read. Raises OSError.

    `key`: the config key or argument that the problems are about.
    """

    def compare(name: str) -> Problem | None:
        file = checkpoint.folder / name
        expected = checkpoint.files[name].sha256
        found = record_of(file).sha256
        if found == expected:
            return None
        return codes.problem(
            DAMAGED,
            key,
            str(file),
            error="content",
            expected=expected[:16],
            found=found[:16],
        )

    # Hashing releases Python's lock, so threads use several cores.
    with ThreadPoolExecutor(_THREADS) as threads:
        compared = list(threads.map(compare, checkpoint.files))
    return [problem for problem in compared if problem is not None]


def _newer(key: str, manifest: Path, form: int) -> ConfigError:
    return codes.config_error(
        "checkpoint-newer", key, str(manifest), format=FORMAT, found=form
    )

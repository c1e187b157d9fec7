"""Find the checkpoint from which a run resumes: the newest whole one, or the one that the user names."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rlplace import codes
from rlplace.checkpoints.checkpoint import (
    CONFIG,
    DAMAGED,
    MANIFEST,
    Checkpoint,
    changed_files,
    read,
    saved_at,
)
from rlplace.errors import ConfigError, Problem
from rlplace.units import counted

AUTO = "auto"
# What other libraries call the newest checkpoint
_NEWEST = ("latest", "last", "newest", "true", "True")
ANEW = "start a new run: resume=null"
FOLDER = "checkpoints"  # of a run
PART = ".part"  # behind the name of a checkpoint that is being written or removed
# Name of a checkpoint: its iteration, and the number of the attempt at this iteration.
NAME = re.compile(r"([0-9]{6,})(?:\.([0-9]+))?")

_LISTED = 5  # folders that an error names
_MOST_OTHERS = 3  # most other runs that the output of "auto" names
# A time further in the future than this comes from a wrong clock
_AHEAD = timedelta(hours=1)


def find(resume: str, runs: Path, key: str = "resume") -> Checkpoint | None:
    """Return the checkpoint that `resume` names.

    `resume`: the folder of a run, which means its newest checkpoint; the folder of a checkpoint; or "auto", which means
    the newest whole checkpoint of all runs of the job. `runs`: the folder of the job's runs. `key`: the config key or
    argument that errors name.

    With "auto", the files of the checkpoint are compared with their hashes. `notes` of the result has a text about each
    newer checkpoint that is damaged or cannot be read, `chosen` about the other runs of the job. None means that "auto"
    has found no checkpoint of the job. Raises ConfigError if the checkpoint does not exist or is damaged.
    """
    try:
        if resume == AUTO:
            return _newest(runs, key)
        return _named(Path(resume), runs, key)
    except OSError as error:
        raise _unreadable(error, key) from error


def verify(checkpoint: Checkpoint, key: str = "resume") -> None:
    """Compare all files of a checkpoint with the hashes in its manifest.

    Raise ConfigError with every file whose SHA-256 differs, if there are any. `key`: the config key or argument that
    the error names.
    """
    try:
        problems = changed_files(checkpoint, key)
    except OSError as error:
        raise _unreadable(error, key) from error
    if problems:
        raise _with_fix(problems, checkpoint.folder, key)


def whole_ones(runs: Path) -> Iterator[Checkpoint]:
    """Yield the whole checkpoints of all runs of a job, in the order in which `resume=auto` tries them.

    A checkpoint counts as whole if all its files have the sizes that its manifest says; hashes are not compared.
    `runs`: the folder of the job's runs.
    """
    for folder in _all(runs, [], "resume"):
        # Pass over damaged and unreadable checkpoints.
        with contextlib.suppress(ConfigError, OSError):
            yield read(folder)


def newest_in(runs: Path, key: str) -> Path | None:
    """Return the newest whole checkpoint in a folder of runs, such as `runs/hopper`: that of the run that saved last.

    None if `runs` is not such a folder: it is the folder of a run or of a checkpoint, or no run in it has a whole
    checkpoint. `key`: the user's argument, for errors. Raises ConfigError if the folder cannot be read.
    """
    try:
        if _folders(runs) or (runs / CONFIG).exists():
            return None
        return _newest_whole([runs])
    except OSError as error:
        raise _unreadable(error, key) from error


def folders_of(run: Path) -> list[Path]:
    """Return the folders of a run's checkpoints, damaged checkpoints too, the newest first."""
    folder = run / FOLDER
    if not folder.is_dir():
        return []
    found = [f for f in folder.iterdir() if NAME.fullmatch(f.name) and f.is_dir()]
    return sorted(found, key=_order, reverse=True)


def _order(folder: Path) -> tuple[int, int]:
    """Return the iteration of a checkpoint, and the number of the attempt at this iteration, from the folder's name.

    With this key, the checkpoints of a run are sorted by age.
    """
    named = NAME.fullmatch(folder.name)
    assert named is not None
    return int(named[1]), int(named[2] or 0)


def _newest(runs: Path, key: str) -> Checkpoint | None:
    """Return the newest whole checkpoint of all runs in the folder `runs`; None if there is no checkpoint.

    The files are compared with their hashes. Raises ConfigError with the problems of all checkpoints if none of them is
    whole. `key`: the config key or argument that errors name.
    """
    passed: list[Problem] = []  # of newer ones
    saved = _runs(runs, passed, key)
    for folder in _folders_of(saved):
        try:
            found = read(folder, key)
            changed = changed_files(found, key)
        except ConfigError as error:
            if set(error.codes) != {DAMAGED}:
                raise
            changed = [*error.problems]
        if not changed:
            notes = tuple(map(_passed_over, passed))
            chosen = tuple(_chosen(found.run, saved, key))
            return dataclasses.replace(found, notes=notes, chosen=chosen)
        passed += changed
    if not passed:
        return None
    fix = f"{_without(key)}, or bring back the files"
    fixed = [dataclasses.replace(p, fix=p.fix or fix) for p in passed]
    raise ConfigError(fixed)


def _passed_over(problem: Problem) -> str:
    """Return a note about a newer checkpoint that is not used. `problem`: the problem of this checkpoint."""
    note = f"passed over: {problem.what}: {problem.got}"
    if problem.why:
        note += f": {problem.why}"
    return note


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A run with checkpoints.

    `folders`: folders of its checkpoints, the newest first. `saved_at`: time at which the newest was saved. `recorded`:
    whether this time comes from a manifest; otherwise it is the time of a file, which copying changes. `ahead`: whether
    this time is in the future.
    """

    folders: tuple[Path, ...]
    saved_at: datetime
    recorded: bool
    ahead: bool

    @property
    def run(self) -> Path:
        """The folder of the run."""
        return self.folders[0].parent.parent

    @property
    def iteration(self) -> int:
        """The iteration of its newest checkpoint."""
        return _order(self.folders[0])[0]

    @property
    def order(self) -> tuple[bool, float, int]:
        """The sort key of the run: runs are sorted by the time of their newest checkpoint, the latest last.

        A run with a time in the future comes first, since the clock of its machine was wrong. If two runs have the same
        time, one is a copy of the other; the run with more iterations comes last.
        """
        return not self.ahead, self.saved_at.timestamp(), self.iteration

    def __str__(self) -> str:
        when = f"{self.saved_at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
        if not self.recorded:
            when += " by the time of its file"
        return f"{when} after {counted(self.iteration, 'iteration')}"


def _runs(runs: Path, unreadable: list[Problem], key: str) -> list[_Run]:
    """Return the runs with checkpoints in the folder `runs`. The run that saved last comes first.

    `unreadable`: the problem of each run that this user may not read is appended to this list. `key`: the config key or
    argument that these problems name.
    """
    if not runs.is_dir():
        return []
    found = list[_Run]()
    # If the keys of runs are equal, the first name comes first
    for run in sorted(runs.iterdir()):
        try:
            folders = folders_of(run)
            if folders:
                found.append(_run(folders))
        except PermissionError as error:
            unreadable += _unreadable(error, key).problems
    return sorted(found, key=lambda run: run.order, reverse=True)


def _run(folders: Sequence[Path]) -> _Run:
    """Return the run of the checkpoints in `folders`, the newest first."""
    recorded = [time for folder in folders if (time := saved_at(folder)) is not None]
    last = max(recorded or map(_file_time, folders))
    return _Run(
        folders=tuple(folders),
        saved_at=last,
        recorded=bool(recorded),
        ahead=last > datetime.now(UTC) + _AHEAD,
    )


def _file_time(folder: Path) -> datetime:
    """Return the time of a checkpoint's files. It is used for checkpoints of older versions, which record no time."""
    last = folder / MANIFEST
    if not last.exists():
        last = folder
    return datetime.fromtimestamp(last.stat().st_mtime, UTC)


def _folders_of(runs: Iterable[_Run]) -> Iterator[Path]:
    """Yield the checkpoint folders of `runs`: run by run, of each run the newest checkpoint first."""
    for run in runs:
        yield from run.folders


def _chosen(taken: Path, runs: Sequence[_Run], key: str) -> list[str]:
    """Return lines of text that say why the run `taken` was taken, and which other runs there are.

    `runs`: the runs with checkpoints, the one that saved last first. There is no text if there is no other run. `key`:
    the config key or argument that chooses a run.
    """
    if len(runs) < 2:
        return []
    (chosen,) = (run for run in runs if run.run == taken)
    others = [run for run in runs if run.run != taken]
    lines = [f"of {len(runs)} runs, {taken.name} saved last: {chosen}"]
    for run in others[:_MOST_OTHERS]:
        line = f"    not taken: {_taking(run.run, key)}, saved {run}"
        if run.ahead:
            line += (
                "; this time is in the future, so the clock of its machine was wrong"
            )
        elif run.order == chosen.order:
            line += "; one is a copy of the other"
        elif run.iteration > chosen.iteration:
            line += "; it has more iterations"
        lines.append(line)
    if len(others) > _MOST_OTHERS:
        lines.append(f"    and {len(others) - _MOST_OTHERS} older ones")
    return lines


def _all(runs: Path, unreadable: list[Problem], key: str) -> Iterable[Path]:
    """Yield the checkpoint folders of all runs in the folder `runs`: run by run, the run that saved last comes first.

    Of each run, the newest checkpoint comes first. `unreadable`: the problem of each run that this user may not read is
    appended to this list. `key`: the config key or argument that these problems name.
    """
    return _folders_of(_runs(runs, unreadable, key))


def _named(path: Path, runs: Path, key: str) -> Checkpoint:
    """Return the checkpoint that a path names: the folder of a checkpoint, or the newest checkpoint of a run.

    `runs`: the folder of the job's runs. `key`: the config key or argument that errors name. Raises ConfigError if the
    path has no checkpoint or if the checkpoint is damaged; the error offers another checkpoint, if there is one.
    """
    if not path.exists():
        raise _missing(path, runs, key)
    folders = _folders(path)
    if not folders:
        raise _none_in(path, runs, key)
    # Make the path absolute, so that the run's folder is two folders above it, for a path such as 000012 too.
    folder = folders[0].absolute()
    try:
        return read(folder, key)
    except ConfigError as error:
        if set(error.codes) != {DAMAGED}:
            raise
        raise _with_fix(error.problems, folder, key) from error


def _folders(path: Path) -> list[Path]:
    """Return the checkpoint folders that a path stands for, the newest first.

    `path`: the folder of a checkpoint, of a run's checkpoints, or of a run.
    """
    if _is_one(path):
        return [path]
    if path.name == FOLDER:
        return folders_of(path.parent)
    return folders_of(path)


def _is_one(path: Path) -> bool:
    """Return whether a path is the folder of a checkpoint, which may be whole or damaged."""
    named = NAME.fullmatch(path.name) is not None
    return path.is_dir() and named and path.absolute().parent.name == FOLDER


def _with_fix(problems: Sequence[Problem], damaged: Path, key: str) -> ConfigError:
    """Return the error about a damaged checkpoint. It offers the newest other checkpoint of the run that is whole.

    `problems`: the problems of the checkpoint. `damaged`: the folder of the checkpoint.
    """
    fix = _without(key) + ", or bring back the file"
    for folder in folders_of(damaged.parent.parent):
        if folder != damaged and _whole(folder):
            fix = _taking(folder, key)
            break
    return ConfigError([dataclasses.replace(problem, fix=fix) for problem in problems])


def _without(key: str) -> str:
    if key == "resume":
        return ANEW
    return "name another checkpoint"


def _taking(path: Path, key: str) -> str:
    """Return the word of a command line that chooses a checkpoint.

    The word is "resume=<path>" if `key` is "resume", else the path alone.
    """
    if key == "resume":
        return shlex.quote(f"{key}={path}")
    return shlex.quote(str(path))


def _whole(folder: Path) -> bool:
    """Return whether the checkpoint in a folder can be read and all files have the sizes that the manifest says."""
    try:
        read(folder)
    except (ConfigError, OSError):
        return False
    return True


def _newest_whole(places: Iterable[Path]) -> Path | None:
    """Return the newest whole checkpoint in the first of the folders `places` that has one; None if none of them has
    one.

    `places`: folders that contain runs.
    """
    for place in places:
        for folder in _all(place, [], ""):
            if _whole(folder):
                return folder
    return None


def _missing(path: Path, runs: Path, key: str) -> ConfigError:
    """Return the error about a path that does not exist. It offers a similar path, else the job's newest checkpoint.

    `runs`: the folder of the job's runs. `key`: the config key or argument that the error names.
    """
    absolute = path.absolute()
    above = next(parent for parent in absolute.parents if parent.exists())
    lacking, *rest = absolute.relative_to(above).parts
    folders = [folder for folder in above.iterdir() if folder.is_dir()]
    names = sorted(f.name for f in folders if not f.name.endswith(PART))

    # Look for a folder with a similar name that has the rest of the path.
    proposed = None
    for name in difflib.get_close_matches(lacking, names, n=1):
        for similar in ((above / name).joinpath(*rest), above / name):
            newest = _folders(similar)[:1]
            if proposed is None and newest and _whole(newest[0]):
                proposed = similar
    if proposed is None:
        places = [runs]
        if key != "resume":
            places.append(Path("runs") / path.name)  # by the name of a config
        proposed = _newest_whole(places)
    fix = _without(key)
    if key == "resume" and path.name in _NEWEST:
        fix = f"resume={AUTO}"
    elif proposed is not None:
        fix = _taking(proposed, key)

    return codes.config_error(
        "resume-not-found",
        key,
        str(path),
        lacking=lacking,
        above=above,
        listed=", ".join(names[-_LISTED:]) or "no folders",
        words=fix,
    )


def _none_in(path: Path, runs: Path, key: str) -> ConfigError:
    """Return the error about a path without a checkpoint.

    The error offers a checkpoint in a folder below the path, else the job's newest checkpoint. `runs`: the folder of
    the job's runs. `key`: the config key or argument that the error names.
    """
    code = "not-a-checkpoint"
    error = "neither"
    if path.name.endswith(PART):
        error = "part"
    elif (path / MANIFEST).exists():
        error = "moved"
    elif (path / FOLDER).is_dir() or (path / CONFIG).exists() or path.name == FOLDER:
        code = "no-checkpoint"
        error = ""
    elif path.is_file() or any(path.glob("*.safetensors")):
        error = "weights"
    # Of a folder of jobs, look at the runs of each job, the newest job first.
    inside: list[Path] = []
    if path.is_dir():
        inside = [folder for folder in path.iterdir() if folder.is_dir()]
    inside.sort(key=lambda folder: folder.stat().st_mtime_ns, reverse=True)
    proposed = _newest_whole([path, *inside, runs])
    fix = _without(key)
    if proposed is not None:
        fix = _taking(proposed, key)
    return codes.config_error(
        code,
        key,
        str(path),
        error=error,
        manifest=MANIFEST,
        folder=FOLDER,
        words=fix,
    )


def _unreadable(error: OSError, key: str) -> ConfigError:
    return codes.config_error(
        "checkpoint-unreadable",
        key,
        str(error.filename),
        reason=error.strerror or error,
    )

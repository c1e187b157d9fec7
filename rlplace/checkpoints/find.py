"""Find the checkpoint that a run goes on with: the newest whole one, or the one that the user names."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rlplace.checkpoints.checkpoint import (
    CONFIG,
    DAMAGED,
    MANIFEST,
    Checkpoint,
    changed_files,
    read,
)
from rlplace.errors import ConfigError, Problem

AUTO = "auto"
ANEW = "start anew: resume=null"
FOLDER = "checkpoints"  # of a run
PART = ".part"  # behind the name of one that is being written or removed
NAME = re.compile(
    r"([0-9]{6,})(?:\.([0-9]+))?"
)  # of a checkpoint: its iteration, and which attempt at it

_LISTED = 5  # of what is there, in an error


def find(resume: str, runs: Path, key: str = "resume") -> Checkpoint | None:
    """Return the checkpoint that `resume` names: a run's newest, or one by its folder.

    "auto": the newest whole one of all `runs` of a job, its files compared already, with a note on every newer one
    that is damaged or cannot be read; None where the job has none yet. Raises ConfigError about `key`.
    """
    try:
        if resume == AUTO:
            return _newest(runs, key)
        return _named(Path(resume), runs, key)
    except OSError as error:
        raise _unreadable(error, key) from error


def verify(checkpoint: Checkpoint, key: str = "resume") -> None:
    """Compare the SHA-256 of all its files with its manifest. Raises ConfigError with every file that differs."""
    try:
        problems = changed_files(checkpoint, key)
    except OSError as error:
        raise _unreadable(error, key) from error
    if problems:
        raise _with_fix(problems, checkpoint.folder, key)


def whole_ones(runs: Path) -> Iterator[Checkpoint]:
    """Yield the whole checkpoints of all `runs`, in the order in which "auto" looks at them; files are not compared."""
    for folder in _all(runs, [], "resume"):
        with contextlib.suppress(
            ConfigError, OSError
        ):  # what is damaged or cannot be read is not offered
            yield read(folder)


def folders_of(run: Path) -> list[Path]:
    """Return the folders of a run's checkpoints, damaged ones too, the newest first."""
    folder = run / FOLDER
    found = (
        [f for f in folder.iterdir() if NAME.fullmatch(f.name) and f.is_dir()]
        if folder.is_dir()
        else []
    )
    return sorted(found, key=_order, reverse=True)


def _order(folder: Path) -> tuple[int, int]:
    named = NAME.fullmatch(folder.name)
    assert named is not None
    return int(named[1]), int(named[2] or 0)


def _newest(runs: Path, key: str) -> Checkpoint | None:
    passed: list[Problem] = []
    for folder in _all(runs, passed, key):
        try:
            found = read(folder, key)
            changed = changed_files(found, key)
        except ConfigError as error:
            if set(error.codes) != {DAMAGED}:
                raise
            changed = [*error.problems]
        if changed:
            passed += changed
            continue
        notes = tuple(
            f"passed over: {p.what}: {p.got}" + (f": {p.why}" if p.why else "")
            for p in passed
        )
        return dataclasses.replace(found, notes=notes)
    if passed:
        fix = _without(key) + ", or bring back the files"
        raise ConfigError(
            [dataclasses.replace(problem, fix=problem.fix or fix) for problem in passed]
        )
    return None


def _all(runs: Path, unreadable: list[Problem], key: str) -> Iterable[Path]:
    """Yield the checkpoints of the run that saved last, newest first, then those of the run before it.

    Runs that another user keeps closed are added to `unreadable` instead.
    """
    saved = {}
    for run in runs.iterdir() if runs.is_dir() else ():
        try:
            if folders := folders_of(run):
                saved[max(map(_saved_at, folders))] = folders
        except PermissionError as error:
            unreadable += _unreadable(error, key).problems
    for _, folders in sorted(saved.items(), reverse=True):
        yield from folders


def _saved_at(folder: Path) -> tuple[int, str]:
    manifest = folder / MANIFEST
    return (manifest if manifest.exists() else folder).stat().st_mtime_ns, str(folder)


def _named(path: Path, runs: Path, key: str) -> Checkpoint:
    if not path.exists():
        raise _missing(path, runs, key)
    if folders := _folders(path):
        try:
            return read(
                folders[0].absolute(), key
            )  # its run is two above, also of a path such as 000012
        except ConfigError as error:
            if set(error.codes) != {DAMAGED}:
                raise
            raise _with_fix(error.problems, folders[0].absolute(), key) from error
    raise _none_in(path, runs, key)


def _folders(path: Path) -> list[Path]:
    """Return the checkpoints that a path names, the newest first."""
    if _is_one(path):
        return [path]
    return folders_of(path.parent if path.name == FOLDER else path)


def _is_one(path: Path) -> bool:
    return (
        path.is_dir()
        and NAME.fullmatch(path.name) is not None
        and path.absolute().parent.name == FOLDER
    )


def _with_fix(problems: Sequence[Problem], damaged: Path, key: str) -> ConfigError:
    """Offer the newest other checkpoint of the run that is whole."""
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
    """Return what to write on the command line: a key of the config, or an argument by its place."""
    return shlex.quote(f"{key}={path}" if key == "resume" else str(path))


def _whole(folder: Path) -> bool:
    try:
        read(folder)
    except (ConfigError, OSError):  # what cannot be read is not offered
        return False
    return True


def _offered(places: Iterable[Path]) -> Path | None:
    """Return the newest whole checkpoint of the first folder of runs that has one."""
    return next((f for place in places for f in _all(place, [], "") if _whole(f)), None)


def _missing(path: Path, runs: Path, key: str) -> ConfigError:
    """Offer what is called nearly so, else the newest checkpoint of the job."""
    absolute = path.absolute()
    above = next(parent for parent in absolute.parents if parent.exists())
    lacking, *rest = absolute.relative_to(above).parts
    names = sorted(
        f.name for f in above.iterdir() if f.is_dir() and not f.name.endswith(PART)
    )
    near = (above / name for name in difflib.get_close_matches(lacking, names, n=1))
    alike = (path for folder in near for path in (folder.joinpath(*rest), folder))
    offered = next(
        (path for path in alike if any(map(_whole, _folders(path)[:1]))), None
    )
    offered = offered or _offered(
        [runs] if key == "resume" else [runs, Path("runs") / path.name]
    )  # by the config's name
    listed = ", ".join(names[-_LISTED:]) if names else "no folders"
    why = f"there is no {lacking!r} in {above}, but {listed}"
    fix = _without(key) if offered is None else _taking(offered, key)
    return ConfigError.of(
        "resume-not-found", key, "the path does not exist", str(path), why, fix
    )


def _none_in(path: Path, runs: Path, key: str) -> ConfigError:
    """Say what the folder is instead, and offer what is below it, else the newest checkpoint of the job."""
    code = "not-a-checkpoint"
    what = "neither a checkpoint nor the folder of a run"
    why = f"a checkpoint has {MANIFEST}, a run has {FOLDER}/"
    if path.name.endswith(PART):
        why = "the run ended while it was written; it was never whole"
    elif (path / MANIFEST).exists():
        why = f"a checkpoint lies in the folder of a run, which goes on there: <run>/{FOLDER}/000012"
    elif (path / FOLDER).is_dir() or (path / CONFIG).exists() or path.name == FOLDER:
        code = "no-checkpoint"
        what = "this run has no checkpoint"
        why = "it ended before the first one was whole"
    elif path.is_file() or any(path.glob("*.safetensors")):
        why = "weights alone lack the optimizer and the run's place; they can be a start: actor.model.path"
    inside = (
        [f for f in path.iterdir() if f.is_dir()] if path.is_dir() else []
    )  # of a folder of jobs: their runs
    offered = _offered(
        [path, *sorted(inside, key=lambda f: f.stat().st_mtime_ns, reverse=True), runs]
    )
    fix = _without(key) if offered is None else _taking(offered, key)
    return ConfigError.of(code, key, what, str(path), why, fix)


def _unreadable(error: OSError, key: str) -> ConfigError:
    what = f"cannot be read: {error.strerror or error}"
    fix = "let the user who starts the run read this file"
    return ConfigError.of(
        "checkpoint-unreadable", key, what, str(error.filename), None, fix
    )

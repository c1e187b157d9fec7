"""Find the profile that a command predicts from, and check whether it fits the job and this machine."""

from __future__ import annotations

import dataclasses
import functools
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlplace.codes import config_error
from rlplace.errors import ConfigError, did_you_mean
from rlplace.foresight.model import model_of
from rlplace.foresight.observe import machine, subjects, versions
from rlplace.foresight.profile import AS_PUBLISHED, Profile, read_profile
from rlplace.placement.memory.ledger import MemoryCase
from rlplace.placement.plan import Plan

NOTHING_MEASURED = "from published rates, of which an assumed share is reached"
HOST_ASSUMED = "assumed, not measured: what processors do, such as env.run, puts and waits of channels, and Ray calls"
FILE = "profile.json"
LAST = "last"
PUBLISHED = "published"
_LOOKED_AT = 20  # number of newest runs that are searched


def find_profile(
    config: Any, plan: Plan, case: MemoryCase, words: Sequence[str] = ()
) -> Profile | None:
    """Return the profile that the config key `profile` names; None if the key is null. Merge several named files.

    `words`: the words of the job's command line; errors propose a command for measuring a profile, made from them.
    Raises ConfigError if a file is not a profile, if the key is `last` but no run has a profile of this job, and if the
    profile was measured with other simulators or models.
    """
    if config.profile is None:
        return None
    if config.profile == PUBLISHED:
        return model_of(config).published_profile(config, plan, case)
    if config.profile == LAST:
        return last_profile(config, plan, words)[1]
    read = [
        _read(Path(name.strip()), config, plan, words)
        for name in config.profile.split(",")
    ]
    return functools.reduce(Profile.merged, read)


def last_profile(
    config: Any, plan: Plan, words: Sequence[str] = ()
) -> tuple[Path, Profile]:
    """Return the newest profile of this job among the runs in the output folder: its file, and the profile.

    `words`: the words of the job's command line; errors propose a command for measuring a profile, made from them.
    Raises ConfigError if no run has a profile of this job.
    """
    folder = Path(config.runner.output_dir)
    files = sorted(
        folder.glob(f"*/*/{FILE}"), key=lambda file: file.stat().st_mtime, reverse=True
    )
    refused: ConfigError | None = None
    for file in files[:_LOOKED_AT]:
        try:
            return file, _read(file, config, plan, words)
        except ConfigError as error:
            refused = refused or error
    if refused is not None:
        raise ConfigError(
            [
                dataclasses.replace(problem, fix=measuring(words))
                for problem in refused.problems
            ]
        )
    raise config_error(
        "no-profile",
        "profile",
        LAST,
        folder=folder,
        file=FILE,
        command=measuring(words),
    )


def measuring(words: Sequence[str]) -> str:
    """Return the shell command that measures a profile of this job. Afterwards, `profile=last` finds that profile.

    `words`: the words of the job's command line.
    """
    kept = [
        word
        for word in words
        if word.lstrip("+").partition("=")[0] not in ("profile", "dry_run")
    ]
    return shlex.join(["python", "-m", "rlplace.profile", *kept])


def _read(file: Path, config: Any, plan: Plan, words: Sequence[str]) -> Profile:
    """Return the profile in `file`. If it is from another machine, mark its costs as measured elsewhere.

    `file`: a profile, or the folder of a run. `words`: the words of the job's command line. Raises ConfigError if the
    file is not a profile of this job.
    """
    profile = read_profile(
        _text(file / FILE if file.is_dir() else file), file=str(file)
    )
    _require_same(profile, file, config, plan, words)
    if _differing(profile):
        return profile.elsewhere()
    return profile


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise config_error(
            "not-a-profile",
            "profile",
            str(file),
            error="file",
            cause=f"{type(error).__name__}: {error}",
            near=did_you_mean(str(file), (LAST, PUBLISHED)) or LAST,
        ) from error


def _require_same(
    profile: Profile, file: Path, config: Any, plan: Plan, words: Sequence[str]
) -> None:
    """Raise ConfigError if, in the profile, a component ran another simulator or model than in this job.

    `file`: the profile's file. `words`: the words of the job's command line. Both are for the error.
    """
    here = subjects(config, plan)
    others = {
        c: profile.subjects[c]
        for c, subject in here.items()
        if profile.subjects.get(c, subject) != subject
    }
    if others:
        subjects_there = [f"{c}: {subject}" for c, subject in others.items()]
        raise config_error(
            "profile-of-another",
            "profile",
            "; ".join([str(file), *subjects_there]),
            others=" and ".join(others),
            subjects_here="; ".join(f"{c} is {here[c]} here" for c in others),
            command=measuring(words),
        )


def _differing(profile: Profile) -> list[str]:
    here = machine()
    return [
        name
        for name in ("processor", "cores")
        if profile.machine.get(name) != here[name]
    ]


def foreign(profile: Profile) -> list[str]:
    """Return notes to print with a prediction: that the profile is from another machine or other library versions."""
    notes: list[str] = []
    if profile.machine.get("processor") == AS_PUBLISHED:
        return [NOTHING_MEASURED, HOST_ASSUMED]
    if differ := _differing(profile):
        notes.append(
            "measured elsewhere: "
            + ", ".join(f"{name} {profile.machine.get(name)}" for name in differ)
        )
    installed = versions()
    others = [
        f"{name} {version}"
        for name, version in profile.versions.items()
        if installed.get(name) != version
    ]
    if others:
        notes.append("measured with " + ", ".join(others))
    return notes

"""Which profile a command predicts from, and how far it is one of this job and machine."""

from __future__ import annotations

import functools
from pathlib import Path

from rlplace.config.schema import Config
from rlplace.errors import ConfigError
from rlplace.foresight.observe import machine, subjects, versions
from rlplace.foresight.profile import Profile, read_profile
from rlplace.foresight.published import AS_PUBLISHED, published_profile
from rlplace.placement.memory.ledger import MemoryCase
from rlplace.placement.plan import Plan

NOTHING_MEASURED = "from published rates, of which an assumed share is reached; only what accelerators do is counted"
FILE, LAST, PUBLISHED = "profile.json", "last", "published"
_LOOKED_AT = 20  # newest runs, for one of this job


def find_profile(config: Config, plan: Plan, case: MemoryCase) -> Profile | None:
    """Return what the key `profile` names, several files merged; None where it names none.

    Raises ConfigError for a file that is no profile, `last` without a run, and a profile of other simulators or models.
    """
    if config.profile is None:
        return None
    if config.profile == PUBLISHED:
        return published_profile(config, plan, case)
    if config.profile == LAST:
        return _last(config, plan)
    read = [_read(Path(name.strip()), config, plan) for name in config.profile.split(",")]
    return functools.reduce(Profile.merged, read)


def _last(config: Config, plan: Plan) -> Profile:
    """Return the newest profile of this job; raise what is wrong with the newest where none is."""
    folder = Path(config.runner.output_dir)
    files = sorted(folder.glob(f"*/*/{FILE}"), key=lambda file: file.stat().st_mtime, reverse=True)
    refused: ConfigError | None = None
    for file in files[:_LOOKED_AT]:
        try:
            return _read(file, config, plan)
        except ConfigError as error:
            refused = refused or error
    if refused is not None:
        raise refused
    what, why = "there is none", f"no run below {folder} has written a {FILE}"
    fix = "run the job for a few iterations first; or profile=null"
    raise ConfigError.of("no-profile", "profile", what, LAST, why, fix)


def _read(file: Path, config: Config, plan: Plan) -> Profile:
    """Read one file of this job; what was measured on another machine says so."""
    profile = read_profile(_text(file / FILE if file.is_dir() else file), file=str(file))
    _require_same(profile, config, plan)
    return profile.elsewhere() if _differing(profile) else profile


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why, fix = f"{type(error).__name__}: {error}", f"profile=<folder of a run>/{FILE}"
        raise ConfigError.of("not-a-profile", "profile", "cannot be read", str(file), why, fix) from error


def _require_same(profile: Profile, config: Config, plan: Plan) -> None:
    """Raise ConfigError where a component ran something else than in this job."""
    here = subjects(config, plan)
    others = {c: profile.subjects[c] for c, subject in here.items() if profile.subjects.get(c, subject) != subject}
    if others:
        raise ConfigError.of(
            "profile-of-another",
            "profile",
            f"what {' and '.join(others)} did there is other work than here",
            "; ".join(f"{c}: {subject}" for c, subject in others.items()),
            "; ".join(f"{c} is {here[c]} here" for c in others),
            "profile=<of a run of this job>; a few iterations are enough",
        )


def _differing(profile: Profile) -> list[str]:
    here = machine()
    return [name for name in ("processor", "cores") if profile.machine.get(name) != here[name]]


def foreign(profile: Profile) -> list[str]:
    """Return how the profile's machine and versions differ from what is here, for a prediction to say."""
    notes: list[str] = []
    if profile.machine.get("processor") == AS_PUBLISHED:
        return [NOTHING_MEASURED]
    if differ := _differing(profile):
        notes.append("measured elsewhere: " + ", ".join(f"{name} {profile.machine.get(name)}" for name in differ))
    installed = versions()
    others = [f"{name} {version}" for name, version in profile.versions.items() if installed.get(name) != version]
    if others:
        notes.append("measured with " + ", ".join(others))
    return notes

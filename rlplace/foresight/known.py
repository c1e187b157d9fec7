"""Which profile a command predicts from, and how far it is one of this job and machine."""

from __future__ import annotations

from pathlib import Path

from rlplace.config.schema import Config
from rlplace.errors import ConfigError
from rlplace.foresight.observe import machine, subjects, versions
from rlplace.foresight.profile import Profile, read_profile
from rlplace.foresight.published import published_profile
from rlplace.placement.memory.ledger import MemoryCase
from rlplace.placement.plan import Plan

NOTHING_MEASURED = "from published rates, of which an assumed share is reached; only what accelerators do is counted"
FILE, LAST, PUBLISHED = "profile.json", "last", "published"


def find_profile(config: Config, plan: Plan, case: MemoryCase) -> Profile | None:
    """Return what the key `profile` names, several files merged; None where it names none.

    Raises ConfigError for a file that is no profile, `last` without a run, and a profile of other simulators or models.
    """
    if config.profile is None:
        return None
    if config.profile == PUBLISHED:
        return published_profile(config, plan, case)
    folder = Path(config.runner.output_dir)
    if config.profile == LAST:
        files = sorted(folder.glob(f"*/*/{FILE}"), key=lambda file: file.stat().st_mtime)[-1:]
        if not files:
            what, why = "there is none", f"no run below {folder} has written a {FILE}"
            fix = "run the job for a few iterations first; or profile=null"
            raise ConfigError.of("no-profile", "profile", what, LAST, why, fix)
    else:
        files = [Path(name.strip()) for name in config.profile.split(",")]
    profile: Profile | None = None
    for file in files:
        read = read_profile(_text(file / FILE if file.is_dir() else file), file=str(file))
        profile = read if profile is None else profile.merged(read)
    assert profile is not None, "at least one file is named"
    _require_same(profile, config, plan)
    return profile


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


def foreign(profile: Profile) -> list[str]:
    """Return how the profile's machine and versions differ from what is here, for a prediction to say."""
    notes: list[str] = []
    if not profile.versions:
        return [NOTHING_MEASURED]
    here, there = machine(), profile.machine
    differ = [name for name in ("processor", "cores") if there.get(name) != here[name]]
    if differ:
        notes.append("measured elsewhere: " + ", ".join(f"{name} {there.get(name)}" for name in differ))
    installed = versions()
    others = [f"{name} {version}" for name, version in profile.versions.items() if installed.get(name) != version]
    if others:
        notes.append("measured with " + ", ".join(others))
    return notes

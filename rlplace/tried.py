"""What versions of Python and of libraries this package was tried with, and what others may mean: `tried.toml`."""

from __future__ import annotations

import dataclasses
import functools
import platform
import tomllib
from collections.abc import Mapping
from importlib.resources import files

from packaging.version import InvalidVersion, Version

from rlplace.extras import version_of

PYTHON = "Python"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Versions of a library between which it was tried, and what it may mean to be outside."""

    oldest: str
    newest: str
    means: str

    def holds(self, version: str) -> bool:
        """Whether a version is inside. What comes after its third number does not count: local versions are builds."""
        try:
            release = _release(version)
        except InvalidVersion:
            return False
        return _release(self.oldest) <= release <= _release(self.newest)


@functools.cache
def windows() -> Mapping[str, Window]:
    """Return the window of each library that matters, by the name of its distribution."""
    rows = tomllib.loads(
        files("rlplace").joinpath("tried.toml").read_text(encoding="utf-8")
    )
    return {name: Window(**row) for name, row in rows.items()}


def untried(name: str, version: str | None) -> Window | None:
    """Return the window that a version is outside of; None where it is inside, or nothing is known or installed."""
    window = windows().get(name)
    if window is None or version is None or window.holds(version):
        return None
    return window


def installed() -> dict[str, str]:
    """Return the versions here of what has a window."""
    found = {name: version_of(name) for name in windows() if name != PYTHON}
    return {PYTHON: platform.python_version()} | {
        name: found[name] or "" for name in found if found[name]
    }


def _release(version: str) -> tuple[int, ...]:
    return (*Version(version).release, 0, 0)[:3]

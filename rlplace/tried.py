"""The versions of Python and of libraries with which rlplace was tried, and what other versions may cause:
`tried.toml`.
"""

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
    """The versions of a library with which rlplace was tried, from `oldest` to `newest`.

    `means`: text that says what another version may cause.
    """

    oldest: str
    newest: str
    means: str

    def holds(self, version: str) -> bool:
        """Return whether a version is within the window; only its first three numbers count."""
        try:
            release = _release(version)
        except InvalidVersion:
            return False
        return _release(self.oldest) <= release <= _release(self.newest)


@functools.cache
def windows() -> Mapping[str, Window]:
    """Return the windows of `tried.toml`, by the name of the distribution, such as `torch`."""
    rows = tomllib.loads(
        files("rlplace").joinpath("tried.toml").read_text(encoding="utf-8")
    )
    return {name: Window(**row) for name, row in rows.items()}


def untried(name: str, version: str | None) -> Window | None:
    """Return the window of the library `name` if `version` is outside of it.

    Return None if `version` is within the window, if `version` is None, or if the library has no window.
    """
    window = windows().get(name)
    if window is None or version is None or window.holds(version):
        return None
    return window


def installed() -> dict[str, str]:
    """Return the installed versions of Python and of all libraries that have a window, by name."""
    found = {name: version_of(name) for name in windows() if name != PYTHON}
    return {PYTHON: platform.python_version()} | {
        name: found[name] or "" for name in found if found[name]
    }


def _release(version: str) -> tuple[int, ...]:
    return (*Version(version).release, 0, 0)[:3]

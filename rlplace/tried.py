"""The versions of Python and of libraries with which rlplace was tested, read from `tried.toml`."""

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
    """The range of versions of a library with which rlplace was tested, from `oldest` to `newest`.

    `means`: a text about what may go wrong with a version outside of the range.
    """

    oldest: str
    newest: str
    means: str

    def holds(self, version: str) -> bool:
        """Return whether a version is in the range. Only the first three numbers of a version count."""
        try:
            release = _release(version)
        except InvalidVersion:
            return False
        return _release(self.oldest) <= release <= _release(self.newest)


@functools.cache
def windows() -> Mapping[str, Window]:
    """Return name of a library, such as `torch` -> the range of its tested versions, from `tried.toml`."""
    rows = tomllib.loads(
        files("rlplace").joinpath("tried.toml").read_text(encoding="utf-8")
    )
    return {name: Window(**row) for name, row in rows.items()}


def untried(name: str, version: str | None) -> Window | None:
    """Return the range of tested versions of the library `name`, if `version` is not in the range.

    Return None if `version` is in the range or None, or if no range is known for the library.
    """
    window = windows().get(name)
    if window is None or version is None or window.holds(version):
        return None
    return window


def installed() -> dict[str, str]:
    """Return name -> installed version, for Python and for each installed library with a range in `tried.toml`."""
    found = {name: version_of(name) for name in windows() if name != PYTHON}
    return {PYTHON: platform.python_version()} | {
        name: found[name] or "" for name in found if found[name]
    }


def _release(version: str) -> tuple[int, ...]:
    return (*Version(version).release, 0, 0)[:3]

"""Versions of installed libraries, and the command that installs the libraries of an extra of rlplace.

The command names the libraries instead of `rlplace[extra]`, since rlplace is not in the package index.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import shlex
from collections.abc import Iterable, Iterator

_OF_EXTRA = re.compile(
    r"""(?P<what>[^;]+?)\s*;.*\bextra\s*==\s*["'](?P<extra>[\w-]+)["'].*"""
)
_VERSION = re.compile(r"^Version: *(\S+)$", re.MULTILINE)
_OURS = re.compile(r"rlplace\[(?P<extras>[\w,\s-]+)\]")


@functools.cache
def version_of(library: str) -> str | None:
    """Return the version of an installed library; None if the library is not installed."""
    try:
        found = importlib.metadata.distribution(library)
    except importlib.metadata.PackageNotFoundError:
        return None
    # `found.version` parses the whole description of the library, as an e-mail
    line = _VERSION.search(found.read_text("METADATA") or "")
    return line[1] if line else found.version


def versions_of(libraries: Iterable[str]) -> dict[str, str]:
    """Return name -> version for each library in `libraries` that is installed."""
    return {
        name: version for name in libraries if (version := version_of(name)) is not None
    }


def install_command(extra: str) -> str:
    """Return the command that installs the libraries of an extra of rlplace.

    `extra`: name of the extra, such as `vllm`. If rlplace is not installed as a package, the command installs rlplace
    with the extra from a clone of its repository.
    """
    try:
        lines = importlib.metadata.requires("rlplace") or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    needed = dict.fromkeys(_requirements(extra, lines))
    if needed:
        return f"pip install {shlex.join(needed)}"
    return f"pip install -e '.[{extra}]'        (in the clone)"


def _requirements(extra: str, lines: list[str]) -> Iterator[str]:
    for match in filter(None, map(_OF_EXTRA.fullmatch, lines)):
        if match["extra"] != extra:
            continue
        if ours := _OURS.match(match["what"]):
            for other in ours["extras"].split(","):
                yield from _requirements(other.strip(), lines)
        else:
            yield match["what"]

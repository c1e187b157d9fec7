"""Places in the user's code: where a class is defined or rlplace is called, for errors about a job
written in Python.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from rlplace.errors import Source

_PACKAGE = str(Path(__file__).resolve().parent)


def place_of(thing: Any) -> Source | None:
    """Return the file and line where a class or function is defined; None if Python does not know them.

    `thing`: a class, a function, or an object, for which its class is looked up. A file below the working folder has a
    path relative to the working folder.
    """
    if not (inspect.isclass(thing) or inspect.isroutine(thing)):
        thing = type(thing)
    try:
        file = inspect.getsourcefile(thing)
        _, line = inspect.getsourcelines(thing)
    except (TypeError, OSError):
        return None
    if file is None:
        return None
    return _source(file, line)


def place_of_caller() -> Source | None:
    """Return the file and line of the nearest caller outside of rlplace; None if there is none."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        file = frame.f_code.co_filename
        # Constructors made by the module dataclasses have no file
        made = file.startswith("<")
        if not made and not file.startswith(_PACKAGE):
            return _source(file, frame.f_lineno)
        frame = frame.f_back
    return None


def _source(file: str, line: int) -> Source:
    path = Path(file)
    here = Path.cwd()
    if path.is_relative_to(here):
        path = path.relative_to(here)
    return Source(file=str(path), line=line)

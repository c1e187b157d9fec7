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
from rlplace.python_code import one_at_a_time

_PACKAGE = str(Path(__file__).resolve().parent)


def place_of(thing: Any) -> Source | None:
    """Return the file and line in which a class or function is defined; None if they cannot be found.

    `thing`: a class, a function, or an object; for an object, the place of its class is returned. The path of a file
    below the working folder is relative to the working folder.
    """
    if not (inspect.isclass(thing) or inspect.isroutine(thing)):
        thing = type(thing)
    try:
        file = inspect.getsourcefile(thing)
        _, line = one_at_a_time(lambda: inspect.getsourcelines(thing))
    except (TypeError, OSError):
        return None
    if file is None:
        return None
    return _source(file, line)


def place_of_caller() -> Source | None:
    """Return the file and line in which user code has called into rlplace: the innermost caller outside of rlplace.

    Return None if all callers are in rlplace.
    """
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

"""The folder of a custom worker's code, for processes that look for modules in other folders than the driver.

A worker's class reaches its process as a name, `my_job:Policy`, and is imported there. The driver may have found the
module in a folder that Ray does not know, such as the folder of a config file.
"""

from __future__ import annotations

import os
import sys


def code_folder(kind: type) -> str | None:
    """Return the folder in which Python has found the code of the class `kind`: its module or top-level package.

    Return None if this module has no file, or is the main script, whose classes cloudpickle sends with their code.
    """
    top = kind.__module__.partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None)
    if top == "__main__" or file is None:
        return None
    folder = os.path.dirname(os.path.abspath(file))
    # The file of a package is in the package's own folder.
    if os.path.basename(file) == "__init__.py":
        folder = os.path.dirname(folder)
    return folder


def look_in(folder: str | None) -> None:
    """Append `folder` to `sys.path`, so that Python looks for modules there last.

    Do nothing if `folder` is None or does not exist on this machine.
    """
    if folder is not None and folder not in sys.path and os.path.isdir(folder):
        sys.path.append(folder)

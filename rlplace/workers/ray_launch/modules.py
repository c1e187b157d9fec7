"""Let modules of special types travel to workers by their names.

cloudpickle sends a class of a script whole, with the modules that its code may use. It finds these modules by the words
in the code: code with both `torch.distributed` and `self.config` seems to use `torch.distributed.config`. Plain modules
are pickled by name. But `torch.distributed.config` is an object of a subclass of ModuleType, which cannot be pickled.
"""

from __future__ import annotations

import copyreg
import importlib
import sys
from types import ModuleType
from typing import Any


def let_modules_travel() -> None:
    """Make pickle store each imported module whose type is not plain ModuleType by its name.

    Types that define their own pickling are left alone.
    """
    kinds = {type(module) for module in list(sys.modules.values())}
    for kind in kinds:
        special = issubclass(kind, ModuleType) and kind is not ModuleType
        says_how = kind.__reduce__ is not ModuleType.__reduce__
        says_how = says_how or kind.__reduce_ex__ is not ModuleType.__reduce_ex__
        if special and not says_how and kind not in copyreg.dispatch_table:
            copyreg.pickle(kind, _by_name)


def _by_name(module: Any) -> tuple[Any, tuple[str]]:
    """Return how pickle restores a module: the import function, and its argument, the module's name.

    Raise TypeError if `module` is not among the imported modules.
    """
    for name, known in list(sys.modules.items()):
        if known is module:
            return importlib.import_module, (name,)
    raise TypeError(f"module {module!r} is not imported under any name")

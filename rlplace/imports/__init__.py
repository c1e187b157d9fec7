"""Configs of other libraries become ours, with a mapping result for every setting and what does not hold in them."""

from rlplace.imports.command import import_settings, import_words, render_yaml
from rlplace.imports.importer import Imported
from rlplace.imports.settings import Setting, settings_of

__all__ = [
    "Imported",
    "Setting",
    "import_settings",
    "import_words",
    "render_yaml",
    "settings_of",
]

"""Convert configs of other libraries, with a result for every setting and a list of problems."""

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

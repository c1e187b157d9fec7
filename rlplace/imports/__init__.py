"""Configs of other libraries -> ours, with the fate of every line and what does not hold in the original."""

from rlplace.imports.areal import import_areal
from rlplace.imports.imported import Imported
from rlplace.imports.openrlhf import import_openrlhf
from rlplace.imports.report import render_report, render_yaml
from rlplace.imports.rlinf import import_rlinf
from rlplace.imports.roll import import_roll
from rlplace.imports.rules import Became, Fate, Needless, Unknown, Unmapped
from rlplace.imports.settings import Setting, settings_of
from rlplace.imports.skyrl import import_skyrl
from rlplace.imports.slime import import_slime
from rlplace.imports.verl import import_verl

__all__ = [
    "Became",
    "Fate",
    "Imported",
    "Needless",
    "Setting",
    "Unknown",
    "Unmapped",
    "import_areal",
    "import_openrlhf",
    "import_rlinf",
    "import_roll",
    "import_skyrl",
    "import_slime",
    "import_verl",
    "render_report",
    "render_yaml",
    "settings_of",
]

"""Every error code in one table: what it means, an example, and what to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from rlplace.codes.config import CONFIG
from rlplace.codes.importing import IMPORTING
from rlplace.codes.placement import PLACEMENT
from rlplace.codes.running import RUNNING
from rlplace.codes.text import TEXT

__all__ = ["CODES", "Code"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """One code, as stable as the name of a function."""

    name: str
    when: str  # it can be met
    means: str
    example: str
    fix: str

    def render(self) -> str:
        rows = (("means", self.means), ("example", self.example), ("fix", self.fix), ("met", self.when))
        lines = [f"{self.name}", *(f"    {label + ':':<9} {text}" for label, text in rows)]
        return "\n".join(lines)


CODES: Mapping[str, Code] = {
    name: Code(name=name, when=when, means=means, example=example, fix=fix)
    for when, table in (
        ("while the config is read, before anything starts", CONFIG),
        ("while the plan is made, before anything starts", PLACEMENT),
        ("while a job starts or runs", RUNNING),
        ("while a text task is made or played", TEXT),
        ("while the settings of another library are imported", IMPORTING),
    )
    for name, (means, example, fix) in table.items()
}

"""The explanation of every error code: its meaning, an example and what to do. `codes.toml` holds the texts."""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """One code, as stable as the name of a function."""

    name: str
    when: str  # it can occur
    means: str
    example: str
    fix: str

    def render(self) -> str:
        rows = (
            ("means", self.means),
            ("example", self.example),
            ("fix", self.fix),
            ("met", self.when),
        )
        lines = [
            f"{self.name}",
            *(f"    {label + ':':<9} {text}" for label, text in rows),
        ]
        return "\n".join(lines)


@functools.cache
def codes() -> Mapping[str, Code]:
    """All codes by name, read from the file on the first call."""
    tables = tomllib.loads(
        Path(__file__).with_name("codes.toml").read_text(encoding="utf-8")
    )
    return {
        name: Code(name=name, when=when, means=means, example=example, fix=fix)
        for when, table in tables.items()
        for name, (means, example, fix) in table.items()
    }

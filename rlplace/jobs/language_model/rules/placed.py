"""The rules that the placement of a job on language models keeps, in their order."""

from __future__ import annotations

from rlplace.checks import names, partners, processes, waste
from rlplace.checks.rule import Rule
from rlplace.jobs.language_model.rules import (
    batches,
    overlap,
    roles,
    trained,
    without_effect,
)
from rlplace.jobs.language_model.rules.case import PlacedTextJob

# Of jobs that run and of those that are planned only
_ALL: tuple[Rule[PlacedTextJob], ...] = (*names.RULES, *processes.RULES)

PLANNED: tuple[Rule[PlacedTextJob], ...] = (
    *_ALL,
    *batches.RULES,
    *partners.RULES,
    *roles.RULES,
)

RUN: tuple[Rule[PlacedTextJob], ...] = (
    *_ALL,
    *roles.RULES,
    *batches.RULES,
    *overlap.RULES,
)

WARNINGS: tuple[Rule[PlacedTextJob], ...] = (
    *waste.WARNINGS,
    *partners.WARNINGS,
    *trained.WARNINGS,
    *without_effect.RULES,
)

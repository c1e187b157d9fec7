"""Requests of a command to a trained job, and their results: evaluation and export."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """Settings of an evaluation. `key`: the command-line word that names the policy."""

    key: str
    episodes: int | None  # number of episodes; None: the job's usual number
    seed: int
    deterministic: bool
    longest: int  # most steps of an episode
    video: Path | None
    transcripts: Path | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result of an evaluation."""

    report: Mapping[str, Any]  # as values for JSON
    rows: Sequence[tuple[str, str]]  # as text lines: (heading, text)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """Settings of an export. `key`: the command-line word that names the checkpoint."""

    key: str
    out: Path
    component: str
    average: bool  # whether to export the moving average (EMA) of the weights

"""Requests of a command to a trained job, and their results: evaluation and export."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """The settings of an evaluation. `key`: the command-line argument that names the policy, for errors."""

    key: str
    episodes: int | None  # number of episodes; None: the job's usual number
    seed: int
    deterministic: bool
    longest: int  # most steps of an episode
    video: Path | None
    transcripts: Path | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result of an evaluation, for a JSON file and for the screen."""

    report: Mapping[str, Any]  # as values for JSON
    rows: Sequence[tuple[str, str]]  # as text lines: (heading, text)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """The settings of an export. `key`: the command-line argument that names the checkpoint, for errors."""

    key: str
    out: Path
    component: str
    average: bool  # whether to export the moving average (EMA) of the weights

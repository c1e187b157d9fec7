"""What a command asks of a trained job, and what it gets: an evaluation, an export."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """How a trained policy is evaluated. `key`: the word of the command line that names the policy."""

    key: str
    episodes: int | None  # None: as many as the job usually plays
    seed: int
    deterministic: bool
    longest: int  # steps of an episode
    video: Path | None
    transcripts: Path | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What an evaluation has found."""

    report: Mapping[str, Any]  # as JSON shows it
    rows: Sequence[tuple[str, str]]  # as lines show it: a head and a text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """What is written where. `key`: the word of the command line that names the checkpoint."""

    key: str
    out: Path
    component: str
    average: bool  # the moving average of the weights

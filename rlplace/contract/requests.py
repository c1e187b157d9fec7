"""The settings with which a command has a job evaluate or export a trained policy, and the result of an evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """The settings of an evaluation.

    `key`: the command-line argument that names the policy, for errors. `episodes`: number of episodes, or of prompts;
    None: the job's usual number. `seed`: seed of everything random in the evaluation. `deterministic`: whether to take
    the most probable action instead of a sample. `longest`: most steps of an episode. `video`: file for a video; None:
    no video. `transcripts`: file for the answers of a language model; None: the default file.
    """

    key: str
    episodes: int | None
    seed: int
    deterministic: bool
    longest: int
    video: Path | None
    transcripts: Path | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result of an evaluation, in two forms.

    `report`: key -> value, for a JSON file. `rows`: (heading, text) of each line, for the screen.
    """

    report: Mapping[str, Any]
    rows: Sequence[tuple[str, str]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """The settings of an export.

    `key`: the command-line argument that names the checkpoint, for errors. `out`: the file or folder to write.
    `component`: the component with the weights. `average`: whether to export the moving average (EMA) of the weights.
    `adapter`: whether to export the LoRA factors alone, as an adapter of the library peft.
    """

    key: str
    out: Path
    component: str
    average: bool
    adapter: bool = False

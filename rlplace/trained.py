"""A trained policy in the folder of a run, of a checkpoint or of an export."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
from pathlib import Path
from typing import Any

from rlplace.checkpoints.checkpoint import Checkpoint
from rlplace.checkpoints.find import folders_of

POLICY = "policy.safetensors"  # file of a simulator policy, beside its config.yaml
_MODEL = "policy"  # name of the folder of a language model
_HEAD = 11  # width of the first column


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A trained policy on the disk.

    `weights`: the file `policy.safetensors`, or the folder of the actor's state in a checkpoint. `config`: config of
    the job that trained the policy. `checkpoint`: the checkpoint of the policy; None: only the weights are saved.
    """

    weights: Path
    config: Any
    checkpoint: Checkpoint | None

    @property
    def folder(self) -> Path:
        """The folder of the checkpoint; without a checkpoint, the folder with the file of weights."""
        return self.weights.parent

    @property
    def text(self) -> str:
        """A text that names the policy: iteration, policy version and folder of its checkpoint, or else its file."""
        found = self.checkpoint
        if found is None:
            return str(self.weights)
        return f"after {found.iteration} iterations, policy version {found.version}: {found.folder}"


def where(run: Path) -> str:
    """Return the last lines that a run prints: its newest saved policy, and the command that plays this policy.

    A command that is wider than the terminal is broken before its last word, so that it can still be pasted. `run`:
    folder of the run.
    """
    saved = [
        *folders_of(run)[:1],
        *(file for name in (POLICY, _MODEL) if (file := run / name).exists()),
    ]
    if not saved:
        return "policy     none: the run ended before it had saved one"
    newest = max(saved, key=lambda path: path.stat().st_mtime_ns)
    head = "played by  python -m rlplace.evaluate"
    word = shlex.quote(str(run))
    command = f"{head} {word}"
    if len(command) > shutil.get_terminal_size().columns:
        command = f"{head} \\\n{' ' * _HEAD}{word}"
    return f"policy     {newest}\n{command}"

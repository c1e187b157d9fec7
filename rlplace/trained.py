"""A trained policy in the folder of a run, of a checkpoint or of an export."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

from rlplace.checkpoints.checkpoint import Checkpoint
from rlplace.checkpoints.find import folders_of
from rlplace.tables import with_whole_word
from rlplace.units import counted

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
        return f"after {counted(found.iteration, 'iteration')}, policy version {found.version}: {found.folder}"


def where(run: Path) -> str:
    """Return the last lines that a run prints: its newest saved policy, and the command that plays this policy.

    A line that is wider than the terminal is broken before its last word, so that the path is whole and the command can
    be pasted. `run`: folder of the run.
    """
    saved = [
        *folders_of(run)[:1],
        *(file for name in (POLICY, _MODEL) if (file := run / name).exists()),
    ]
    if not saved:
        return "policy     none: the run ended before it had saved one"
    newest = max(saved, key=lambda path: path.stat().st_mtime_ns)
    policy = with_whole_word(f"{'policy':<{_HEAD - 1}}", str(newest), indent=_HEAD)
    command = with_whole_word(
        f"{'evaluate':<{_HEAD}}python -m rlplace.evaluate",
        shlex.quote(str(run)),
        indent=_HEAD,
        joined=" \\",
    )
    return f"{policy}\n{command}"

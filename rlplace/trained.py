"""What a run, a checkpoint or an exported folder has of a trained policy, found by its path; reads no weights."""

from __future__ import annotations

import dataclasses
import os
import shlex
from pathlib import Path

import yaml

from rlplace.checkpoints.checkpoint import CONFIG, Checkpoint
from rlplace.checkpoints.find import find, folders_of, verify
from rlplace.config.read import read_config, with_folder
from rlplace.config.schema import Config
from rlplace.errors import ConfigError

POLICY = "policy.safetensors"  # of a simulator policy, beside its config.yaml
_MODEL = "policy"  # the folder of a language model


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A trained policy on the disk. `weights`: POLICY, or the folder of the actor's state in a checkpoint."""

    weights: Path
    config: Config
    checkpoint: (
        Checkpoint | None
    )  # whose files are as they were written; None: weights alone

    @property
    def folder(self) -> Path:
        """Return the folder of the checkpoint, or of the weights."""
        return self.weights.parent

    @property
    def text(self) -> str:
        """Say which policy it is."""
        found = self.checkpoint
        if found is None:
            return str(self.weights)
        return f"after {found.iteration} iterations, policy version {found.version}: {found.folder}"


def find_trained(named: str | Path, key: str = "RUN") -> Trained:
    """Find the policy that a path names: of a run its newest checkpoint, else the weights that it ended with.

    Raises ConfigError about `key`: nothing there, no policy saved, a damaged file, a config that cannot be read.
    """
    path = Path(os.path.abspath(Path(named).expanduser()))
    if (exported := exported_policy(path, key)) is not None:
        return exported
    if path.name == POLICY:
        path = path.parent
    checkpoint = find(str(path), path.parent, key)
    assert checkpoint is not None, "a path is found or refused"
    verify(checkpoint, key)
    config = config_of(checkpoint.folder / CONFIG, key)
    return Trained(
        weights=checkpoint.folder / "actor", config=config, checkpoint=checkpoint
    )


def exported_policy(path: Path, key: str) -> Trained | None:
    """Return the policy of a folder that has weights and no checkpoint, as an export has; None where it is another."""
    folder = path.parent if path.name == POLICY else path
    weights = folder / POLICY
    kept = folder / CONFIG
    if not (weights.is_file() and kept.is_file()) or folders_of(folder):
        return None
    return Trained(weights=weights, config=config_of(kept, key), checkpoint=None)


def where(run: Path) -> str:
    """Return the last line of what a run prints: its newest policy, and the command that plays it."""
    saved = [
        *folders_of(run)[:1],
        *(file for name in (POLICY, _MODEL) if (file := run / name).exists()),
    ]
    if not saved:
        return "policy     none: the run ended before it had saved one"
    newest = max(saved, key=lambda path: path.stat().st_mtime_ns)
    return f"policy     {newest}, played by: python -m rlplace.evaluate {shlex.quote(str(run))}"


def config_of(file: Path, key: str) -> Config:
    """Read the config that a run has kept, with its models' folders. Raises ConfigError."""
    try:
        mapping = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise _unreadable(file, key, str(error)) from error
    if not isinstance(mapping, dict):
        raise _unreadable(file, key, "it is no mapping")
    return with_folder(read_config(mapping), {})


def _unreadable(file: Path, key: str, why: str) -> ConfigError:
    what = "the config beside the weights cannot be read"
    fix = "name another checkpoint, or bring back the file"
    return ConfigError.of("checkpoint-damaged", key, what, str(file), why, fix)

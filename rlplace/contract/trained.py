"""Find a trained policy by its path, read its config with its job's schema, and load it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from rlplace.checkpoints.checkpoint import CONFIG
from rlplace.checkpoints.find import find, folders_of, newest_in, verify
from rlplace.codes import config_error
from rlplace.contract.reading import read_job
from rlplace.contract.registry import job_of
from rlplace.trained import POLICY, Trained


def find_trained(
    named: str | Path, key: str = "RUN", *, verified: bool = True
) -> Trained:
    """Return the trained policy at the path `named`: the folder of a run, of a checkpoint, of an export, or of runs.

    For a run, the policy of its newest checkpoint is returned; for a folder of runs, such as `runs/hopper`, that of the
    run that saved last. `key`: name of the user's argument, for errors.
    `verified`: whether to check that the files of a checkpoint are unchanged since they were written. Raises
    ConfigError if there is no policy at the path, a file is damaged, or the config cannot be read.
    """
    path = Path(os.path.abspath(Path(named).expanduser()))
    exported = _exported_policy(path, key)
    if exported is not None:
        return exported
    if path.name == POLICY:
        path = path.parent
    path = newest_in(path, key) or path
    checkpoint = find(str(path), path.parent, key)
    assert checkpoint is not None, "a path is found or refused"
    if verified:
        verify(checkpoint, key)
    return Trained(
        weights=checkpoint.folder / "actor",
        config=_config_of(checkpoint.folder / CONFIG, key),
        checkpoint=checkpoint,
    )


def load_policy(path: str | Path, *, seed: int = 0, key: str = "path") -> Any:
    """Return the trained policy in a folder, as an object that chooses actions.

    `path`: folder of a run, of a checkpoint, or of an export. For a run, its newest checkpoint is loaded. For a folder
    of runs, such as `runs/hopper`, the run that saved last is loaded. `seed`: seed of sampled actions. `key`: name of
    the user's argument, for errors. Raises ConfigError.
    """
    trained = find_trained(path, key)
    return job_of(trained.config).load_policy(trained, seed=seed, key=key)


def _exported_policy(path: Path, key: str) -> Trained | None:
    """Return the policy of an export; None if `path` is not an export.

    An export is a folder with weights and a config, but without checkpoints. `path`: the folder, or its file of
    weights. `key`: name of the user's argument, for errors.
    """
    folder = path.parent if path.name == POLICY else path
    weights = folder / POLICY
    kept = folder / CONFIG
    if not (weights.is_file() and kept.is_file()) or folders_of(folder):
        return None
    return Trained(weights=weights, config=_config_of(kept, key), checkpoint=None)


def _config_of(file: Path, key: str) -> Any:
    """Return the config that a run saved in `file`, completed with the content of the files that the config names.

    `key`: name of the user's argument, for errors. Raises ConfigError.
    """
    try:
        mapping = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise config_error(
            "checkpoint-damaged", key, str(file), error="config", cause=error
        ) from error
    if not isinstance(mapping, dict):
        raise config_error(
            "checkpoint-damaged",
            key,
            str(file),
            error="config",
            cause="it is no mapping",
        )
    config = read_job(mapping)
    return job_of(config).completed(config, {})

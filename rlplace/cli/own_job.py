"""Run or plan a custom job from Python: `run(job, "placement.yaml")`."""

from __future__ import annotations

import inspect
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlplace.contract.job import Job
    from rlplace.runtime.prepare import Prepared

_DRY_RUN = "--dry-run"


def run(
    job: Job,
    config: str | Path | Mapping[str, Any],
    overrides: Sequence[str] | None = None,
) -> int:
    """Run a custom job as `rlplace train` does, and return the exit code: 0 after success. Problems are printed.

    `config`: a YAML file, in the working folder or in the folder of the calling script; or the content of such a file
    as a mapping. `overrides`: words such as `runner.total_iterations=5` or `dry_run=true`. None: the overrides are the
    script's own command-line arguments, with `--dry-run` for `dry_run=true`. With None, a failure also ends the process
    with the exit code.
    """
    # Imported here: importing this name alone must load neither Hydra nor pydantic.
    from rlplace.cli import train
    from rlplace.commands import begin, code_with_output

    from_command_line = overrides is None
    streams = begin() if from_command_line else None
    words = list(sys.argv[1:] if overrides is None else overrides)
    words = ["dry_run=true" if word == _DRY_RUN else word for word in words]
    if isinstance(config, Mapping):
        with tempfile.TemporaryDirectory(prefix="rlplace-") as folder:
            file = write_config(config, Path(folder) / f"{job.name}.yaml")
            code = train.main([str(file), *words], job)
    else:
        file = found_beside(Path(config), inspect.stack()[1].filename)
        code = train.main([str(file), *words], job)
    if streams is not None:
        code = code_with_output(code, streams)
        if code != train.DONE:
            sys.exit(code)
    return code


def plan(
    job: Job,
    config: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
) -> Prepared:
    """Return the prepared custom job: its plan, memory proof, and the data for showing them. Nothing is started.

    `config`: a YAML file, in the working folder or in the folder of the calling script; or the content of such a file
    as a mapping. `overrides`: words such as `key=value`; not used with a mapping. Raises ConfigError, PlacementError or
    ClusterError with all problems.
    """
    from rlplace.cli.train import of_job
    from rlplace.config.compose import with_hydra
    from rlplace.config.open_job import JOB
    from rlplace.runtime.prepare import prepare, prepare_composed

    if isinstance(config, Mapping):
        mapping = {**config, JOB: job}
        return prepare(mapping, name=job.name)
    file = found_beside(Path(config), inspect.stack()[1].filename)
    (composed,) = with_hydra([str(file), *overrides])
    return prepare_composed(of_job(composed, job))


def found_beside(file: Path, caller: str) -> Path:
    """Return `file` if it exists. Otherwise, return the file of this name in the folder of the script `caller`.

    If no such file exists either, return `file`.
    """
    beside = Path(caller).parent / file
    if not file.is_file() and beside.is_file():
        return beside
    return file


def write_config(config: Mapping[str, Any], file: Path) -> Path:
    """Write a config to `file` as YAML, and return `file`."""
    import yaml

    file.write_text(yaml.safe_dump(dict(config), sort_keys=False), encoding="utf-8")
    return file

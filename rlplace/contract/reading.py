"""Read a config with the schema of its job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlplace.codes import problem
from rlplace.config.open_job import JOB
from rlplace.config.read import nested, try_config
from rlplace.contract.registry import named_job
from rlplace.errors import ConfigError, Problem, Source, did_you_mean, source_of


def try_job(
    mapping: Mapping[str, Any], sources: Mapping[str, Source]
) -> tuple[Any | None, list[Problem]]:
    """Read a config with the schema of its job. Return (config, all problems); the config is None if it is unreadable.

    `mapping`: the config as keys and values. `sources`: config key -> file and line in which its value is set. Raises
    ConfigError if the config's job cannot be found.
    """
    # A line without indent, such as `replay.capacity: 50000`, belongs to its block
    mapping = nested(mapping)
    own = named_job(mapping, sources)
    if own is not None:
        return own.read(mapping, sources)
    misspelt = _misspelt_job(mapping)
    if misspelt is not None:
        # All other keys belong to the job that is meant.
        text = mapping[misspelt]
        source = source_of(misspelt, sources)
        found = problem(
            "unknown-key",
            misspelt,
            f"{misspelt}: {text}",
            error="job",
            source=source,
            text=text,
        )
        return None, [found]
    blocks = {key: value for key, value in mapping.items() if key != JOB}
    config, problems = try_config(blocks, sources)
    name = mapping.get(JOB)
    if config is not None and name is not None and config.job != name:
        problems.append(
            problem(
                "wrong-kind",
                JOB,
                str(name),
                error="job",
                source=source_of(JOB, sources),
                job=config.job,
            )
        )
    return config, problems


def _misspelt_job(mapping: Mapping[str, Any]) -> str | None:
    """Return the config key that is probably meant as `job` but misspelt; None if there is no such key."""
    if JOB in mapping:
        return None
    for key, value in mapping.items():
        names_code = isinstance(value, str) and ":" in value
        if names_code and did_you_mean(str(key), [JOB]):
            return str(key)
    return None


def read_job(mapping: Mapping[str, Any]) -> Any:
    """Read a config with the schema of its job, and return it. Raises ConfigError with all problems."""
    config, problems = try_job(mapping, {})
    if config is None or problems:
        raise ConfigError(problems)
    return config

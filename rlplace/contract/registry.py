"""Find the job of a config: a shipped job by its name, or a custom job by its Python name.

job: simulator                      a shipped job; without the key `job`, the config's blocks decide which one
job: off_policy                     a shipped job with blocks of its own, which needs the key
job: my_package.my_job:job          a custom job: a Job object, or a subclass of Job
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplace.codes import config_error
from rlplace.config.open_job import JOB, OpenConfig
from rlplace.errors import Source, did_you_mean, source_of
from rlplace.report.typed import without_passwords

if TYPE_CHECKING:
    from rlplace.contract.job import Job

# Name -> module and class of the shipped jobs. No other module names them.
SHIPPED = {
    "simulator": "rlplace.jobs.simulator.job:SimulatorJob",
    "language_model": "rlplace.jobs.language_model.job:LanguageModelJob",
}
# Shipped jobs that an algorithm of another job stands for
BY_ALGORITHM = {
    "supervised": "rlplace.jobs.language_model.supervised:SupervisedJob",
    "served": "rlplace.jobs.language_model.served:ServedJob",
}
# Shipped jobs that read their config themselves, as custom jobs do: a config names them by the key `job`
NAMED = {"off_policy": "rlplace.jobs.off_policy.job:OffPolicyJob"}


def job_of(config: Any) -> Job:
    """Return the job of a config object: its custom job, or the shipped job of the kind that the config describes."""
    if isinstance(config, OpenConfig):
        job: Job = config.job
        return job
    return shipped_job(config.run_by)


def shipped_job(name: str) -> Job:
    """Return the shipped job called `name`, such as "simulator"."""
    known = SHIPPED | BY_ALGORITHM | NAMED
    module, _, attribute = known[name].partition(":")
    made: Job = getattr(importlib.import_module(module), attribute)()
    return made


def named_job(mapping: Mapping[str, Any], sources: Mapping[str, Source]) -> Job | None:
    """Return the job that the key `job` of a config names: a custom job, or a shipped job of NAMED.

    Return None without this key, or for a job of SHIPPED, whose config is read by the blocks.

    `mapping`: the config as keys and values. `sources`: config key -> file and line in which its value is set. Raises
    ConfigError if the job cannot be imported, or is not a Job.
    """
    from rlplace.contract.job import Job

    name = mapping.get(JOB)
    # The job was given as a Python object.
    if isinstance(name, Job):
        return name
    if name is None or name in SHIPPED:
        return None
    text = str(name)
    if text in NAMED:
        return shipped_job(text)
    if ":" not in text:
        near = did_you_mean(text, [*SHIPPED, *NAMED])
        error = "job"
        if near:
            error = "misspelt-job"
        raise config_error(
            "unknown-choice",
            JOB,
            text,
            error=error,
            source=source_of(JOB, sources),
            near=near,
            shipped=", ".join([*SHIPPED, *NAMED]),
        )
    found = _imported(text, sources)
    if isinstance(found, type) and issubclass(found, Job):
        found = _made(found, text, sources)
    if not isinstance(found, Job):
        raise config_error(
            "not-a-job",
            JOB,
            text,
            error="kind",
            source=source_of(JOB, sources),
            kind=type(found).__name__,
        )
    return found


def _made(kind: type[Job], text: str, sources: Mapping[str, Source]) -> Job:
    """Return an object of the class `kind`. Raises ConfigError if the class's constructor needs arguments.

    `text`: the value of the config key `job`, for the error.
    """
    make: Callable[[], Job] = kind
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise config_error(
            "not-a-job",
            JOB,
            text,
            error="arguments",
            source=source_of(JOB, sources),
            cause=error,
            kind=kind.__name__,
            module=text.partition(":")[0],
        ) from error
    return make()


def saved_mapping(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config to be saved by a run.

    A Python object under the key `job` is replaced by its name, and passwords of addresses by `***`.
    """
    saved = hidden_passwords(mapping)
    if JOB in saved and not isinstance(saved[JOB], str):
        saved[JOB] = _name_of(saved[JOB])
    return saved


def hidden_passwords(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config with `***` in place of the user and password of each address in a text."""
    return {name: _hidden(value) for name, value in mapping.items()}


def _hidden(value: Any) -> Any:
    if isinstance(value, str):
        return without_passwords(value)
    if isinstance(value, Mapping):
        return hidden_passwords(value)
    if isinstance(value, list | tuple):
        return [_hidden(each) for each in value]
    return value


def _name_of(job: Job) -> str:
    """Return the value of the config key `job` that names a job object: "module:name".

    If the running script defines the job, the module is the script's file name without the suffix.
    """
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()):
            if value is not job:
                continue
            if module.__name__ != "__main__":
                return f"{module.__name__}:{name}"
            file = getattr(module, "__file__", None)
            if file is not None:
                return f"{Path(file).stem}:{name}"
    # The job was created inside a function, so no module has a name for it.
    return f"{type(job).__module__}:{job.name}"


def with_job_of(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a saved config, with the job of the config `now` if that job was given as a Python object.

    If `now` has no `job`, or only its name, the copy is equal to `saved`.
    """
    mapping = dict(saved)
    if JOB in now and not isinstance(now[JOB], str):
        mapping[JOB] = now[JOB]
    return mapping


def _look_beside(source: Source | None) -> None:
    """Append the folder of a config file to Python's module search path, `sys.path`.

    `source`: file and line of a config value. If `source` is None, or not in a file, nothing is appended.
    """
    if source is None or not Path(source.file).is_file():
        return
    folder = str(Path(source.file).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)


def _imported(text: str, sources: Mapping[str, Source]) -> Any:
    """Import and return the object that `text` ("module:name") names. Raises ConfigError if this is not possible."""
    from rlplace.contract.job import Job

    module, _, attribute = text.partition(":")
    _look_beside(source_of(JOB, sources))
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise config_error(
            "not-a-job",
            JOB,
            text,
            error="module",
            source=source_of(JOB, sources),
            cause=error,
        ) from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            jobs = [key for key, each in vars(found).items() if isinstance(each, Job)]
            near = did_you_mean(name, jobs) or did_you_mean(name, vars(found))
            missing = "name"
            if near:
                missing = "misspelt-name"
            raise config_error(
                "not-a-job",
                JOB,
                text,
                error=missing,
                source=source_of(JOB, sources),
                name=name,
                module=module,
                near=near,
            )
        found = getattr(found, name)
    return found

"""`cluster.env_vars`: environment variables of all workers, wherever they run, and what is wrong with them.

::

    cluster.env_vars: {HF_HOME: /data/hf, HF_TOKEN: null}

null is the value that the shell has which starts the run; it is never written down.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rlplace.config.schema import ClusterConfig, Config
from rlplace.config.yaml_text import show
from rlplace.errors import Problem, Source

KEY = "cluster.env_vars"
THREADS = "OMP_NUM_THREADS"
_WRITTEN = "secret-in-config"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(
    r"(^|_)(KEYS?|TOKENS?|SECRETS?|PASSWD|PWD|PAT|AUTH|CREDENTIALS?)$|(APIKEY|PASSWORD|PASSPHRASE)S?$",
    re.IGNORECASE,
)
_LOGIN = re.compile(r"://[^/@]+@")  # in an address, such as that of a proxy
# Set for each worker by the placement
_PLACED = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
)
# Of libraries in workers; Ray and its machines have some of their own.
_OF_WORKERS = re.compile(
    r"(HF|TRANSFORMERS|VLLM|NCCL|GLOO|TORCH|PYTORCH|MUJOCO)_.*|(https?|no)_proxy",
    re.IGNORECASE,
)


def wrong_variables(config: Any) -> list[Problem]:
    """Report names and values that no variable can have, and secrets, without showing them."""
    problems = list(_wrong(config))
    # The word of the command line would show it
    if any(problem.code == _WRITTEN for problem in problems):
        problems = [
            dataclasses.replace(problem, source=Source(file=KEY))
            for problem in problems
        ]
    return problems


def _wrong(config: Config) -> Iterator[Problem]:
    for name, value in config.cluster.env_vars.items():
        key = f"{KEY}.{name}"
        if not _NAME.fullmatch(str(name)):
            what = "this is no name of a variable"
            why = "it has letters, digits and underscores"
            yield Problem(
                code="bad-env-var",
                key=KEY,
                what=what,
                got=str(name),
                why=why,
                fix="HF_HOME: /data/hf",
            )
        elif name in _PLACED:
            what = "the placement sets this variable"
            why = "each worker sees the accelerators of its own slot"
            yield Problem(
                code="bad-env-var",
                key=key,
                what=what,
                got=None,
                why=why,
                fix="leave it out",
            )
        elif value is not None and not isinstance(value, str | int | float):
            what = "expected text or a number"
            why = "a variable has one value; null takes that of your shell"
            yield Problem(
                code="bad-env-var",
                key=key,
                what=what,
                got=show(value),
                why=why,
                fix=f'{name}: "..."',
            )
        elif value and _is_secret(name, str(value)):
            what = "a secret is not to be written in a config"
            why = "the config is kept in the run's folder and given to trackers"
            fix = f"{name}: null        (and export {name}=... in the shell that starts the run)"
            yield Problem(
                code=_WRITTEN, key=key, what=what, got="(not shown)", why=why, fix=fix
            )


def _is_secret(name: str, value: str) -> bool:
    """Whether a value is to stay out of files, by the name of its variable. Credentials may be the path of a file."""
    if _LOGIN.search(value):
        return True
    is_path = name.upper().endswith("CREDENTIALS") and value.startswith("/")
    return bool(_SECRET.search(name)) and not is_path


def missing_variables(config: Any) -> Iterator[Problem]:
    """Report variables that are to be taken from this process, and are not there."""
    for name, value in config.cluster.env_vars.items():
        if value is None and name not in os.environ:
            yield Problem(
                code="env-var-missing",
                key=f"{KEY}.{name}",
                what="there is no such environment variable where the run starts",
                got=f"{name}: null",
                why="null gives the workers the value that the run itself finds",
                fix=f"export {name}=...        (before the run, or in its job script{_or_written(name)})",
            )


def _or_written(name: str) -> str:
    """Return the other way to give a variable; none for a secret, which is refused in a config."""
    if _SECRET.search(name):
        return ""
    return f"; or write the value: {name}: ..."


def variables_of(config: Any, names: Iterable[str] = ()) -> dict[str, str]:
    """Return what the workers are given by name: `cluster.env_vars`, and variables of this process by their `names`."""
    return named_variables(config.cluster, names)


def named_variables(
    cluster: ClusterConfig, names: Iterable[str] = ()
) -> dict[str, str]:
    """Do as `variables_of`, with the cluster block of a config."""
    given = dict.fromkeys(names) | dict(cluster.env_vars)
    taken: dict[str, str] = {}
    for name, value in given.items():
        text = os.environ.get(name) if value is None else show(value)
        if text is not None:
            taken[name] = text
    return taken


def not_given(config: Any) -> str | None:
    """Name variables of this process that workers may need and do not get; None if they get all."""
    given = config.cluster.env_vars
    joined = config.cluster.ray.address is not None
    names = {THREADS} if os.environ.get(THREADS, "1") != "1" else set[str]()
    if joined and config.cluster.launcher == "ray":
        names |= {name for name in os.environ if _OF_WORKERS.fullmatch(name)}
    lacking = sorted(names - given.keys())
    if not lacking:
        return None
    words = ", ".join(f"{name}: null" for name in lacking)
    return f"set here, and not for the workers: {', '.join(lacking)}; '{KEY}={{{words}}}' gives them"


@contextlib.contextmanager
def exported(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process, which workers that are its threads share, and put back what was before."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

"""`cluster.env_vars`: environment variables for all workers, wherever they run, and checks of them.

::

    cluster.env_vars: {HF_HOME: /data/hf, HF_TOKEN: null}

null stands for the variable's value in the shell that starts the run. That value is never written to a file.
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
_LOGIN = re.compile(r"://[^/@]+@")  # login in an address, such as that of a proxy
# Variables that the placement sets for each worker.
_PLACED = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
)
# Variables that libraries in workers read. Ray and its nodes have some of their own.
_OF_WORKERS = re.compile(
    r"(HF|TRANSFORMERS|VLLM|NCCL|GLOO|TORCH|PYTORCH|MUJOCO)_.*|(https?|no)_proxy",
    re.IGNORECASE,
)


def wrong_variables(config: Any) -> list[Problem]:
    """Report invalid names and values of variables, and secrets, without showing the secrets."""
    problems = list(_wrong(config))
    # The word of the command line would show the secret.
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
    """Return whether a variable's value is a secret, by its name. A path in a CREDENTIALS variable is no secret."""
    if _LOGIN.search(value):
        return True
    is_path = name.upper().endswith("CREDENTIALS") and value.startswith("/")
    return bool(_SECRET.search(name)) and not is_path


def missing_variables(config: Any) -> Iterator[Problem]:
    """Report variables whose values should come from this process, but are not set."""
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
    """Return the other way to give a variable; "" for a secret, which a config must not contain."""
    if _SECRET.search(name):
        return ""
    return f"; or write the value: {name}: ..."


def variables_of(config: Any, names: Iterable[str] = ()) -> dict[str, str]:
    """Return the workers' variables by name: `cluster.env_vars`, and variables `names` of this process."""
    return named_variables(config.cluster, names)


def named_variables(
    cluster: ClusterConfig, names: Iterable[str] = ()
) -> dict[str, str]:
    """Do the same as `variables_of`, from a config's cluster block."""
    given = dict.fromkeys(names) | dict(cluster.env_vars)
    taken: dict[str, str] = {}
    for name, value in given.items():
        text = os.environ.get(name) if value is None else show(value)
        if text is not None:
            taken[name] = text
    return taken


def not_given(config: Any) -> str | None:
    """Name variables of this process that workers may need but do not get; None if there are none."""
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
    """Set variables in this process, which worker threads share, and restore the old values at the end."""
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

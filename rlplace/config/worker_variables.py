"""The config key `cluster.env_vars`: environment variables for all workers on all nodes, and their checks.

::

    cluster.env_vars: {HF_HOME: /data/hf, HF_TOKEN: null}

A null stands for the variable's value in the shell that starts the run. This value is never written to a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rlplace.codes import problem
from rlplace.config.blocks.machines import ClusterConfig
from rlplace.config.schema import Config
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
    """Return the problems of `cluster.env_vars`: invalid names, invalid values, and secrets in the config.

    The texts of the problems do not contain the secrets. `config`: config of any job.
    """
    problems = list(_invalid(config))
    # As the source of the problem, the word of the command line would show the secret
    if any(found.code == _WRITTEN for found in problems):
        problems = [
            dataclasses.replace(found, source=Source(file=KEY)) for found in problems
        ]
    return problems


def _invalid(config: Config) -> Iterator[Problem]:
    for name, value in config.cluster.env_vars.items():
        key = f"{KEY}.{name}"
        if not _NAME.fullmatch(str(name)):
            yield problem("bad-env-var", KEY, str(name), error="name")
        elif name in _PLACED:
            yield problem("bad-env-var", key, error="placed")
        elif value is not None and not isinstance(value, str | int | float):
            yield problem("bad-env-var", key, show(value), error="value", name=name)
        elif value and _is_secret(name, str(value)):
            yield problem(_WRITTEN, key, "(not shown)", name=name)


def _is_secret(name: str, value: str) -> bool:
    """Return whether the value of an environment variable is a secret, such as a password.

    A value is a secret if the name says so, such as TOKEN, or if it is an address that contains a login. A path in a
    variable with a name that ends in CREDENTIALS is not a secret.
    """
    if _LOGIN.search(value):
        return True
    is_path = name.upper().endswith("CREDENTIALS") and value.startswith("/")
    return bool(_SECRET.search(name)) and not is_path


def missing_variables(config: Any) -> Iterator[Problem]:
    """Yield a problem for each variable that workers should get from this process but that is not set here.

    These are the variables with the value null in `cluster.env_vars`. `config`: config of any job.
    """
    for name, value in config.cluster.env_vars.items():
        if value is None and name not in os.environ:
            error = "plain"
            # The value of a secret is not to be written
            if _SECRET.search(name):
                error = "secret"
            yield problem(
                "env-var-missing",
                f"{KEY}.{name}",
                f"{name}: null",
                error=error,
                name=name,
            )


def variables_of(config: Any, names: Iterable[str] = ()) -> dict[str, str]:
    """Return name -> value of the environment variables for the workers.

    These are the variables in `cluster.env_vars`, and the variables `names` with the values that they have in this
    process. `config`: config of any job.
    """
    return named_variables(config.cluster, names)


def named_variables(
    cluster: ClusterConfig, names: Iterable[str] = ()
) -> dict[str, str]:
    """Return name -> value of the environment variables for the workers, from the config block `cluster`.

    `names`: further variables; workers get the values that these have in this process. Variables without a value are
    left out.
    """
    given = dict.fromkeys(names) | dict(cluster.env_vars)
    taken: dict[str, str] = {}
    for name, value in given.items():
        text = os.environ.get(name) if value is None else show(value)
        if text is not None:
            taken[name] = text
    return taken


def not_given(config: Any) -> str | None:
    """Return a text about environment variables that are set in this process but that the workers do not get.

    Only variables that workers may need are named. Return None if there are none. `config`: config of any job.
    """
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
    """Context manager that sets environment variables in this process, and restores the old values at its end.

    `values`: name -> value. Workers that are threads of this process see the variables as well.
    """
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

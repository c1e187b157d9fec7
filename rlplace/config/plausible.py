"""Values of the right type that cannot be meant, such as the address of another server or a ratio for a distance."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from rlplace.codes import problem
from rlplace.config.blocks.machines import ClusterConfig
from rlplace.errors import Problem

_RAY_ADDRESS = "cluster.ray.address"
_PORT_OF_RAY = 6379
# No accelerator and no machine has less; Slurm counts the MiB of a machine, which are millions at most
_LEAST_MEMORY = {"memory": 1 << 20, "host_memory": 1 << 24}
# GiB that no accelerator and no machine has
_MOST_GIB = {"memory": 1024, "host_memory": 65536}
# A lower clip from here to 1 is a ratio: a policy ratio down to 0.3 would be no clip
_LOWEST_RATIO = 0.7


def implausible(config: Any) -> Iterator[Problem]:
    """Yield a problem for each value of a config that has the right type and cannot be meant.

    `config`: the config of a shipped job.
    """
    yield from _resume(config.resume)
    yield from _address(config.cluster.ray.address)
    yield from _memory(config.cluster)
    yield from _lower_clip(config.algorithm)
    yield from _batch(config.algorithm)
    serve = getattr(config, "serve", None)
    if serve is not None:
        yield from _host(serve.host)


def _resume(named: str | None) -> Iterator[Problem]:
    """Yield a problem if the checkpoint to resume from is a word for the newest one, and no such folder exists."""
    if named in (
        "last",
        "latest",
        "newest",
        "true",
        "yes",
        "on",
    ) and not os.path.exists(named):
        yield problem("wrong-type", "resume", named, error="newest")


def _address(address: str | None) -> Iterator[Problem]:
    """Yield a problem if the address of a Ray cluster has no port, or is that of Ray's client or dashboard server."""
    if address in (None, "auto", "local"):
        return
    scheme, _, host = str(address).rpartition("://")
    without_port = re.sub(r":[0-9]+/*$", "", host)
    if scheme:
        yield problem(
            "bad-ray-address",
            _RAY_ADDRESS,
            address,
            error="of-another-server",
            scheme=scheme,
            host=without_port,
            port=_PORT_OF_RAY,
        )
    elif without_port == host:
        # A port that is no number
        host = re.sub(r"(?<=\w):\w+$", "", host)
        yield problem(
            "bad-ray-address",
            _RAY_ADDRESS,
            address,
            error="without-port",
            host=host,
            port=_PORT_OF_RAY,
        )


def _host(host: str) -> Iterator[Problem]:
    """Yield a problem if the address at which a server listens has a scheme or a port."""
    form = re.compile(r"(?:https?://)?([\w.-]+|\[[0-9a-f:]+\])(?::([0-9]+))?/*")
    found = form.fullmatch(host)
    if found is None or found[1] == host:
        return
    lines = [f"host: {found[1]}"]
    if found[2] is not None:
        lines.append(f"serve.port: {found[2]}")
    yield problem(
        "wrong-type", "serve.host", host, error="host-alone", lines="\n".join(lines)
    )


def _memory(cluster: ClusterConfig) -> Iterator[Problem]:
    """Yield a problem for each memory of a machine or an accelerator that is a small number, without its unit."""
    sizes = {"cluster.accelerator.memory": cluster.accelerator.memory}
    for number, node in enumerate(cluster.nodes):
        sizes[f"cluster.nodes[{number}].memory"] = node.memory
        sizes[f"cluster.nodes[{number}].host_memory"] = node.host_memory
    for key, size in sizes.items():
        leaf = key.rpartition(".")[2]
        if 0 < size < _LEAST_MEMORY[leaf]:
            # More than this would be no machine, if it were gibibytes
            most = _MOST_GIB[leaf]
            yield problem(
                "bad-size",
                key,
                f"{leaf}: {size}",
                error="in-mib" if size > most else "without-unit",
                leaf=leaf,
                number=size,
            )


def _lower_clip(algorithm: Any) -> Iterator[Problem]:
    """Yield a problem if the lower clip is probably the ratio itself, such as 0.8, instead of its distance from 1."""
    low = algorithm.clip_ratio_low
    if algorithm.surrogate == "clip" and low >= _LOWEST_RATIO:
        yield problem(
            "out-of-bounds",
            "algorithm.clip_ratio_low",
            f"clip_ratio_low: {low:g}",
            error="lower-ratio-for-distance",
            distance=round(1 - low, 6),
        )


def _batch(algorithm: Any) -> Iterator[Problem]:
    """Yield a problem if an optimizer step is to take more samples than an iteration has."""
    batch = algorithm.train_batch
    if batch is None or algorithm.prompts is None:
        return
    samples = algorithm.prompts * algorithm.samples_per_prompt
    if batch > samples:
        yield problem(
            "out-of-bounds",
            "algorithm.train_batch",
            f"train_batch: {batch}",
            error="more-than-samples",
            prompts=algorithm.prompts,
            each=algorithm.samples_per_prompt,
            samples=samples,
        )

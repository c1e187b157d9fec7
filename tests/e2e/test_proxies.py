"""Runs where the environment names a proxy: nothing of this machine goes through it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlplace.cli.train import main
from tests.e2e.training import INLINE_LAUNCHER, SMALL, placed, train
from tests.proxy import ADDRESS, answering

WORDS = (
    *SMALL,
    *placed("0", "0", "0"),
    "env.id=tests.proxy:Asking-v0",
    "runner.total_iterations=1",
)
Servers = tuple[list[str], list[str]]


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    """What a proxy of the environment is asked for, and what a server of this machine."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "example.org")
    with answering() as (proxy, caught), answering() as (server, asked):
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, proxy)
        monkeypatch.setenv(ADDRESS, server)
        yield caught, asked


@pytest.mark.parametrize(
    "launcher",
    [
        INLINE_LAUNCHER,
        pytest.param("cluster.launcher=ray", marks=[pytest.mark.ray, pytest.mark.slow]),
    ],
)
def test_workers_reach_a_server_of_this_machine(
    launcher: str, tmp_path: Path, servers: Servers
) -> None:
    caught, asked = servers
    run = train(
        "hybrid_ppo_cartpole", tmp_path, *WORDS, launcher, env=dict(os.environ)
    )  # a process of its own
    assert run.code == 0, run.err
    assert caught == []
    assert asked


@pytest.mark.slow  # variables of workers of a Ray that is joined: test_worker_variables.py
@pytest.mark.ray
def test_workers_of_a_ray_that_was_joined_reach_it_too(
    tmp_path: Path, servers: Servers
) -> None:
    """Their environment is that of the cluster, which excepts nothing."""
    import ray

    from rlplace.workers.ray_launch.session import ray_environment

    caught, asked = servers
    with ray_environment(None):
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, log_to_driver=False
        )
    try:
        os.environ["no_proxy"] = (
            "127.0.0.1"  # of this process, which makes a simulator to see its spaces
        )
        assert (
            main(["hybrid_ppo_cartpole", f"runner.output_dir={tmp_path}", *WORDS]) == 0
        )
    finally:
        ray.shutdown()
    assert [
        url for url in caught if "127.0.0.1" in url
    ] == []  # Ray itself, started like this, asks for its cloud
    assert len(asked) > 1

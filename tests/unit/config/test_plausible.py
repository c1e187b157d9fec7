"""Values of the right type that cannot be meant are refused, with the value that is probably meant."""

from __future__ import annotations

from typing import Any

import pytest

from rlplace.config.read import try_config
from rlplace.errors import Problem

JOB: dict[str, Any] = {
    "cluster": {"component_placement": {"actor": "0", "rollout": "0", "env": "0"}},
    "env": {"kind": "text", "task": "arithmetic"},
    "actor": {"model": {"path": "models/tiny"}},
    "algorithm": {"name": "grpo", "prompts": 8, "samples_per_prompt": 4},
}


def problems_of(block: str, **changed: object) -> list[Problem]:
    _, problems = try_config({**JOB, block: {**JOB[block], **changed}})
    return problems


@pytest.mark.parametrize(
    ("address", "fix"),
    [
        ("10.0.0.1", "address: 10.0.0.1:6379"),
        ("ray://head:10001", "address: head:6379"),
        ("http://head:8265/", "address: head:6379"),
    ],
)
def test_an_address_that_is_not_of_a_ray_cluster(address: str, fix: str) -> None:
    (problem,) = problems_of("cluster", ray={"address": address})
    assert problem.code == "bad-ray-address"
    assert (problem.fix or "").partition("        ")[0] == fix


@pytest.mark.parametrize("address", [None, "auto", "head:6379", "[::1]:6379"])
def test_an_address_of_a_ray_cluster(address: str | None) -> None:
    assert problems_of("cluster", ray={"address": address}) == []


def test_memory_without_its_unit() -> None:
    nodes = [{"count": 1, "accelerators": 8, "host_memory": 2048, "memory": 81920}]
    problems = problems_of("cluster", nodes=nodes)
    assert [(p.key, p.fix) for p in problems] == [
        ("cluster.nodes[0].memory", "memory: 81920MiB"),
        ("cluster.nodes[0].host_memory", "host_memory: <2048MiB or 2048GiB>"),
    ]


def test_a_ratio_where_the_lower_clip_is() -> None:
    (problem,) = problems_of("algorithm", clip_ratio_low=0.8)
    assert problem.fix == "clip_ratio_low: 0.2"
    assert problems_of("algorithm", clip_ratio_low=0.8, surrogate="cispo") == []


def test_an_optimizer_step_of_more_samples_than_there_are() -> None:
    (problem,) = problems_of("algorithm", train_batch=64)
    assert problem.fix == "train_batch: <at most 32, or null for all>"
    assert problems_of("algorithm", train_batch=32) == []

"""Placements made of a `component_placement` block alone, and the problems of those that cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rlplace.errors import PlacementError, Problem
from rlplace.placement import HybridComponentPlacement, Topology

EIGHT, SIXTEEN = Topology.uniform(1, 8), Topology.uniform(2, 8)
TWO = Topology.uniform(2, 4)


def place(
    block: object,
    topology: Topology = EIGHT,
    *,
    node_groups: object = (),
    **options: Any,
) -> HybridComponentPlacement:
    return HybridComponentPlacement(
        {"component_placement": block, "node_groups": node_groups}, topology, **options
    )


def problems(
    block: object, topology: Topology = EIGHT, **options: Any
) -> tuple[Problem, ...]:
    """In the standard format: code, key, why and fix are there."""
    with pytest.raises(PlacementError) as caught:
        place(block, topology, **options)
    for problem in caught.value.problems:
        assert problem.why
        assert problem.fix
        first, *rest = problem.render().splitlines()
        assert first.startswith(f"{problem.key}: ")
        assert first.endswith(f"[{problem.code}]")
        labels = [
            line[:9].strip()
            for line in rest
            if line.startswith("    ") and line[4:8].strip().endswith(":")
        ]
        assert labels == [
            name
            for name in ("got:", "why:", "fix:")
            if getattr(problem, name[:-1]) is not None
        ]
    return caught.value.problems


def only_problem(
    block: Mapping[str, Any], topology: Topology = EIGHT, **options: Any
) -> Problem:
    (problem,) = problems(block, topology, **options)
    return problem

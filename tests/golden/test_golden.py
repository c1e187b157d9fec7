"""Plans, answers, comparisons and errors as text, letter by letter as in `texts/`; UPDATE_GOLDEN=1 rewrites them."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import rlplace.placement
from rlplace.codes import codes
from rlplace.errors import PlacementError, Source
from rlplace.placement import HybridComponentPlacement, Topology
from rlplace.placement.show.explain import explain_accelerator, explain_component
from rlplace.placement.show.text import render_diff, render_text
from rlplace.placement.show.view import render_json
from tests.unit.placement.reports import APART, HYBRID, SIX, llm, ppo

HERE = Path(__file__).parent / "texts"
EIGHT = Topology.uniform(1, 8)
SHARED = {"actor": "0-7", "env,rollout": {"accelerators": "0-7", "process": "shared"}}
NINE = {"nodes": [{"accelerators": 9}]}


def wrong(placement: Mapping[str, object]) -> str:
    lines = {
        f"cluster.component_placement.{key}": 7 + i for i, key in enumerate(placement)
    }
    sources = {
        key: Source(file="hybrid_ppo.yaml", line=line) for key, line in lines.items()
    }
    with pytest.raises(PlacementError) as caught:
        HybridComponentPlacement(
            {"component_placement": placement}, EIGHT, sources=sources
        )
    return str(caught.value)


def refused(placement: Mapping[str, object] = HYBRID, **options: Any) -> str:
    with pytest.raises(PlacementError) as caught:
        ppo(placement, **options)
    return str(caught.value)


TEXTS: dict[str, Callable[[], str]] = {
    "hybrid": lambda: render_text(ppo()),
    "one-process": lambda: render_text(ppo(SHARED)),
    "six-components": lambda: render_text(llm(model=None)),
    "diff": lambda: render_diff(ppo(name="hybrid"), ppo(APART, name="disaggregated")),
    "component": lambda: explain_component(ppo(), "rollout"),
    "stays": lambda: explain_component(
        llm(SIX | {"critic": "8"}, model=None, cluster=NINE), "critic"
    ),
    "accelerator": lambda: explain_accelerator(ppo(), 5),
    # a caret, two lines of why and a remark beside the fix, a problem inside a block, two problems, three problems
    "accelerator-out-of-range": lambda: wrong(HYBRID | {"actor": "0-8"}),
    "base-60-integer": lambda: wrong(HYBRID | {"rollout": 247}),
    "unknown-key": lambda: wrong(
        HYBRID | {"rollout": {"placement": "4-7", "tensor_paralel_size": 2}}
    ),
    "rank-without-rows": lambda: refused(
        {"actor": "0-7", "env": "0", "rollout": "4-7"}, envs=6
    ),
    "residents-clash": lambda: refused(offload=False),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text(name: str) -> None:
    text = TEXTS[name]().rstrip("\n") + "\n"
    file = HERE / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        file.write_text(text, encoding="utf-8")
    assert file.read_text(encoding="utf-8") == text, (
        f"{name} differs; UPDATE_GOLDEN=1 accepts the new text"
    )


def test_nothing_is_left_over() -> None:
    assert {file.stem for file in HERE.iterdir()} == set(TEXTS)


def test_plan_json() -> None:
    record: Any = json.loads(json.dumps(render_json(ppo(envs=64))))
    node = {
        "rank": 0,
        "accelerators": 8,
        "first": 0,
        "kind": "emulated",
        "memory_bytes": 16 << 30,
    }
    assert (record["mode"], record["topology"]["nodes"]) == ("hybrid", [node])
    env = record["components"]["env"]
    assert (env["placement"], env["world_size"], env["accelerators"]) == (
        "0-3",
        4,
        "0-3",
    )
    assert env["ranks"][3] == {
        "rank": 3,
        "node": 0,
        "local_rank": 3,
        "accelerators": [3],
    }
    assert record["pairs"][0] == {
        "a": "actor",
        "b": "env",
        "relation": "hybrid",
        "shared": "0-3",
    }
    schedule = record["schedule"]
    assert set(schedule) == {"stages", "active", "residency", "first", "entries"}
    assert schedule["active"] == {
        "sync": ["actor", "rollout"],
        "rollout": ["env", "rollout"],
        "learn": ["actor"],
    }
    assert schedule["residency"]["rollout"] == {
        "actor": "off",
        "env": "full",
        "rollout": "full",
    }
    assert set(record["routes"]) == {"observations", "trajectories", "weights"}
    assert [channel["name"] for channel in record["channels"]] == [
        "observations",
        "actions",
        "trajectories",
        "weights",
    ]
    assert record["warnings"] == []


def test_every_error_code_of_the_placement_is_asserted_by_a_test() -> None:
    """Those of the rules that placements have to keep included."""

    def literals(text: str) -> set[str]:
        return {
            node.value
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }

    def texts(*folders: Path) -> Iterator[str]:
        for folder in folders:
            for file in folder.rglob("*.py"):
                yield file.read_text(encoding="utf-8")

    package = Path(rlplace.placement.__file__).parent.parent
    made = set[str]()
    for text in texts(package / "placement", package / "checks"):
        made |= literals(text) & set(codes())
    # Words of commands are no part of a placement
    for text in texts(package / "jobs"):
        made |= (literals(text) & set(codes())) - {"bad-option"}
    assert len(made) > 50
    left = {code for code in made if "-" in code}
    for text in texts(Path(__file__).parent.parent / "unit"):
        # Only a text that has one of them is parsed
        if any(code in text for code in left):
            left -= literals(text)
    assert left == set()

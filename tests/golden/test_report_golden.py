"""Reports, diffs and answers as text, letter by letter as in `reports/`; UPDATE_GOLDEN=1 rewrites them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rlplace.placement.show.diff import render_diff
from rlplace.placement.show.explain import explain_accelerator, explain_component
from rlplace.placement.show.text import render_text
from tests.unit.placement.reports import APART, SIX, llm, ppo

HERE = Path(__file__).parent / "reports"
TEXTS: dict[str, Callable[[], str]] = {
    "hybrid.txt": lambda: render_text(ppo()),
    "six-components.txt": lambda: render_text(llm(model=None)),
    "diff.txt": lambda: render_diff(ppo(name="hybrid"), ppo(APART, name="disaggregated")),
    "component.txt": lambda: explain_component(ppo(), "rollout"),
    "stays.txt": lambda: explain_component(
        llm(SIX | {"critic": "8"}, model=None, cluster={"nodes": [{"accelerators": 9}]}), "critic"
    ),
    "accelerator.txt": lambda: explain_accelerator(ppo(), 5),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text(name: str) -> None:
    text = TEXTS[name]().rstrip("\n") + "\n"
    file = HERE / name
    if os.environ.get("UPDATE_GOLDEN") == "1":
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert file.read_text(encoding="utf-8") == text, f"{name} differs; UPDATE_GOLDEN=1 accepts the new text"


def test_nothing_is_left_over() -> None:
    assert {file.name for file in HERE.iterdir()} == set(TEXTS)

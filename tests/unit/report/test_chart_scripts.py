"""The scripts of a report, run by node with the few parts of a browser that they need."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlplace.report.charts import scripts

SCRIPT = Path(__file__).parents[2] / "report_charts.js"


def charts_in(language: str, pages: tuple[str, ...]) -> dict[str, Any]:
    """Return what the scripts `pages` make in a browser with this language."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("the charts are JavaScript, and this machine has no node")
    done = subprocess.run(
        [node, str(SCRIPT), language],
        input=json.dumps(pages),
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("language", ["en-US", "zh-CN", "en-US@posix"])
def test_charts_are_drawn_in_a_browser_of_any_language(language: str) -> None:
    found = charts_in(language, scripts())
    assert found["kind"] == "function"
    assert found["shown"]


def test_values_that_are_all_zero_have_a_small_axis() -> None:
    zeros, some, none = charts_in("en-US", scripts())["bounds"]
    assert zeros == [0, 1]
    assert some[0] <= 0
    assert 4 <= some[1] < 8
    assert none == [None, None]


def test_the_pictures_stay_without_the_library() -> None:
    _, ours = scripts()
    assert not charts_in("en-US", ("", ours))["shown"]

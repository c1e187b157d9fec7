"""A node that a run on Ray leaves: its loss is none of the run, and a machine that joins takes its place."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlplace.cli.drain import main as drain
from rlplace.cli.replace import main as replace
from tests.e2e.test_node_loss import Run, head, nodes
from tests.e2e.test_resume import CONSTANT
from tests.e2e.training import placed

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["head", "nodes"]


def asked(main: Any, *words: str) -> tuple[int, str]:
    """Return the exit code of a command and what it prints."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        code = main(words)
    return code, shown.getvalue()


def test_a_drained_node_may_leave_and_another_machine_takes_its_place(
    nodes: Any, tmp_path: Path
) -> None:
    run = Run(nodes, tmp_path, *CONSTANT, *placed("[0,4]", "0-1", "4-5"))
    run.until("    4 ")
    (folder,) = tmp_path.glob("*/*")
    code, shown = asked(drain, str(folder), "0")
    assert (code, "the driver of the run is on this node" in shown) == (2, True)
    code, shown = asked(drain, str(folder), "1")
    assert code == 0, shown
    assert "actor 0,4 -> 0,2, rollout 4-5 -> 0-1" in shown
    assert re.search(r"node 1 \(\S+\) is empty, and may leave", shown), shown
    # Nobody misses it
    run.lose_node()
    place = "cluster.component_placement.env=2"
    code, shown = asked(replace, str(folder), place)
    assert code == 0, shown
    back = "cluster.component_placement.rollout=4-5"
    code, shown = asked(replace, str(folder), back)
    assert (code, "a node of the change was drained" in shown) == (2, True), shown
    code, shown = asked(drain, str(folder), "1", "--release")
    assert (code, "no machine is there for the node" in shown) == (2, True), shown
    nodes.add_node(num_cpus=1)
    run.until("machine ")
    code, shown = asked(drain, str(folder), "1", "--release")
    assert code == 0, shown
    words = re.search(r"rlplace replace (\S+) (.*)", shown)
    assert words is not None, shown
    assert words[1] == str(folder)
    assert "rollout" in words[2]
    code, shown = asked(replace, str(folder), back)
    assert code == 0, shown
    assert "rollout 0-1 -> 4-5" in shown
    ended = run.stop()
    assert ended.code == 143, ended.err
    lines = [line["policy/version"] for line in ended.metrics()]
    assert lines == list(range(1, len(lines) + 1))
    summary = ended.summary()
    assert "faults" not in summary or not summary["faults"]["events"]
    events = [event["event"] for event in summary["nodes"]]
    assert events == ["drained", "joined", "released"]
    assert json.dumps(summary["changes"]).count('"kept": ""') == 3

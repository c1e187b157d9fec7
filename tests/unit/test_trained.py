"""The last lines of a run: where its policy is, and a command that can be pasted at every width of the terminal."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from rlplace.trained import POLICY, where


@pytest.mark.parametrize("width", [50, 60, 80, 120, 200])
def test_the_command_is_broken_between_words_and_can_be_pasted(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.chdir(tmp_path)
    run = Path("runs/a b/2026-11-28_19-03-12")
    run.mkdir(parents=True)
    (run / POLICY).touch()
    policy, _, played = where(run).partition("\nevaluate")
    command = f"evaluate{played}".splitlines()
    assert policy.split() == f"policy {run}/{POLICY}".split()
    assert max(map(len, policy.splitlines())) <= max(width, len(f"{run}/{POLICY}"))
    assert (len(command) == 1) == (width > 60)
    assert max(map(len, command)) <= width
    # A shell joins lines that end in a backslash.
    words = shlex.split("".join(command).replace("\\", ""))
    assert words == ["evaluate", "python", "-m", "rlplace.evaluate", str(run)]


def test_a_run_without_a_policy_says_so(tmp_path: Path) -> None:
    assert where(tmp_path) == "policy     none: the run ended before it had saved one"

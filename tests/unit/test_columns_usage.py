"""`rlplace train --help` explains every number that the screen shows."""

from __future__ import annotations

import pytest

from rlplace.cli.train import COLUMNS_USAGE, main
from rlplace.report.sinks import (
    EVALUATED_CONSOLE,
    RUN_CONSOLE,
    SCORED_CONSOLE,
    TEXT_CONSOLE,
)

CONSOLES = (RUN_CONSOLE, EVALUATED_CONSOLE, TEXT_CONSOLE, SCORED_CONSOLE)


def test_the_help_explains_each_column(capsys: pytest.CaptureFixture[str]) -> None:
    heads = {column.head for console in CONSOLES for column in console.columns}
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    usage = COLUMNS_USAGE.read_text(encoding="utf-8")
    assert usage.rstrip() in shown
    for head in heads:
        assert f"    {head}  " in usage, head
    # No line is about a column that is gone.
    named = {line[4:16].strip() for line in usage.splitlines()[1:]}
    assert named <= heads

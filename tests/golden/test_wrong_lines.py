"""Wrong command lines are refused with their fixes, and a line with the fix is read.

`wrong_lines.yaml` has what is typed, the fixes, and `then`: the line with the fix in place of the wrong words.
"""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlplace.config.compose import with_hydra
from rlplace.contract.reading import try_job

ROWS = yaml.load(
    (Path(__file__).parent / "wrong_lines.yaml").read_text(encoding="utf-8"),
    Loader=yaml.CSafeLoader,  # of libyaml: each process of the tests reads the rows
)


def told(
    row: Mapping[str, Any], capsys: pytest.CaptureFixture[str]
) -> tuple[int, list[str]]:
    """Return the exit code of a line, and the fixes that are told, without remarks behind them."""
    command, *words = shlex.split(row["line"])
    code = importlib.import_module(f"rlplace.cli.{command}").main(words)
    fixes = re.findall(r"^    fix: (.*)", capsys.readouterr().err, re.MULTILINE)
    return code, [fix.partition(" " * 8)[0] for fix in fixes]


# Of five parts, one is in the default tests: a line takes about 0.1 s.
PARTS = 5
EACH_PART = pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, marks=pytest.mark.slow if part else ())
        for part in range(PARTS)
    ],
)


def test_there_are_as_many_lines_as_were_collected() -> None:
    assert len(ROWS) >= 200


@EACH_PART
def test_wrong_lines_are_refused_with_their_fixes(
    part: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLPLACE_CALLED", raising=False)
    wrong = []
    for row in ROWS[part::PARTS]:
        code, fixes = told(row, capsys)
        if code != 2 or fixes != row["fixes"]:
            wrong.append(
                f"{row['line']}: exit code {code}, {fixes}, not {row['fixes']}"
            )
    assert not wrong, "\n".join(wrong)
    assert [*tmp_path.iterdir()] == []


@EACH_PART
def test_lines_with_the_fix_are_read(part: int) -> None:
    for line in [row["then"] for row in ROWS[part::PARTS] if "then" in row]:
        config, diff, other = line.partition(" --diff ")
        for words in [config, other] if diff else [config]:
            (composed,) = with_hydra(shlex.split(words))
            _, problems = try_job(composed.mapping, composed.sources)
            assert not problems, f"{words}: {problems[0]}"

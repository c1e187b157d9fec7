"""`rlplace doctor` on this machine: what it says, for people and for programs, and how it ends."""

from __future__ import annotations

import json

import pytest

from rlplace.cli import doctor
from rlplace.config import compose
from rlplace.runtime import prepare


@pytest.mark.slow
def test_it_tells_the_same_in_both_formats(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    assert doctor.main(["--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told["configs"]) == list(compose.config_names())
    assert told["configs"]["cartpole"] == {
        "runs": True,
        "problem": None,
        "inline": None,
    }
    for name, verdict in told["configs"].items():
        (line,) = (line for line in text.splitlines() if line.split()[:1] == [name])
        reason = verdict["problem"]
        if verdict["runs"]:
            assert line.endswith("runs")
            continue
        assert line.endswith(f"{reason['what']} [{reason['code']}]")
        assert reason["key"] in line
        # An example of a plan needs no fix
        command = f"python -m rlplace.plan {name}"
        only_planned = reason["code"] == "plan-only" and command in text
        assert only_planned or f"fix: {reason['fix'].splitlines()[0]}" in text
    assert [key for key in told["machine"] if key not in text] == []


def test_it_fails_where_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    lacking = prepare.missing_library(
        "no module torch", got="a run", extra="run", key="dry_run", of="runs"
    ).problems
    monkeypatch.setattr(doctor, "check_run", lambda job: list(lacking))
    assert doctor.main([]) == 1
    assert "[missing-library]" in capsys.readouterr().out

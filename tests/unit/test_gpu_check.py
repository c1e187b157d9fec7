"""The check of GPUs, where there is none: its table, its exit codes, and that one failure does not end the others."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu_check import CHECKS, NOT_HERE, Check, _end, main, run
from benchmarks.gpu_tries import TRIES, grpo_words
from rlplace.config.compose import with_hydra
from rlplace.prepare import prepare_composed


def check(name: str, program: str, deadline_s: float = 60.0) -> Check:
    return Check(name=name, what=f"tries {name}", command=(sys.executable, "-c", program), deadline_s=deadline_s)


FINE = check("fine", "print('noise'); print('7 GiB/s')")
ABSENT = check("absent", f"print('two GPUs are needed'); raise SystemExit({NOT_HERE})")
BROKEN = check("broken", "import sys; sys.exit('it differs by 3')")


def test_without_a_gpu_one_error_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], [check("never", "raise AssertionError")], count=lambda: 0) == 2
    told = capsys.readouterr()
    assert "[no-gpu]" in told.err
    assert told.out == ""


def test_every_check_runs_whatever_becomes_of_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    hanging = check("hanging", "import threading; threading.Event().wait()", deadline_s=0.01)
    missing = Check(name="missing", what="is not there", command=(sys.executable, "no-such-file"))
    assert main([], [BROKEN, hanging, missing, ABSENT, FINE], count=lambda: 1) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[13:15] == ["broken:", "  it differs by 3"]  # the last words of a failure
    cells = {line.split()[0]: line for line in lines[7:12]}
    assert cells["broken"].endswith("it differs by 3")
    assert "failed" in cells["broken"]
    assert cells["hanging"].endswith("not done after 0.01 s")
    assert "no-such-file" in cells["missing"]
    assert "not here" in cells["absent"]
    assert cells["absent"].endswith("two GPUs are needed")
    assert cells["fine"].endswith("7 GiB/s")


def test_what_was_measured_stands_below_its_check_and_what_missed_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    program = "print('@offload\\t0.61 x\\tat least 0.8 x\\tmissed'); print('@onload\\t0.9 x\\tat least 0.8 x\\t'); "
    slow = check("slow", program + "import sys; print('10 GiB/s'); sys.exit('offload is 0.61 x')")
    assert main([], [slow], count=lambda: 1) == 1
    rows = [line.split("   ") for line in capsys.readouterr().out.splitlines() if "   " in line]
    cells = {row[0].strip() or row[1].strip(): [cell.strip() for cell in row if cell.strip()] for row in rows}
    assert cells["check"] == ["check", "result", "measured", "expected", "seconds", "figure, or why not"]
    assert cells["slow"][:2] == ["slow", "failed"]
    assert cells["slow"][-1] == "offload is 0.61 x"
    assert cells["offload"] == ["offload", "missed", "0.61 x", "at least 0.8 x"]
    assert cells["onload"] == ["onload", "0.9 x", "at least 0.8 x"]


def test_checks_for_which_no_time_is_left_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], [FINE], count=lambda: 1, budget_s=0.0) == 0
    assert "no time" in capsys.readouterr().out


def test_the_last_check_ends_with_the_time_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    """What is cut short by the others has not failed."""
    hanging = check("hanging", "import threading; threading.Event().wait()", deadline_s=300.0)
    assert main([], [hanging, FINE], count=lambda: 1, budget_s=0.5) == 0
    cells = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if "no time" in line}
    assert [*cells] == ["hanging", "fine"]
    assert "scripts/gpu_check hanging" in cells["hanging"]


def test_who_a_late_check_has_started_has_time_to_end(tmp_path: Path) -> None:
    """As a run does, whose own processes are in other groups: it ends them when it is asked to."""
    ended, ready = tmp_path / "ended", tmp_path / "ready"
    child = (
        "import pathlib, signal, threading, time; over = threading.Event(); "
        "signal.signal(signal.SIGTERM, lambda *_: over.set()); "
        f"pathlib.Path({str(ready)!r}).touch(); over.wait(); time.sleep(0.3); pathlib.Path({str(ended)!r}).touch()"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], start_new_session=True)
    while not ready.exists():
        assert process.poll() is None
        time.sleep(0.01)
    _end(process)
    assert ended.exists()


def test_without_a_gpu_the_checks_themselves_can_be_tried(capsys: pytest.CaptureFixture[str]) -> None:
    told = check("told", "import sys; print(*sys.argv[1:])")
    assert main(["--emulated"], [told], count=lambda: 0) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("--emulated")


def test_some_can_be_asked_for_by_name_and_what_this_machine_cannot_run_is_no_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["fine", "absent"], [BROKEN, FINE, ABSENT], count=lambda: 1) == 0
    assert "broken" not in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["fien"], [BROKEN, FINE], count=lambda: 1)
    assert caught.value.code == 2
    assert "there are broken, fine" in capsys.readouterr().err


def test_who_is_left_behind_is_ended() -> None:
    """That no process stays is checked for every test; here a grandchild that would."""
    program = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    assert run(check("parent", program)).result == "ok"


def test_the_short_run_is_planned_on_one_accelerator() -> None:
    there = {"cluster.accelerator.kind=cuda": "cluster.accelerator.kind=emulated", "rollout.kv_cache_memory=null": ""}
    words = [there.get(word, word) for word in grpo_words(emulated=False)]
    (composed,) = with_hydra([word for word in words if word])
    report = prepare_composed(composed).view
    assert report.fits
    assert report.plan.placement.mode == "collocated"
    assert report.plan.placement.topology.num_accelerators == 1


def test_every_try_is_checked() -> None:
    assert [*TRIES, "tests"] == [c.name for c in CHECKS]

"""The check of GPUs, where there is none: its table, its exit codes, and that one failure does not end the others."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu_groups, gpu_learning, gpu_ledger, gpu_simulators
from benchmarks.gpu_check import CHECKS, NOT_HERE, Check, _end, _seconds, main, run
from benchmarks.gpu_ledger import GROUPS, cases, emulated, measure
from benchmarks.gpu_runs import RUNS, inline_words, one_gpu, turns_words, vllm_words
from benchmarks.gpu_tries import TRIES
from benchmarks.random_models import random_model
from rlplace.config.compose import with_hydra
from rlplace.runtime.prepare import prepare_composed


def check(name: str, program: str, deadline_s: float = 60.0) -> Check:
    return Check(
        name=name,
        what=f"tries {name}",
        command=(sys.executable, "-c", program),
        deadline_s=deadline_s,
    )


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where results are written."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


FINE = check("fine", "print('noise'); print('7 GiB/s')")
ABSENT = check("absent", f"print('two GPUs are needed'); raise SystemExit({NOT_HERE})")
BROKEN = check("broken", "import sys; sys.exit('it differs by 3')")


def test_without_a_gpu_one_error_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], [check("never", "raise AssertionError")], count=lambda: 0) == 2
    told = capsys.readouterr()
    assert "[no-gpu]" in told.err
    assert told.out == ""


def test_every_check_runs_whatever_becomes_of_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hanging = check(
        "hanging", "import threading; threading.Event().wait()", deadline_s=0.01
    )
    missing = Check(
        name="missing", what="is not there", command=(sys.executable, "no-such-file")
    )
    assert main([], [BROKEN, hanging, missing, ABSENT, FINE], count=lambda: 1) == 1
    lines = capsys.readouterr().out.splitlines()
    table = lines[
        next(at for at, line in enumerate(lines) if line.startswith("check ")) :
    ]
    assert table[7:9] == ["broken:", "  it differs by 3"]  # the last words of a failure
    cells = {line.split()[0]: line for line in table[1:6]}
    assert cells["broken"].endswith("it differs by 3")
    assert "failed" in cells["broken"]
    assert cells["hanging"].endswith("not done after 0.01 s")
    assert "can't open file" in cells["missing"]
    assert "not here" in cells["absent"]
    assert cells["absent"].endswith("two GPUs are needed")
    assert cells["fine"].endswith("7 GiB/s")


def test_what_was_measured_stands_below_its_check_and_what_missed_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = "print('@offload\\t0.61 x\\tat least 0.8 x\\tmissed'); print('@onload\\t0.9 x\\tat least 0.8 x\\t'); "
    slow = check(
        "slow", program + "import sys; print('10 GiB/s'); sys.exit('offload is 0.61 x')"
    )
    assert main([], [slow], count=lambda: 1) == 1
    rows = [
        line.split("   ")
        for line in capsys.readouterr().out.splitlines()
        if "   " in line
    ]
    cells = {
        row[0].strip() or row[1].strip(): [cell.strip() for cell in row if cell.strip()]
        for row in rows
    }
    assert cells["check"] == [
        "check",
        "result",
        "measured",
        "expected",
        "seconds",
        "figure, or why not",
    ]
    assert cells["slow"][:2] == ["slow", "failed"]
    assert cells["slow"][-1] == "offload is 0.61 x"
    assert cells["offload"] == ["offload", "missed", "0.61 x", "at least 0.8 x"]
    assert cells["onload"] == ["onload", "0.9 x", "at least 0.8 x"]


def test_the_last_check_ends_with_the_time_of_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is cut short by the others has not failed."""
    hanging = check(
        "hanging", "import threading; threading.Event().wait()", deadline_s=300.0
    )
    assert main(["--within", "0.6s"], [hanging, FINE], count=lambda: 1) == 0
    cells = {
        line.split()[0]: line
        for line in capsys.readouterr().out.splitlines()
        if "no time" in line
    }
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
    parent = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], start_new_session=True)
    while not ready.exists():
        assert process.poll() is None
        time.sleep(0.01)
    _end(process)
    assert ended.exists()


def test_without_a_gpu_the_checks_themselves_can_be_tried(
    capsys: pytest.CaptureFixture[str],
) -> None:
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


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            [*vllm_words(emulated=False), "rollout.kv_cache_memory=64MiB"], id="vllm"
        ),
        pytest.param(turns_words(Path("model"), "Qwen3-0.6B"), id="turns"),
        pytest.param(inline_words(Path("model")), id="learns"),
    ],
)
def test_the_short_runs_are_planned_on_one_accelerator(words: list[str]) -> None:
    (composed,) = with_hydra(
        [*one_gpu(emulated=True), "cluster.accelerator.memory=80GiB", *words]
    )
    report = prepare_composed(composed).view
    assert report.fits
    assert report.plan.placement.mode == "collocated"
    assert report.plan.placement.topology.num_accelerators == 1


def test_every_try_is_checked() -> None:
    checked = {(check.command[2], check.command[3]) for check in CHECKS}
    modules = {
        "gpu_tries": TRIES,
        "gpu_runs": RUNS,
        "gpu_ledger": GROUPS,
        "gpu_learning": gpu_learning.TRIES,
        "gpu_groups": gpu_groups.TRIES,
        "gpu_simulators": gpu_simulators.TRIES,
    }
    for module, names in modules.items():
        assert {
            name for place, name in checked if place == f"benchmarks.{module}"
        } == set(names)


def test_a_check_whose_library_is_missing_is_not_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lacking = dataclasses.replace(BROKEN, needs=("json", "no_such_library"))
    assert main([], [lacking, FINE], count=lambda: 1) == 0
    line = next(
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("broken")
    )
    assert "not here" in line
    assert "no_such_library not installed" in line


def test_each_result_is_in_the_file_before_the_next_check_begins(folder: Path) -> None:
    """A machine that goes away in the middle has told what it had."""
    file = folder / "results" / "found.jsonl"
    told = check(
        "told", "print('@rate\\t7 GiB/s\\tat least 5 GiB/s\\t'); print('7 GiB/s')"
    )
    looks = check("looks", f"print(len(open({str(file)!r}).readlines()))")
    assert main(["--json", str(file)], [told, looks], count=lambda: 1) == 0
    first, second = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    measured = {
        "what": "rate",
        "measured": "7 GiB/s",
        "expected": "at least 5 GiB/s",
        "missed": "",
    }
    assert (first["check"], first["result"], first["measured"]) == (
        "told",
        "ok",
        [measured],
    )
    assert second["figure"] == "1"


@pytest.mark.parametrize(
    ("text", "seconds"), [("8m", 480.0), ("90s", 90.0), ("30", 30.0), ("1h", 3600.0)]
)
def test_times_have_units(text: str, seconds: float) -> None:
    assert _seconds(text) == seconds


@pytest.mark.parametrize("text", ["soon", "0", "8 m", "-3s"])
def test_what_is_no_time_is_refused(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([f"--within={text}"], [FINE], count=lambda: 1)
    assert caught.value.code == 2
    assert "is no time: 8m, 90s" in capsys.readouterr().err


def test_the_readings_of_the_ledger_are_of_a_real_actor(tmp_path: Path) -> None:
    """On a CPU, in the size of one: what is resident is exact, and learning holds no more than was predicted."""
    model = random_model(tmp_path / "model", "emulated")
    reading = measure(
        dataclasses.replace(emulated(cases("small")[0]), groups=1, budget_samples=2),
        model,
        on_cpu=True,
    )
    measured, predicted = reading.resident
    assert (
        0 <= measured - predicted <= 1 << 10
    )  # rotary embeddings, which belong to no weight
    measured, predicted = reading.peak
    assert measured <= predicted <= 1.1 * measured
    assert reading.moved == reading.resident[0]


def test_a_case_of_the_ledger_that_hangs_is_ended_and_the_next_ones_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_ledger, "CASE_S", 0.01)
    case = emulated(cases("small")[0])
    assert gpu_ledger._shown(case, tmp_path, on_cpu=True) == [
        f"{case.name} died: not done after 0.01 s"
    ]
    assert capsys.readouterr().out == f"@{case.name}\tdied\t-\tmissed\n"


def test_results_that_cannot_be_written_are_told_before_anything_runs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "file").touch()
    never = check("never", "raise AssertionError")
    assert (
        main(["--json", str(folder / "file" / "found.jsonl")], [never], count=lambda: 1)
        == 2
    )
    assert "cannot be written" in capsys.readouterr().err


def test_models_of_a_check_that_is_killed_are_removed(folder: Path) -> None:
    program = "import os, pathlib, threading; models = pathlib.Path(os.environ['RLPLACE_CHECK_MODELS']); "
    program += f"(models / 'weights').touch(); pathlib.Path({str(folder / 'told')!r}).write_text(str(models)); "
    outcome = run(
        check("hanging", program + "threading.Event().wait()", deadline_s=5.0)
    )
    assert outcome.result == "failed"
    assert not Path((folder / "told").read_text()).exists()

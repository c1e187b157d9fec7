"""Code of a model against unit tests: what it does wrong stays its own trouble."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from rlplace.envs.text import Transcript
from rlplace.envs.text.code_runner import run_tests
from rlplace.envs.text.verifiers import unit_tests


def failures(code: str) -> tuple[str, ...]:
    report = run_tests(code, ["pass"], timeout_s=60)
    assert (report.passed, report.ended) == (0, "finished")
    return report.failures


def test_each_test_passes_or_fails_by_itself() -> None:
    code = "def double(x):\n    return 2 * x\n"
    report = run_tests(code, ["assert double(2) == 4", "assert double(2) == 5", "assert double('a') == 'aa'", "x = y"])
    assert (report.passed, report.ended) == (2, "finished")
    assert report.failures == ("AssertionError: ", "NameError: name 'y' is not defined")


@pytest.mark.parametrize(
    ("code", "raised"),
    [
        ("def f(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("bytearray(1 << 31)", "MemoryError"),
        ("open('big', 'wb').write(bytes(64 << 20))", "OSError: [Errno 27] File too large"),
    ],
)
def test_code_that_fails_passes_nothing(code: str, raised: str) -> None:
    (failure,) = failures(code)
    assert failure.startswith(raised)


@pytest.mark.parametrize(
    ("code", "test", "ended"), [("import os; os._exit(0)", "pass", "died"), ("", "while True: pass", "timeout")]
)
def test_code_that_does_not_come_back_passes_nothing(code: str, test: str, ended: str) -> None:
    report = run_tests(code, [test], timeout_s=0.5 if ended == "timeout" else 60)
    assert (report.passed, report.ended) == (0, ended)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere root may start what it likes")
@pytest.mark.parametrize("how", ["os.fork()", "subprocess.run(['true'])", "threading.Thread(target=print).start()"])
def test_code_starts_no_processes_and_no_threads(how: str) -> None:
    (failure,) = failures(f"import os, subprocess, threading\n{how}")
    assert "Resource temporarily unavailable" in failure or "can't start new thread" in failure


def test_code_sees_no_secrets_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    before = len(os.listdir("/proc/self/fd"))
    (failure,) = failures("import os\nopen('left', 'w').write('x')\nraise ValueError(os.getcwd(), *os.environ)")
    assert "SECRET" not in failure
    folder = failure.removeprefix("ValueError: ('").partition("'")[0]
    assert Path(folder).name.startswith("rlplace-code-")
    assert not Path(folder).exists()
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_code_writes_into_the_report_does_not_pass_tests() -> None:
    forged = """
import os
for fd in range(3, 20):
    try:
        os.write(fd, b'no json\\n[1]\\n{"test": 7}\\n')
    except OSError:
        pass
"""
    report = run_tests(forged, ["assert False"])
    assert report.passed == 0


def test_the_share_of_passed_tests_is_a_reward() -> None:
    answer = "Here it is:\n```python\ndef f(x):\n    return abs(x)\n```\n"
    tests = ["assert f(1) == 1", "assert f(-1) == 1", "assert f(2) == 3"]
    transcript = Transcript(
        prompt="?", answers=(answer,), replies=(), facts={"tests": tests}, tokens=9, truncated=False
    )
    assert unit_tests(transcript) == pytest.approx(2 / 3)

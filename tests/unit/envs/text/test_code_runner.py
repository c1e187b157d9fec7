"""Code of a model against unit tests: what it does wrong stays its own trouble."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rlplace.envs.text import Transcript
from rlplace.envs.text.code_runner import run_tests
from rlplace.envs.text.rewards import unit_tests

_CALLS = 5


def raises(code: str, error: str) -> bool:
    """Whether the code raises one of these errors there, and goes on after it."""
    tried = (
        f"try:\n    exec({code!r})\nexcept BaseException as error:\n    raised = error"
    )
    return run_tests(tried, [f"assert isinstance(raised, {error})"], timeout_s=60) == 1


def test_each_test_passes_or_fails_by_itself() -> None:
    code = "def double(x):\n    return 2 * x\n"
    tests = [
        "assert double(2) == 4",
        "assert double(2) == 5",
        "x = y",
        "raise SystemExit",
        "assert double('a') == 'aa'",
    ]
    assert run_tests(code, tests) == 2


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("def f(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("bytearray(1 << 31)", "MemoryError"),
        ("open('big', 'wb').write(bytes(64 << 20))", "OSError"),
    ],
)
def test_code_that_fails_passes_nothing(code: str, error: str) -> None:
    assert raises(code, error)
    assert run_tests(code, ["pass"], timeout_s=60) == 0


@pytest.mark.parametrize(
    ("code", "test", "timeout_s"),
    [("import os; os._exit(0)", "pass", 60), ("", "while True: pass", 0.5)],
)
def test_code_that_does_not_come_back_passes_nothing(
    code: str, test: str, timeout_s: float
) -> None:
    began = time.monotonic()
    assert run_tests(code, [test], timeout_s=timeout_s) == 0
    assert time.monotonic() - began < 30


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere root may start what it likes"
)
@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("import os; os.fork()", "BlockingIOError"),
        ("import subprocess; subprocess.run(['true'])", "BlockingIOError"),
        ("import threading; threading.Thread(target=print).start()", "RuntimeError"),
    ],
)
def test_code_starts_no_processes_and_no_threads(how: str, error: str) -> None:
    assert raises(how, error)


def test_code_sees_no_secrets_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SECRET", "1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "import os\nopen('left', 'w').write('x')"
    tests = [
        "assert 'SECRET' not in os.environ",
        f"assert os.getcwd().startswith({str(tmp_path)!r})",
    ]
    assert run_tests(code, tests) == len(tests)
    assert list(tmp_path.iterdir()) == []
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(_CALLS):
        run_tests(code, tests)
    assert (
        len(os.listdir("/proc/self/fd")) < before + _CALLS
    )  # other threads of this process may have opened some


def test_what_code_writes_into_the_report_does_not_pass_tests() -> None:
    forged = """
import os
for fd in range(3, 20):
    try:
        os.write(fd, b'nonsense\\n0 passed\\n7 passed\\n\\xff\\n')
    except OSError:
        pass
"""
    assert run_tests(forged, ["assert False"]) == 0


def test_the_share_of_passed_tests_is_a_reward() -> None:
    answer = "Here it is:\n```python\ndef f(x):\n    return abs(x)\n```\n"
    tests = ["assert f(1) == 1", "assert f(-1) == 1", "assert f(2) == 3"]
    transcript = Transcript(
        prompt="?",
        answers=(answer,),
        replies=(),
        facts={"tests": tests},
        tokens=9,
        truncated=False,
    )
    assert unit_tests(transcript) == pytest.approx(2 / 3)

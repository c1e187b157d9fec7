"""Tests that stumble over a library that is not installed are skipped; other failures stay failures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.absent import OWN_SETUP

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = """
from tests import absent
from tests.absent import pytest_make_collect_report, pytest_runtest_makereport

absent.OPTIONAL.add("no_such_library")
"""
WHOLE_FILE = """
import no_such_library

def test_never_collected():
    pass
"""
MIXED = """
from rlplace.errors import ConfigError, Problem

def test_imports():
    import no_such_library.part

def test_is_told():
    why = "there is no module no_such_library"
    raise ConfigError([Problem(code="missing-library", key="env.id", what="what", why=why)])

def test_another_module():
    import another_module_that_is_absent

def test_another_error():
    assert "No module named 'no_such_library'" == ""

def test_passes():
    pass
"""


def told_by_pytest(tmp_path: Path, **variables: str) -> str:
    """Run these tests; return what pytest prints."""
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (tmp_path / "test_whole.py").write_text(WHOLE_FILE, encoding="utf-8")
    (tmp_path / "test_mixed.py").write_text(MIXED, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\npythonpath = {ROOT}\n", encoding="utf-8"
    )
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rsf",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
    ]
    others = {name: value for name, value in os.environ.items() if name != OWN_SETUP}
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env=others | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout


def test_in_our_own_set_up_nothing_is_absent(tmp_path: Path) -> None:
    told = told_by_pytest(tmp_path, **{OWN_SETUP: "1"})
    assert "1 error" in told, told  # the file that cannot be collected
    assert "skipped" not in told


def test_what_is_absent_skips_with_its_name_and_nothing_else_does(
    tmp_path: Path,
) -> None:
    told = told_by_pytest(tmp_path)
    assert "2 failed, 1 passed, 3 skipped" in told, told
    assert told.count("no_such_library is not installed") == 3
    failed = [
        line.partition(" ")[2]
        for line in told.splitlines()
        if line.startswith("FAILED")
    ]
    assert [name.partition("::")[2].partition(" ")[0] for name in failed] == [
        "test_another_module",
        "test_another_error",
    ]

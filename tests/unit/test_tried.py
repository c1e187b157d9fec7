"""Which versions were tried: the window of each library, and what lies outside."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rlplace.tried import PYTHON, Window, installed, untried, windows

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("version", "inside"),
    [
        ("2.11.0", True),
        ("2.11.0a0+nv25.11", True),  # builds of others have such versions
        ("2.13.0+cpu", True),
        ("2.13.0.post1", True),
        ("2.13.1", False),
        ("2.10.9", False),
        ("3", False),
        ("somebody's own", False),
    ],
)
def test_a_version_is_inside_by_its_first_three_numbers(
    version: str, inside: bool
) -> None:
    assert Window(oldest="2.11.0", newest="2.13.0", means="").holds(version) is inside


def test_nothing_is_said_of_what_is_not_known_or_not_here() -> None:
    assert untried("no-such-library", "1.0") is None
    assert untried("ray", None) is None
    assert untried("ray", "99.0") is windows()["ray"]
    assert PYTHON in installed()


def test_the_oldest_that_was_tried_is_the_oldest_that_is_allowed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    lines = [
        *project["dependencies"],
        *(
            line
            for extra in project["optional-dependencies"].values()
            for line in extra
        ),
    ]
    ranges = {
        needed.name: needed.specifier
        for needed in map(Requirement, lines)
        if needed.name != "rlplace"
    }
    for name, window in windows().items():
        if name != PYTHON:
            assert ranges[name].contains(window.oldest), name
            assert ranges[name].contains(window.newest), name
            least = next(each.version for each in ranges[name] if each.operator == ">=")
            assert window.holds(least), name


def test_our_own_setup_was_tried() -> None:
    lock = (ROOT / "requirements" / "lock.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lock if "==" in line)
    outside = [
        name for name in windows() if untried(name, pinned.get(name)) is not None
    ]
    assert outside == []

"""Libraries for a machine without a network: what is packed, how it is cut, what the script there makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks import bundle
from benchmarks.bundle import Group, Wheel, main

PYTHON = "{}.{}".format(*sys.version_info)
NOISE = os.urandom(200_000)  # which no compression makes smaller


def wheel(folder: Path, files: Mapping[str, bytes], executable: str = "") -> Path:
    made = folder / "own-1.0-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as out:
        for path, content in files.items():
            member = zipfile.ZipInfo(path)
            member.external_attr = (0o100755 if path == executable else 0o100644) << 16
            out.writestr(member, content)
    return made


FILES = {
    "own/__init__.py": b"import extra\n",
    "own/large.so": NOISE,
    "own/server": b"#!/bin/sh\necho runs\n",
    "own/java/all.jar": b"not needed",
    "own-1.0.data/purelib/extra.py": b"",
    "own-1.0.data/scripts/own": b"a console script",
    "own-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: own\nVersion: 1.0\n",
}


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle of one wheel and one stub, in parts of at most 100 KiB."""
    own = Wheel(requirement="own==1.0", without=["own/java/*"])
    stub = {"absent/__init__.py": bundle.STUB.format(package="absent")}
    monkeypatch.setattr(bundle, "GROUPS", {"own": Group(wheels=[own], stubs=stub)})
    monkeypatch.setattr(
        bundle,
        "fetch",
        lambda asked, folder, python: wheel(folder, FILES, "own/server"),
    )
    to = tmp_path / "made"
    assert (
        main(
            [
                "own",
                "--to",
                str(to),
                "--part-mib",
                str(100 / 1024),
                "--python-version",
                PYTHON,
            ]
        )
        == 0
    )
    return to


def install(made: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(made / "install.sh"), str(target), sys.executable]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60
    )


def run_there(program: str, target: Path) -> subprocess.CompletedProcess[str]:
    command, there = [sys.executable, "-c", program], {"PYTHONPATH": str(target)}
    return subprocess.run(
        command, env=there, capture_output=True, text=True, check=False, timeout=60
    )


def test_what_is_unpacked_there_is_what_was_packed_without_what_was_left_out(
    made: Path, tmp_path: Path
) -> None:
    parts = sorted(made.glob("own.zip*"))
    assert [part.name for part in parts] == ["own.zip.1of2", "own.zip.2of2"]
    assert max(part.stat().st_size for part in parts) <= 100 * 1024
    target = tmp_path / "packages"
    installed = install(made, target)
    assert installed.returncode == 0, installed.stderr
    assert (target / "own/large.so").read_bytes() == NOISE
    assert os.access(target / "own/server", os.X_OK)
    assert not os.access(target / "own/large.so", os.X_OK)
    found = {
        str(file.relative_to(target)) for file in target.rglob("*") if file.is_file()
    }
    wanted = {
        "own/__init__.py",
        "own/large.so",
        "own/server",
        "extra.py",
        "own-1.0.dist-info/METADATA",
    }
    assert found == {*wanted, "absent/__init__.py"}
    program = "import importlib.metadata, own; print(importlib.metadata.version('own'))"
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
    )
    assert ran.stdout.strip() == "1.0", ran.stderr


def test_a_stub_is_imported_and_says_what_it_is_once_it_is_used(
    made: Path, tmp_path: Path
) -> None:
    assert install(made, tmp_path / "packages").returncode == 0
    program = "from absent import Grammar\nclass Own(Grammar): pass\nOwn()"
    ran = run_there(program, tmp_path / "packages")
    assert ran.stderr.splitlines()[-1].startswith("ImportError: absent is a stub here")


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda made: (made / "own.zip.2of2").unlink(), "own.zip.2of2 is missing"),
        (
            lambda made: (made / "own.zip.1of2").write_bytes(b"half"),
            "own.zip.1of2 is damaged",
        ),
        (lambda made: (made / "own.json").unlink(), "no bundle lies in"),
        (
            lambda made: (made / "own.json").write_text(
                json.dumps(
                    json.loads((made / "own.json").read_text()) | {"python": "3.9"}
                )
            ),
            "own is for Python 3.9",
        ),
    ],
    ids=["missing", "damaged", "no note", "other Python"],
)
def test_what_did_not_arrive_whole_is_not_unpacked(
    harm: object, told: str, made: Path, tmp_path: Path
) -> None:
    harm(made)
    installed = install(made, tmp_path / "packages")
    assert installed.returncode == 2
    assert told in installed.stderr
    assert not list((tmp_path / "packages").glob("*/*"))


def test_a_wheel_that_cannot_be_had_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setattr(
        bundle,
        "GROUPS",
        {"own": Group(wheels=[Wheel(requirement="no-such-wheel==1.0")])},
    )
    assert main(["own", "--to", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "[bundle-wheel]" in told
    assert "got: no-such-wheel==1.0" in told


def test_files_that_stay_behind_are_named_in_the_wheel_that_has_them() -> None:
    """A pattern with a typing mistake would carry a hundred MiB; the slow test makes the real bundles."""
    for group in bundle.GROUPS.values():
        for each in group.wheels:
            assert "==" in each.requirement, (
                "pinned: what stays behind was looked up in that version"
            )
            assert all("/" in pattern for pattern in each.without)

"""Custom workers are imported from the folder in which the driver found them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from rlplace.workers.ray_launch.code_folder import code_folder, look_in


def test_a_module_and_a_package_are_found_by_the_folder_above_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_module_alone.py").write_text("class Probe: ...\n")
    package = tmp_path / "a_package_of_workers" / "inner"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text("class Probe: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    alone = importlib.import_module("a_module_alone").Probe
    inner = importlib.import_module("a_package_of_workers.inner").Probe
    assert code_folder(alone) == str(tmp_path)
    assert code_folder(inner) == str(tmp_path)


def test_a_class_of_a_script_has_no_folder() -> None:
    kind = type("Probe", (), {"__module__": "__main__"})
    assert code_folder(kind) is None


def test_a_folder_is_looked_in_once_and_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    look_in(str(tmp_path))
    look_in(str(tmp_path))
    look_in(str(tmp_path / "missing"))
    look_in(None)
    assert sys.path.count(str(tmp_path)) == 1
    assert sys.path[-1] == str(tmp_path)
    assert importlib.import_module("json") is json

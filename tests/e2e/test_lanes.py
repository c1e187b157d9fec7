"""scripts/lanes: environments with other versions. Installing them takes minutes and a network."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "version_lanes.py"


@pytest.fixture(scope="module")
def lanes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("version_lanes", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_a_torch_of_an_image_has_a_version_that_no_index_has(
    lanes: ModuleType, tmp_path: Path
) -> None:
    installed = tmp_path / "lib/python3.12/site-packages/torch-2.13.0.dist-info"
    installed.mkdir(parents=True)
    cached = tmp_path / "METADATA"
    cached.write_text(
        "Metadata-Version: 2.4\nName: torch\nVersion: 2.13.0\n\nVersion: of a text\n"
    )
    (installed / "METADATA").hardlink_to(cached)  # as uv does
    lanes.rename_torch(tmp_path)
    renamed = lanes.torch_folder(tmp_path)
    assert renamed.name == "torch-2.11.0a0+nv25.11.dist-info"
    assert (
        "\nVersion: 2.11.0a0+nv25.11\n\nVersion: of a text\n"
        in (renamed / "METADATA").read_text()
    )
    assert "Version: 2.13.0\n" in cached.read_text(), "the cache is of all environments"


def test_what_fails_is_said_and_fails_the_script(
    lanes: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(*_: object) -> str:
        raise lanes.LaneError("pytest ...\n    1 failed")

    monkeypatch.setattr(lanes, "travel", broken)
    assert lanes.main(["oldest", "locked", "--folder", str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("FAILED: pytest ...\n    1 failed") == 2
    monkeypatch.setattr(lanes, "travel", lambda *_: "3 passed")
    assert lanes.main(["oldest", "--folder", str(tmp_path)]) == 0
    with pytest.raises(SystemExit) as refused:
        lanes.main(["odlest"])
    assert refused.value.code == 2


def test_every_file_of_tests_that_lanes_run_is_there(lanes: ModuleType) -> None:
    assert [
        name
        for name in (*lanes.TESTS, *lanes.PLANNER_TESTS)
        if not (ROOT / name).exists()
    ] == []


def test_versions_that_matter_are_read_from_what_uv_lists(lanes: ModuleType) -> None:
    listed = "Would install 3 packages\n + numpy==2.0.0\n + torch==2.13.0+cpu\n + zss==1.2.0\n"
    assert lanes.versions(listed) == "torch 2.13.0+cpu, numpy 2.0.0"
    assert lanes.versions("ray==2.49.0\nnumpy==2.3.5\n") == "ray 2.49.0, numpy 2.3.5"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["planner", "oldest", "locked", "newest", "existing"])
def test_a_lane_is_green(name: str, tmp_path: Path) -> None:
    reachable = subprocess.run(
        [
            sys.executable,
            "-m",
            "uv",
            "pip",
            "install",
            "--dry-run",
            "--target",
            str(tmp_path / "none"),
            "zss",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if reachable.returncode:
        pytest.skip("no index of packages can be reached")
    done = subprocess.run(
        [
            sys.executable,
            str(SCRIPT),
            name,
            "--python",
            sys.executable,
            "--folder",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout

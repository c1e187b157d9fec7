"""Where a model is looked for: as written, beside the package, in what was downloaded from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlplace.config import model_folder
from rlplace.config.model_folder import no_folder


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a clone, a current folder and downloads, each empty."""
    for name in ("clone", "here", "hub"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(model_folder, "CLONE", tmp_path / "clone")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def test_the_current_folder_comes_before_the_clone(places: Path) -> None:
    for place in ("clone", "here"):
        (places / place / "models" / "small").mkdir(parents=True)
        assert model_folder.model_folder("models/small") == places / place / "models" / "small"
    assert model_folder.model_folder(str(places / "clone")) == places / "clone"


def test_a_hub_id_is_found_in_the_downloads(places: Path) -> None:
    downloaded = places / "hub" / "models--Qwen--Qwen3-0.6B"
    (downloaded / "refs").mkdir(parents=True)
    (downloaded / "refs" / "main").write_text("c1899de", encoding="utf-8")
    (downloaded / "snapshots" / "c1899de").mkdir(parents=True)
    assert model_folder.model_folder("Qwen/Qwen3-0.6B") == downloaded / "snapshots" / "c1899de"


def test_one_that_is_nowhere_is_reported_with_all_places(places: Path) -> None:
    problem = no_folder("Qwen/Qwen3-0.6B", "actor.model.path")
    assert problem.fix is not None
    assert problem.fix.startswith("hf download Qwen/Qwen3-0.6B ")
    looked = (problem.why or "").splitlines()
    assert looked[0] == f"looked for {places}/here/Qwen/Qwen3-0.6B"
    assert looked[1] == f"looked for {places}/clone/Qwen/Qwen3-0.6B, beside the package"
    assert "models--Qwen--Qwen3-0.6B" in looked[2]
    problem = no_folder("models/small", "actor.model.path")
    assert problem.fix is not None
    assert problem.fix.startswith("scripts/get_model smollm2 ")
    assert len((problem.why or "").splitlines()) == 2
    assert len((no_folder("/nowhere", "actor.model.path").why or "").splitlines()) == 1


def test_a_folder_or_a_download_of_nearly_this_name_is_offered(places: Path) -> None:
    (places / "Qwen3-8B").mkdir()
    assert no_folder(f"{places}/Qwen3-8b", "actor.model.path").fix == f"path: {places}/Qwen3-8B"
    assert str(no_folder(f"{places}/Qwen3-4B", "actor.model.path").fix).startswith("scripts/get_model ")
    (places / "hub" / "models--Qwen--Qwen3-8B").mkdir(parents=True)
    assert no_folder("Qwen/qwen3-8b", "actor.model.path").fix == "path: Qwen/Qwen3-8B"


def test_a_model_that_a_script_makes_is_made_by_the_fix() -> None:
    for name in ("smollm2", "tiny", "tiny_reward"):
        assert str(no_folder(f"models/{name}", "reward.model.path").fix).startswith(f"scripts/get_model {name}  ")

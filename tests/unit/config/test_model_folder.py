"""Where a model is looked for: as written, beside the package, in what was downloaded from the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from rlplace.config import compose, model_folder
from rlplace.config.model_folder import no_folder
from rlplace.config.read import read_config
from rlplace.errors import ConfigError
from rlplace.jobs.language_model.folders import with_folder
from rlplace.jobs.language_model.rules.machine import weights_problems
from rlplace.runtime.prepare import prepare_composed


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
        assert (
            model_folder.model_folder("models/small")
            == places / place / "models" / "small"
        )
    assert model_folder.model_folder(str(places / "clone")) == places / "clone"


def test_a_hub_id_is_found_in_the_downloads(places: Path) -> None:
    downloaded = places / "hub" / "models--Qwen--Qwen3-0.6B"
    (downloaded / "refs").mkdir(parents=True)
    (downloaded / "refs" / "main").write_text("c1899de", encoding="utf-8")
    (downloaded / "snapshots" / "c1899de").mkdir(parents=True)
    assert (
        model_folder.model_folder("Qwen/Qwen3-0.6B")
        == downloaded / "snapshots" / "c1899de"
    )


def downloaded(hub: Path, name: str, *, ref: bool = True, **files: str) -> Path:
    """Lay out a download by hand, as huggingface_hub does: snapshots of links to blobs, and the commit of `main`."""
    folder = hub / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / "c1899de"
    for each in (folder / "refs", folder / "blobs", snapshot):
        each.mkdir(parents=True)
    if ref:
        (folder / "refs" / "main").write_text("c1899de", encoding="utf-8")
    for number, (file, text) in enumerate(files.items()):
        (folder / "blobs" / str(number)).write_text(text, encoding="utf-8")
        (snapshot / file.replace("__", ".")).symlink_to(f"../../blobs/{number}")
    return snapshot


def test_an_id_without_an_owner_is_found_too(places: Path) -> None:
    assert (
        len((no_folder("gpt2", "actor.model.path").why or "").splitlines()) == 2
    )  # any word may be a folder
    snapshot = downloaded(places / "hub", "gpt2")
    assert model_folder.model_folder("gpt2") == snapshot
    (places / "here" / "gpt2").mkdir()
    assert model_folder.model_folder("gpt2") == places / "here" / "gpt2"


def test_one_beside_a_folder_of_its_owner_is_found(places: Path) -> None:
    snapshot = downloaded(places / "hub", "Qwen/Qwen3-0.6B")
    (places / "here" / "Qwen" / "Qwen3-8B").mkdir(parents=True)
    assert model_folder.model_folder("Qwen/Qwen3-0.6B") == snapshot
    assert (
        model_folder.model_folder("Qwen/Qwen3-8B")
        == places / "here" / "Qwen" / "Qwen3-8B"
    )


def test_one_that_was_downloaded_by_its_commit_is_found(places: Path) -> None:
    assert model_folder.model_folder("a/b") == places / "here" / "a" / "b"
    snapshot = downloaded(places / "hub", "a/b", ref=False)
    assert model_folder.model_folder("a/b") == snapshot
    (snapshot.parent / "another").mkdir()
    assert model_folder.model_folder("a/b") == places / "here" / "a" / "b"


@pytest.mark.parametrize(
    ("variable", "value", "hub"),
    [
        ("HF_HUB_CACHE", "$HERE/x", "x"),
        ("HUGGINGFACE_HUB_CACHE", "~/x", "x"),
        ("HF_HOME", "~/x", "x/hub"),
        ("XDG_CACHE_HOME", "~/x", "x/huggingface/hub"),
        ("HF_HUB_OFFLINE", "1", ".cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_the_hub_has_it(
    variable: str, value: str, hub: str, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "HERE"):
        monkeypatch.setenv(name, str(places))
    monkeypatch.setenv(variable, value)
    assert model_folder.model_folder("a/b") == places / "here" / "a" / "b"
    snapshot = downloaded(places / hub, "a/b")
    assert model_folder.model_folder("a/b") == snapshot


MODEL = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 320,
}
MODEL |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": False,
}
MODEL |= {"max_position_embeddings": 512}


def test_every_model_of_a_job_may_be_one(places: Path) -> None:
    text = json.dumps(MODEL)
    for name in ("own/actor", "own/critic", "own/reference", "own/reward"):
        downloaded(places / "hub", name, config__json=text)
    roles = ("actor", "critic", "reference", "reward")
    words = [f"++{role}.model.path=own/{role}" for role in roles]
    (composed,) = compose.with_hydra(["rlhf_tiny", *words])
    config = with_folder(
        read_config(composed.mapping, composed.sources), composed.sources
    )
    blocks = [config.actor, config.critic, config.reference, config.reward_of("reward")]
    found = [
        block.model["path"] for block in blocks if isinstance(block.model, Mapping)
    ]
    assert found == [
        f"{places}/hub/models--own--{role}/snapshots/c1899de" for role in roles
    ]


def test_it_is_the_folder_that_the_hub_itself_finds(places: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    downloaded(places / "hub", "own/actor", config__json="{}")
    found = hub.snapshot_download(
        "own/actor", cache_dir=places / "hub", local_files_only=True
    )
    assert model_folder.model_folder("own/actor") == Path(found)


def test_a_download_that_was_cut_short_is_finished_by_the_fix(places: Path) -> None:
    downloaded(places / "hub", "own/empty")
    with pytest.raises(ConfigError) as raised:
        prepare_composed(
            compose.with_hydra(["rlhf_tiny", "actor.model.path=own/empty"])[0]
        )
    fix = "hf download own/empty        (or the folder of another Hugging Face model)"
    assert raised.value.problems[0].fix == fix
    folder = downloaded(places / "hub", "own/keys", config__json=json.dumps(MODEL))
    (problem,) = weights_problems(folder, "actor.model.path")
    assert str(problem.fix).startswith("hf download own/keys ")


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
    assert (
        no_folder(f"{places}/Qwen3-8b", "actor.model.path").fix
        == f"path: {places}/Qwen3-8B"
    )
    assert str(no_folder(f"{places}/Qwen3-4B", "actor.model.path").fix).startswith(
        "scripts/get_model "
    )
    (places / "hub" / "models--Qwen--Qwen3-8B").mkdir(parents=True)
    assert no_folder("Qwen/qwen3-8b", "actor.model.path").fix == "path: Qwen/Qwen3-8B"


def test_a_model_that_a_script_makes_is_made_by_the_fix() -> None:
    for name in ("smollm2", "tiny", "tiny_reward"):
        assert str(no_folder(f"models/{name}", "reward.model.path").fix).startswith(
            f"scripts/get_model {name}  "
        )

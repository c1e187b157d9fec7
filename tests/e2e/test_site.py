"""The documentation site as it is built: its search answers the words of readers, and each page has its frame."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from scripts import site_sources

ROOT = Path(__file__).parents[2]
ADDRESS = "https://example.org/owner/name"

# What readers type -> the page or the entry that the first hit leads to.
ANSWERS = {
    "hyperparameters": "hyperparameters/",
    "learning rate": "reference/hyperparameters/#learning-rate",
    "gamma": "reference/config/#algorithm.gamma",
    "channel": "own_workers/#channels",
    "DataFrame": "python/#metrics-as-a-dataframe-policy-and-files-of-a-run",
    "conda": "own_installation/#uv-and-conda",
    "PettingZoo": "environments/#several-agents-pettingzoo",
    "uv": "own_installation/#uv-and-conda",
    "wandb": "trackers/",
    "checkpoint": "checkpoints/",
    "resume": "checkpoints/",
    "observation": "environments/",
    "environment": "own_environment/",
    "record video": "after_training/#evaluate-and-record-video",
    "logger": "trackers/",
    "tensorboard": "metrics/",
    "batch size": "reference/hyperparameters/#batch-size-and-rollout-length",
    "OOM": "out_of_memory/",
    "out of memory": "out_of_memory/",
    "GPU memory": "out_of_memory/",
    "recurrent memory": "environments/#memory-recurrent-policies",
    "two machines": "cluster/#several-machines-multi-node",
    "Slurm": "cluster/#slurm",
    "Docker": "docker/",
    "vLLM": "llm/#engines",
    "LoRA": "reference/config/#actor.lora_rank",
    "KL": "reference/config/#algorithm.kl_coef",
    "entropy": "reference/config/#algorithm.entropy_coef",
    "seed": "reference/config/#runner.seed",
    "evaluation": "after_training/#evaluate-and-record-video",
    "custom reward": "own_code/",
    "FSDP": "llm/#models-and-sequences-too-large-for-fsdp-alone",
    "Atari": "environments/#atari",
    "multi-GPU": "cluster/#one-machine-multi-gpu",
    # a key as it is written, and words of other libraries
    "actor.optimizer.lr": "reference/config/#actor.optimizer.lr",
    "gae_lambda": "reference/config/#algorithm.gae_lambda",
    "clip_range": "reference/config/#algorithm.clip_ratio_low",
    "Kubernetes": "cluster/#kubernetes",
    "quickstart": "tour/",
    "Windows": "faq/",
    "semver": "stability/",
    "Isaac": "environments/#vector-environments",
    "early stopping": "environments/#evaluation",
    "replay buffer": "off_policy/",
    "imitation learning": "off_policy/#demonstrations",
    "distillation": "teachers/",
    "supervised fine-tuning": "sft/",
    "VLA": "vla/",
    "offline RL": "off_policy/#offline",
    "timeout": "troubleshooting/#it-hangs",
    "optuna": "several_runs/#sweeps",
    "显存": "zh/out_of_memory/",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the site that `scripts/site` has built of these sources; build it in the same way if there is none."""
    pytest.importorskip("material", reason="the site needs the extra `docs`")
    built_before = ROOT / "site"
    told = built_before / site_sources.LEFT_IN
    sources = site_sources.sum_of_sources(ADDRESS)
    if told.is_file() and told.read_text(encoding="utf-8").strip() == sources:
        return built_before
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "NO_MKDOCS_2_WARNING": "1",
            site_sources.ADDRESS: ADDRESS,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_the_first_hit_of_the_search_answers(site: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip(
            "the search of the site is JavaScript, and this machine has no node"
        )
    asked = subprocess.run(
        [node, str(ROOT / "tests" / "site_search.js"), str(site), *ANSWERS],
        capture_output=True,
        text=True,
        check=True,
    )
    answers = [json.loads(line) for line in asked.stdout.splitlines()]
    first = {answer["query"]: answer["hits"][:1] for answer in answers}
    assert first == {word: [place] for word, place in ANSWERS.items()}


def test_words_for_the_search_are_no_phrases() -> None:
    file = ROOT / "docs" / "search_words.toml"
    for words in tomllib.loads(file.read_text(encoding="utf-8")).values():
        assert [word for word in words if not re.fullmatch(r"\w+", word)] == []


def test_every_config_key_is_an_entry_with_an_anchor(site: Path) -> None:
    page = (site / "reference" / "config" / "index.html").read_text(encoding="utf-8")
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    entries = {entry["location"] for entry in index["docs"]}
    keys = re.findall(r'<h3 class="config-key" id="([^"]+)"', page)
    assert len(keys) > 200
    assert {f"reference/config/#{key}" for key in keys} <= entries


def test_pages_follow_the_browser_between_light_and_dark(site: Path) -> None:
    first = "(prefers-color-scheme)"
    for page, name in (("tour", "As the browser"), ("zh/tour", "跟随浏览器")):
        text = (site / page / "index.html").read_text(encoding="utf-8")
        settings = re.findall(r'data-md-color-media="([^"]+)"', text)
        assert settings[0] == first
        assert len(settings) == 3
        assert f'title="{name}"' in text


@pytest.mark.parametrize("page", ["placement", "zh/placement"])
def test_a_page_leads_to_its_neighbours_its_source_and_its_other_language(
    site: Path, page: str
) -> None:
    from rlplace import __version__

    html = (site / page / "index.html").read_text(encoding="utf-8")
    assert '<link rel="prev"' in html
    assert '<link rel="next"' in html
    assert f"rlplace {__version__}" in html
    assert f'href="{ADDRESS}/edit/main/docs/{page}.md"' in html
    other = "../zh/placement/" if page == "placement" else "../../placement/"
    assert f'href="{other}" hreflang="' in html


def test_pages_from_outside_docs_are_edited_where_they_are(site: Path) -> None:
    home = (site / "index.html").read_text(encoding="utf-8")
    made = (site / "reference" / "config" / "index.html").read_text(encoding="utf-8")
    assert f'href="{ADDRESS}/edit/main/README.md"' in home
    assert 'rel="edit"' not in made


def test_the_frame_of_a_chinese_page_is_chinese(site: Path) -> None:
    html = (site / "zh" / "tour" / "index.html").read_text(encoding="utf-8")
    assert '<html lang="zh"' in html
    assert "Table of contents" not in html
    assert 'placeholder="搜索"' in html
    assert "Troubleshooting" not in html  # the navigation has pages in Chinese alone
    english = (site / "tour" / "index.html").read_text(encoding="utf-8")
    assert '<html lang="en"' in english
    assert "显存不足" not in english

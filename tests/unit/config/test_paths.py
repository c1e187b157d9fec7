"""Paths with `~` and `=` in them, in configs and on command lines."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from rlplace.cli import plan, train
from rlplace.config import compose
from rlplace.config.options import OptionParser
from rlplace.config.paths import readable, with_homes
from rlplace.config.read import read_config

CONFIGS = compose.CONFIG_DIR


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def config_of(*words: str) -> Any:
    (composed,) = compose.with_hydra([*words])
    return read_config(composed.mapping, composed.sources)


def test_every_path_of_a_config_may_be_in_the_home(home: Path, tmp_path: Path) -> None:
    text = (CONFIGS / "hybrid_grpo_llm.yaml").read_text(encoding="utf-8")
    assert "defaults:" in text
    (tmp_path / "mine.yaml").write_text(
        "defaults: [hybrid_grpo_llm, _self_]\n"
        "actor: {model: {path: ~/model}}\n"
        "env: {task: 'own_tasks:Task', kwargs: {path: ~/rows.jsonl, images: [~/a, b]}, system: ~/ is the home}\n"
        "cluster: {comm: {shm_folder: ~/shm}}\n"
        "rollout: {stop: ['~/'], engine_args: {download_dir: ~/download}}\n"
        "runner: {output_dir: ~/runs}\n"
        "resume: ~/runs/old\n"
        "profile: ~/a.json,b.json\n",
        encoding="utf-8",
    )
    (composed,) = compose.with_hydra([str(tmp_path / "mine.yaml")])
    config: Any = with_homes(composed.mapping)
    assert config["actor"]["model"]["path"] == f"{home}/model"
    assert config["env"]["kwargs"]["path"] == f"{home}/rows.jsonl"
    assert config["env"]["kwargs"]["images"] == [f"{home}/a", "b"]
    assert config["cluster"]["comm"]["shm_folder"] == f"{home}/shm"
    assert config["rollout"]["engine_args"] == {"download_dir": f"{home}/download"}
    assert (config["runner"]["output_dir"], config["resume"]) == (
        f"{home}/runs",
        f"{home}/runs/old",
    )
    assert config["profile"] == f"{home}/a.json,b.json"
    assert (config["env"]["system"], config["rollout"]["stop"]) == (
        "~/ is the home",
        ["~/"],
    )  # texts


@pytest.mark.parametrize("value", ["~/runs", '"~/runs"', "'~/runs'"])
def test_a_shell_leaves_the_home_in_an_override_alone(value: str, home: Path) -> None:
    assert (
        config_of("cartpole", f"runner.output_dir={value}").runner.output_dir
        == f"{home}/runs"
    )


@pytest.mark.parametrize(
    ("word", "read"),
    [
        ("a.b=[~/x,~me/y,z]", 'a.b=["~/x","~me/y",z]'),
        ("resume=~/a b/c", 'resume="~/a b/c"'),
        ("a.b={path: ~/x}", 'a.b={path: "~/x"}'),
        ("profile=~/a.json,~/b.json", 'profile="~/a.json,~/b.json"'),
        ("resume=runs/lr=0.1/x", 'resume="runs/lr=0.1/x"'),
        ("resume=lr=0.1/x", 'resume="lr=0.1/x"'),
        ("resume=größe/x", 'resume="größe/x"'),
        ("resume='lr=0.1/x'", "resume='lr=0.1/x'"),
        ("runner.seed==3", "runner.seed==3"),
        ("~runner.seed", "~runner.seed"),
        ("--config-dir=lr=0.1/x", "--config-dir=lr=0.1/x"),
        ("hybrid_ppo", "hybrid_ppo"),
    ],
)
def test_paths_of_overrides_are_quoted_for_hydra(word: str, read: str) -> None:
    assert readable(word) == read
    assert readable(read) == read


@pytest.mark.parametrize(
    "name", ["lr=0.1/mine.yaml", "lr=0.1/my=own.yaml", "~/mine.yaml"]
)
def test_the_path_of_a_config_may_have_what_overrides_have(
    name: str, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(name).expanduser()
    file.parent.mkdir(exist_ok=True)
    shutil.copy(CONFIGS / "hybrid_ppo.yaml", file)
    (composed,) = compose.with_hydra([name, "runner.seed=5"])
    assert composed.mapping["runner"]["seed"] == 5
    assert plan.main([name]) == 0
    assert plan.main(["hybrid_ppo", "--diff", name]) == 0
    assert "the same placement" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["resume=~/lr=1/run", "resume='~/lr=1/run'"])
def test_a_run_that_is_resumed_may_be_there_too(
    word: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its config is looked for before Hydra reads the word."""
    assert train.main([word, "dry_run=true"]) == 2
    assert f"{home}/lr=1/run" in capsys.readouterr().err


def test_an_option_with_its_value_may_be_there_too(home: Path) -> None:
    parser = OptionParser("x")
    parser.add_argument("--out")
    assert parser.parse_args(["--out=~/x"]).out == f"{home}/x"


def test_a_data_set_with_a_weight_may_be_in_the_home(home: Path) -> None:
    kwargs = {"path": {"~/rows.jsonl": 0.5, "other.jsonl": 1}}
    config = with_homes({"env": {"kwargs": kwargs}})
    expected = {f"{home}/rows.jsonl": 0.5, "other.jsonl": 1}
    assert config["env"]["kwargs"]["path"] == expected
    file = home / "mine.yaml"
    file.write_text(
        "defaults: [hybrid_grpo_llm, _self_]\n"
        "env: {task: prompts, kwargs: {path: {~/rows.jsonl: 0.5}}}\n"
    )
    read = config_of(str(file))
    assert read.env.kwargs["path"] == {f"{home}/rows.jsonl": 0.5}

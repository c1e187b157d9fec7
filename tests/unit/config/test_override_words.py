"""Words of a command line that are no overrides lead to the override that is meant."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlplace.__main__ import _meant
from rlplace.config.compose import with_hydra
from rlplace.errors import ConfigError


def fixes(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        with_hydra(["hybrid_ppo", *words])
    return [str(problem.fix) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("algorithm.gamma==0.98", "algorithm.gamma=0.98"),
        ("algorithm.gamma 0.98", "algorithm.gamma=0.98"),
        ("algorithm[gamma]=0.98", "algorithm.gamma=0.98"),
        ("+algorithm.gamma=0.98", "algorithm.gamma=0.98"),
        ("algorithm.gamma=0,98", "algorithm.gamma=0.98"),
        ("~algorithm.gama", "~algorithm.gamma"),
        ("~algorithm.nothing", "leave out ~algorithm.nothing"),
        (
            "cluster.component_placement.env=0 - 3",
            "cluster.component_placement.env=0-3",
        ),
        ("runner.sinks=[console,jsonl", "'runner.sinks=[console,jsonl]'"),
        ("env.kwargs={a:1", "'env.kwargs={a:1}'"),
        ('env.id="Hopper-v5', "'env.id=\"Hopper-v5\"'"),
        ('env.kwargs={"a"=1}', "'env.kwargs={a: 1}'"),
        ("cluster=64xH100", "cluster=8xH100 cluster.nodes.0.count=8"),
        (
            "cluster=8xH10",
            "cluster=8xH100        (or declare it: configs/cluster/8xH10.yaml)",
        ),
        ("-c disaggregated_ppo", "--config-name disaggregated_ppo"),
        ("--resume", "resume=auto"),
        ("--env Hopper-v5", "env.id=Hopper-v5"),
        ("--device cuda", "cluster.accelerator.kind=cuda"),
        ("--model Qwen/Qwen3-8B", "actor.model.path=Qwen/Qwen3-8B"),
    ],
)
def test_what_a_word_means(words: str, fix: str) -> None:
    assert fixes(*words.split(" ")) == [fix]


def test_a_cluster_of_an_unknown_product_is_no_other_one() -> None:
    (fix,) = fixes("cluster=8xB300")
    assert fix.startswith("cluster=<one of them>")


def test_all_unknown_options_are_told_at_once() -> None:
    assert fixes("--lr", "1e-4", "--gpus", "4") == [
        "actor.optimizer.lr=1e-4",
        "cluster.accelerators_per_node=4",
    ]


@pytest.mark.parametrize(
    ("word", "words", "line"),
    [
        ("run", "hybrid_ppo", "train hybrid_ppo"),
        ("hybrid_ppo", "dry_run=true", "train hybrid_ppo dry_run=true"),
        ("my.yaml", "", "train my.yaml"),
        ("eval", "runs/x", "evaluate runs/x"),
        ("resume", "runs/x", "train resume=runs/x"),
        ("import", "verl run.sh", "plan import verl run.sh"),
        ("sweep", "hybrid_ppo seed=1,2", "train hybrid_ppo seed=1,2 --multirun"),
        ("run", "", None),
        ("nonsense", "", None),
    ],
)
def test_the_command_that_is_meant(word: str, words: str, line: str | None) -> None:
    assert _meant(word, words) == line


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("env:\n  id: 'Hopper-v5\n", "close the quote in this line"),
        ("env: {id: ${oc.env:ID}}\n", 'env: {id: "${oc.env:ID}"}'),
        (
            "runner: {total_iterations: 10; seed: 1}\n",
            "runner: {total_iterations: 10, seed: 1}",
        ),
        (
            "<<<<<<< HEAD\nseed: 1\n=======\nseed: 2\n>>>>>>> other\n",
            "keep one of both versions, and remove these lines",
        ),
    ],
)
def test_what_is_wrong_with_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, fix: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        with_hydra(["mine.yaml"])
    assert caught.value.problems[0].fix == fix


def test_files_that_are_no_configs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.symlink("gone.yaml", "link.yaml")
    Path("mine.json").write_text("{}")
    Path("own.py").write_text("")
    found = []
    for name in ("link.yaml", "mine.json", "own.py"):
        with pytest.raises(ConfigError) as caught:
            with_hydra([name])
        found.append(caught.value.problems[0].fix)
    assert found == [
        "the path of a config, or a link to one",
        "mv mine.json mine.yaml",
        "python own.py",
    ]

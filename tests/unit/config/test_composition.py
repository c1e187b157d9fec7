"""A config that is composed without the settings of Hydra is the one that `hydra.compose` makes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from rlplace.config import composition as module
from rlplace.config.compose import CONFIG_DIR, with_hydra
from rlplace.config.composition import Composition, composition, parse_overrides
from rlplace.errors import ConfigError

BASE = "algorithm: {gamma: 0.5}\nrunner:\n  steps: 010\n  rate: 1e-3\n"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with a config and a group, in which Hydra composes."""
    (tmp_path / "base.yaml").write_text(BASE, encoding="utf-8")
    (tmp_path / "size").mkdir()
    for size in ("small", "large"):
        text = f"# @package _global_\nactor: {{width: {len(size)}, name: {size}}}\n"
        (tmp_path / "size" / f"{size}.yaml").write_text(text, encoding="utf-8")
    with initialize_config_dir(str(tmp_path), job_name="test", version_base="1.3"):
        yield tmp_path


def written(folder: Path, text: str) -> str:
    (folder / "job.yaml").write_text(text, encoding="utf-8")
    return "job"


def facts(made: Composition) -> tuple[object, ...]:
    """What is used of a composition; the order of keys counts."""
    return (
        OmegaConf.to_yaml(made.config),
        dict(made.choices),
        list(made.folders),
        list(made.overrides),
    )


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("hybrid_ppo", ["++actor.model.kind=mlp", "++runner.seed=3"]),
        ("ppo", ["task=hopper"]),
        ("grpo_qwen3_8b", ["cluster=64xA100", "++algorithm.gamma=1"]),
        ("rlhf_ppo_70b_hybrid", []),
    ],
)
def test_shipped_configs_are_those_of_hydra(name: str, overrides: list[str]) -> None:
    with initialize_config_dir(str(CONFIG_DIR), job_name="test", version_base="1.3"):
        made = module._with_settings(name, overrides)
        assert module._without_settings(name, overrides) is not None
        assert facts(composition(name, overrides)) == facts(made)


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        (
            "defaults: [base, size: small, _self_]\nrunner: {steps: 1e3, day: 2026-01-02, at: 1:30, on: yes}\n",
            ["size=large", "++actor.width=[1,2]", "hydra.job.num=3"],
        ),
        (
            "defaults: [base, _self_]\na:\n  b: ${algorithm.gamma}\n  c: ${oc.env:HOME}\n  d: ???\n  3: x\n",
            ["+size=small", "~runner.rate", "+a.e={f: 1}", "a.b=0x10"],
        ),
        (
            "defaults: [_self_, base]\nalgorithm: {gamma: 1}\nx: &here [1, .inf, 1_0]\ny: *here\n",
            ['++algorithm.gamma="0.5"', "hydra.searchpath=[file:///no/such]"],
        ),
    ],
)
def test_merged_files_are_those_of_hydra(
    folder: Path, text: str, overrides: list[str]
) -> None:
    name = written(folder, text)
    if any("no/such" in word for word in overrides):
        overrides = [w.replace("/no/such", str(folder / "size")) for w in overrides]
    assert module._without_settings(name, overrides) is not None
    expected = facts(module._with_settings(name, overrides))
    assert facts(composition(name, overrides)) == expected
    # A config that was composed is not changed by the composition of another
    composition(name, [*overrides, "++algorithm.gamma=7"])
    assert facts(composition(name, overrides)) == expected


def test_a_changed_file_is_read_again(folder: Path) -> None:
    assert composition(written(folder, "a: 1\n"), []).config.a == 1
    assert composition(written(folder, "a: 2\n"), []).config.a == 2


@pytest.mark.parametrize(
    ("text", "overrides", "value"),
    [
        ("a: ${hydra:job.num}\n", ["hydra.job.num=4"], 4),
        ("a: 1\nb: 5\n", ["a=${b}"], 5),
    ],
)
def test_what_may_need_the_settings_of_hydra_has_them(
    folder: Path, text: str, overrides: list[str], value: int
) -> None:
    name = written(folder, text)
    assert module._without_settings(name, overrides) is None
    assert composition(name, overrides).config.a == value


def test_libraries_that_were_not_tried_compose_in_their_own_way(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_is_tried", lambda: False)
    monkeypatch.setattr(module, "_without_settings", lambda *_: pytest.fail("private"))
    assert composition(written(folder, "a: 1\n"), []).config.a == 1


@pytest.mark.parametrize("text", ["a:\t1\n", "a: 1\n\tb: 2\n", "a: 1\na: 2\n"])
def test_yaml_that_only_libyaml_reads_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        with_hydra([str(tmp_path / "job.yaml")])
    assert [problem.code for problem in caught.value.problems] == ["bad-yaml"]


def test_an_override_is_parsed_once() -> None:
    (first,) = parse_overrides(["algorithm.gamma=0.1"])
    (second,) = parse_overrides(["algorithm.gamma=0.1"])
    assert first is second
    # A list of an override is changed by nothing that reads it
    first = parse_overrides(["a=[1,2]"])[0].value()
    first.append(3)
    assert parse_overrides(["a=[1,2]"])[0].value() == [1, 2]

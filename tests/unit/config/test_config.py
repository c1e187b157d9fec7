"""The config of a run: defaults that hold, a meaning for every key, all problems at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rlplace.config import read_config
from rlplace.errors import ConfigError, Source


def mapping(**blocks: Any) -> dict[str, Any]:
    """The least config, with `blocks` replaced."""
    return {"cluster": {"component_placement": {"actor": "0-7"}}, "env": {"id": "CartPole-v1"}, **blocks}


def test_the_least_config_has_defaults_for_all_else() -> None:
    config = read_config(mapping())
    assert config.simulator_env.id == "CartPole-v1"
    assert config.cluster.accelerators_per_node == "auto"
    assert config.torch_rollout.pipeline_stage_num == 1
    assert config.runner.sinks == ("console", "jsonl", "tensorboard")


def test_the_placement_is_kept_verbatim() -> None:
    placement = {"actor": "0-7", "env": ["0-1", "4-5"], "rollout": 3, "critic,reference": "all"}
    assert read_config(mapping(cluster={"component_placement": placement})).cluster.component_placement == placement


def test_a_config_cannot_be_changed() -> None:
    config = read_config(mapping())
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.algorithm.gamma = 0.5  # type: ignore[misc]


def test_all_problems_are_raised_at_once_with_their_places() -> None:
    wrong = mapping(algorithm={"gama": 0.98, "epochs": 0}, runner={"sinks": ["console", "wandb"]})
    sources = {"algorithm.gama": Source(file="mine.yaml", line=12)}
    with pytest.raises(ConfigError) as caught:
        read_config(wrong, sources)
    found = {p.key: p for p in caught.value.problems}
    assert {key: p.code for key, p in found.items()} == {
        "algorithm.gama": "unknown-key",
        "algorithm.epochs": "out-of-bounds",
        "runner.sinks[1]": "unknown-choice",
    }
    assert found["algorithm.gama"].fix == "gamma: 0.98"
    assert "mine.yaml:12" in str(caught.value)


@pytest.mark.parametrize("missing", ["cluster", "env"])
def test_what_nobody_can_guess_is_required(missing: str) -> None:
    blocks = mapping()
    del blocks[missing]
    with pytest.raises(ConfigError) as caught:
        read_config(blocks)
    assert caught.value.codes == ("missing-key",)


def test_every_default_obeys_its_own_bounds() -> None:
    """Writing all defaults out reads back as the same config."""
    language = {"env": {"kind": "text"}, "actor": {"model": {"path": "somewhere"}}}
    for config in (read_config(mapping()), read_config(mapping(**language))):
        assert read_config(dataclasses.asdict(config)) == config

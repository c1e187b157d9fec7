"""`init_from` refuses a policy of another job, and a network with other layers, before anything starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlplace.config.compose import with_hydra
from rlplace.config.read import read_config
from rlplace.envs.registry import spaces_of_job
from rlplace.jobs.simulator import init_from


def config_of(*words: str) -> Any:
    (composed,) = with_hydra(list(words))
    return read_config(composed.mapping)


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (("grpo_qwen3_8b",), "language model"),
        (("cartpole", "actor.model.hidden=[8]"), "hidden"),
    ],
)
def test_another_network_is_refused(
    theirs: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = SimpleNamespace(config=config_of(*theirs))
    monkeypatch.setattr(init_from, "beginning", lambda config: trained)
    config = config_of("cartpole", f"init_from={tmp_path}")
    (problem,) = init_from.problems_of(config, spaces_of_job(config))
    assert problem.code == "other-network"
    assert said in f"{problem.what} {problem.why} {problem.fix}"

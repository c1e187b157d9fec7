"""Rules of evaluations of simulators during training."""

from __future__ import annotations

import pytest

from rlplace.checks.rule import broken
from rlplace.config.blocks.simulator import SimulatorJobConfig
from rlplace.config.read import read_config
from rlplace.jobs.simulator import rules


@pytest.mark.parametrize(
    ("wrapper", "every", "codes"),
    [
        ("NormalizeObservation", 2, ["not-evaluated-in-training"]),
        ("NormalizeReward", 2, ["not-evaluated-in-training"]),
        ("NormalizeObservation", 0, []),
        ("FlattenObservation", 2, []),
    ],
)
def test_statistics_that_are_in_env_alone_are_refused(
    wrapper: str, every: int, codes: list[str]
) -> None:
    config = read_config(
        {
            "cluster": {"component_placement": {"env": "0"}},
            "actor": {"model": {"kind": "mlp"}},
            "env": {
                "id": "CartPole-v1",
                "wrappers": [{"name": f"gymnasium.wrappers:{wrapper}"}],
            },
            "runner": {"eval_every": every},
        }
    )
    assert isinstance(config, SimulatorJobConfig)
    found = [problem.code for problem in broken(rules.EVALUATION, config)]
    assert found == codes

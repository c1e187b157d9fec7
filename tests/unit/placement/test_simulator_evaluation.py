"""Rules of evaluations of simulators during training."""

from __future__ import annotations

import pytest

from rlplace.checks.rule import broken
from rlplace.config.blocks.simulator import SimulatorJobConfig
from rlplace.config.read import read_config
from rlplace.envs.registry import describe
from rlplace.jobs.simulator import rules
from rlplace.jobs.simulator.job import SimulatorJob
from rlplace.placement.machines.topology import Topology

CODE = "not-evaluated-in-training"


def config_of(env: str, *wrappers: str, every: int = 2) -> SimulatorJobConfig:
    placement = {"actor": "0", "env": "1", "rollout": "2"}
    config = read_config(
        {
            "cluster": {"component_placement": placement},
            "actor": {"model": {"kind": "mlp"}},
            "env": {"id": env, "wrappers": [{"name": name} for name in wrappers]},
            "runner": {"eval_every": every},
        }
    )
    assert isinstance(config, SimulatorJobConfig)
    return config


def refused(config: SimulatorJobConfig) -> list[tuple[str, str]]:
    made = rules.MadeSimulatorJob(config=config, spaces=describe(config.env))
    found = list(broken(rules.EVALUATION, made))
    assert {problem.code for problem in found} <= {CODE}
    return [(problem.key, problem.got) for problem in found]


@pytest.mark.parametrize(
    ("env", "wrapper"),
    [
        ("CartPole-v1", "gymnasium.wrappers:NormalizeObservation"),
        ("CartPole-v1", "gymnasium.wrappers:NormalizeReward"),
        # The name of neither says so
        ("CartPole-v1", "tests.gyms:OwnNormalize"),
        (
            "CartPole-v1",
            "gymnasium.wrappers.stateful_observation:NormalizeObservation",
        ),
    ],
)
def test_statistics_that_are_in_env_alone_are_refused(env: str, wrapper: str) -> None:
    assert refused(config_of(env, wrapper)) == [("env.wrappers", wrapper)]


def test_statistics_of_a_simulator_that_wraps_itself_are_refused() -> None:
    name = "tests.gyms:normalizing"
    assert refused(config_of(name)) == [("env.id", name)]


def test_runs_without_such_statistics_are_not_refused() -> None:
    wrapper = "gymnasium.wrappers:NormalizeObservation"
    assert refused(config_of("CartPole-v1", wrapper, every=0)) == []
    plain = "gymnasium.wrappers:FlattenObservation"
    assert refused(config_of("CartPole-v1", plain)) == []
    assert refused(config_of("CartPole-v1")) == []


@pytest.mark.parametrize("every", [0, 2])
def test_what_the_made_simulator_says_decides_in_a_run(every: int) -> None:
    config = config_of("tests.gyms:normalizing", every=every)
    job = SimulatorJob()
    plan = job.plan(config, Topology.uniform(1, 3, "emulated", 8 << 30), {})
    found = [problem.code for problem in job.launch_problems(config, plan)]
    assert found == [CODE] * bool(every)
    # Statistics are saved in any case, and a lost rank had the only copy
    assert job.optional_state(config) == ()
    assert job.replaced_by_going_back(config, plan) == ("env",)
    plain = config_of("CartPole-v1")
    assert job.optional_state(plain) == ("env",)
    assert job.replaced_by_going_back(plain, plan) == ()

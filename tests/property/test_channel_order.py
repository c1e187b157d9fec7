"""No channel stops a stage for good: what is taken was put before, by a component that runs, into enough room."""

from __future__ import annotations

import graphlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.config.compose import config_names, with_hydra
from rlplace.config.open_job import OpenConfig
from rlplace.config.read import read_config
from rlplace.config.schema import Config
from rlplace.contract.planning import make_plan
from rlplace.contract.reading import read_job
from rlplace.jobs.language_model.channels import scorers_of
from rlplace.placement import Plan, Topology
from rlplace.placement.schedule import Schedule, base_stage
from rlplace.workers.launch.machines import declared_topology
from tests.property.test_turns import cases

EIGHT = Topology.uniform(1, 8)


class Ends(NamedTuple):
    """When a channel is filled and emptied, and which channels its source takes from before it puts its first item."""

    put_in: str
    taken_in: str
    after: tuple[str, ...] = ()


def ends_of(schedule: Schedule) -> Mapping[str, Ends]:
    """Of every channel that a job can have; `scored` is the stage at whose end the actor has all scores."""
    components = dict.fromkeys(c for active in schedule.active.values() for c in active)
    scorers, scored = scorers_of(components), scored_in(schedule)
    learned = stage_of(schedule, "actor", "learn")
    if "read" in schedule.stages:
        # Of fine-tuning on written answers; an evaluation reads and learns nothing, but needs the same two components
        rows = Ends("read", learned)
        return {"samples": rows, "samples.held_out": rows}
    taken = stage_of(schedule, "actor", "infer") or (scored if scorers else learned)
    ends = {
        "observations": Ends("rollout", "rollout"),
        "actions": Ends("rollout", "rollout", ("observations",)),
        "trajectories": Ends("rollout", learned),
        "requests": Ends("rollout", "rollout"),
        "completions": Ends("rollout", "rollout", ("requests",)),
        "samples": Ends("rollout", taken, ("completions",)),
        "returns": Ends(
            scored,
            stage_of(schedule, "critic", "learn"),
            tuple(f"scores.{c}" for c in scorers),
        ),
        "weights": Ends("sync", "sync"),
        "weights.reference": Ends("sync", "sync"),
        # Of off-policy jobs; the first piece of an iteration waits for no policy
        "transitions": Ends("train", "train"),
        "batches": Ends("train", "train", ("transitions",)),
        "priorities": Ends("train", "train", ("batches",)),
        "policy": Ends("train", "train", ("batches",)),
        "weights.actor.rollout": Ends("sync", "sync"),
        # Of the training API
        "commands": Ends(learned, learned),
        "results": Ends(learned, learned, ("commands",)),
    }
    for scorer in scorers:
        inferred = stage_of(schedule, scorer, "infer") or "rollout"
        ends[f"samples.{scorer}"] = Ends("rollout", inferred, ("completions",))
        ends[f"scores.{scorer}"] = Ends(inferred, scored, (f"samples.{scorer}",))
    return ends


def scored_in(schedule: Schedule) -> str:
    return next(
        (s for s in reversed(schedule.stages) if base_stage(s) == "infer"), "rollout"
    )


def stage_of(schedule: Schedule, component: str, base: str) -> str:
    """The sub-stage of a stage in which a component runs; "" for none."""
    return next(
        (
            s
            for s, active in schedule.active.items()
            if base_stage(s) == base and component in active
        ),
        "",
    )


def check_channels(plan: Plan) -> None:
    schedule, ends = plan.schedule, ends_of(plan.schedule)
    order = {stage: number for number, stage in enumerate(schedule.stages)}
    active = {stage: {*components} for stage, components in schedule.active.items()}
    # The actor gathers scores on its host
    active.setdefault(scored_in(schedule), set()).add("actor")
    for channel in plan.channels:
        put_in, taken_in, _ = ends[channel.name]
        assert order[put_in] <= order[taken_in], (
            f"{channel.name} is emptied before it was filled"
        )
        assert channel.source in active[put_in], channel.name
        assert channel.target in active[taken_in], channel.name
        assert all(
            location.capacity_items >= location.under_way > 0
            for location in channel.locations()
        ), channel.name
    check_first_items(
        {channel.name: ends[channel.name].after for channel in plan.channels}
    )


def check_first_items(after: Mapping[str, Iterable[str]]) -> None:
    """Raises CycleError for channels whose first items wait for each other."""
    graphlib.TopologicalSorter(after).prepare()


@pytest.mark.parametrize("name", list(config_names()))
def test_channels_of_shipped_plans_go_on(name: str) -> None:
    (composed,) = with_hydra(["--config-name", name])
    config = read_job(composed.mapping)
    plan = make_plan(
        config, declared_topology(config.cluster, composed.sources), composed.sources
    )
    check_channels(plan)
    runs = isinstance(config, OpenConfig) or config.runs
    assert bool(plan.channels) == runs


@given(st.sampled_from((1, 2)), st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def test_channels_of_simulators_go_on(
    groups: int, actors: int, envs: int, engines: int
) -> None:
    config = read_config(
        {
            "cluster": {
                "component_placement": {
                    "actor": f"0-{actors - 1}",
                    "env": f"0-{envs - 1}",
                    "rollout": f"{8 - engines}-7",
                },
                "allow_resident": ["actor", "env", "rollout"],
            },
            "env": {"id": "x", "total_num_envs": 8 * groups * envs},
            "rollout": {"pipeline_stage_num": groups},
        }
    )
    check_channels(make_plan(config, EIGHT))


@given(cases(), st.integers(1, 2))
def test_channels_of_language_models_go_on(
    case: tuple[object, dict[str, bool]], turns: int
) -> None:
    check_channels(make_plan(text_job(case[1], turns), EIGHT))


def text_job(offload: Mapping[str, bool], turns: int) -> Config:
    placed = {name: "0-3" if leaves else "4-7" for name, leaves in offload.items()}
    placed = {
        name: "cpu" if name.startswith("reward") else where
        for name, where in placed.items()
    }
    valued = "critic" in placed
    rewards = {
        name.partition(".")[2]: {"function": "exact"}
        for name in placed
        if name.startswith("reward.")
    }
    return read_config(
        {
            "cluster": {"component_placement": placed, "allow_resident": list(placed)},
            "algorithm": {"name": "ppo" if valued else "grpo", "prompts": 8},
            "env": {"task": "arithmetic", "max_turns": turns, "enable_offload": True},
            "rollout": {"engine": "transformers", "enable_offload": True},
            "actor": {
                "model": {"kind": "causal_lm", "path": "somewhere"},
                "enable_offload": True,
            },
            "critic": {"enable_offload": True},
            "reference": {"enable_offload": True, "refresh_every": 1},
            **({"reward": rewards} if rewards else {}),
        }
    )


def test_what_would_stop_is_noticed() -> None:
    with pytest.raises(graphlib.CycleError):
        check_first_items({"ask": ("answer",), "answer": ("ask",)})

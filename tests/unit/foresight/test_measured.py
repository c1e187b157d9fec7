"""Jobs of one's own, predicted from the seconds of their calls: call logs of round numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rlplace import Channel, Job, Stage, Worker, full, weights
from rlplace.comm.channel import ChannelStats
from rlplace.config.open_job import JOB
from rlplace.errors import ConfigError, PlacementError
from rlplace.foresight.answer import Result, render_json, render_text
from rlplace.foresight.measure import variants
from rlplace.foresight.measured import MeasuredModel
from rlplace.foresight.model import model_of
from rlplace.foresight.observe import Observations
from rlplace.foresight.predict import Prediction, predict
from rlplace.foresight.profile import Profile
from rlplace.foresight.search import Search
from rlplace.foresight.show import (
    interval,
    limit,
    prediction_record,
    render_prediction,
    scaling_notes,
)
from rlplace.foresight.space import Space
from rlplace.report.calls import IterationCalls, RankCall, StageTime
from rlplace.runtime.prepare import Prepared, prepare
from rlplace.stopwatch import CallRecord

ITERATIONS = 5  # of which the first two are not counted
CORES = 2


class Env(Worker):
    """Has two calls in a stage."""

    def rollout(self, iteration: int) -> None: ...

    def reset(self, iteration: int) -> None: ...


class Policy(Worker):
    """Takes weights."""

    def answer(self, iteration: int) -> None: ...


class Learner(Worker):
    """Sends weights."""

    def learn(self, iteration: int) -> None: ...


def job(scales: str = "ranks", channels: Sequence[Channel] = ()) -> Job:
    return Job(
        name="own",
        components={"actor": Learner, "env": Env, "rollout": Policy},
        stages=[
            Stage("sync", weights("actor", to="rollout")),
            Stage(
                "play",
                full("env").calls("rollout", "reset"),
                full("rollout").calls("answer", scales=scales),
            ),
            Stage("learn", full("actor").calls("learn")),
        ],
        channels=channels,
    )


def prepared(
    own: Job, blocks: Mapping[str, Any] | None = None, **placement: str
) -> Prepared:
    places = {"actor": "0", "env": "1-2", "rollout": "3", **placement}
    cluster = {
        "launcher": "ray",
        "accelerators_per_node": 8,
        "accelerator": {"kind": "emulated"},
        "component_placement": places,
    }
    return prepare({"cluster": cluster, JOB: own, **(blocks or {})})


def measured(
    found: Prepared,
    seconds: Mapping[tuple[str, str, str], float],
    *,
    computing: bool = False,
    slow_rank: float = 1.0,
    waited: Mapping[str, float] | None = None,
) -> Profile:
    """Return the profile of a run whose calls, (stage, component, method), took so many seconds on each rank.

    `computing`: on a processor, else asleep. `slow_rank`: how many times as long the last rank of each takes.
    `waited`: channel -> seconds that all takers together wait at it in an iteration.
    """
    asked = [0]

    def channels() -> dict[str, ChannelStats]:
        asked[0] += 1
        return {
            name: _stats(seconds * asked[0]) for name, seconds in (waited or {}).items()
        }

    observations = Observations(found.config, found.plan, channels)
    for index in range(ITERATIONS):
        calls = []
        for (stage, component, method), took in seconds.items():
            slots = list(found.plan.placement.slots(component))
            for slot in slots:
                longer = slow_rank if slot is slots[-1] else 1.0
                record = CallRecord(
                    method=method,
                    began_s=100.0 * index,
                    seconds=took * longer,
                    cpu_s=took * longer if computing else 0.0,
                    process=hash((component, slot.rank)),
                    process_cpu_s=0.0,
                    cores=CORES,
                    parts=(),
                    spans=(),
                )
                calls.append(RankCall(stage, slot, method, record))
        iteration = IterationCalls(index, 100.0 * index, 0.0, calls=calls)
        iteration.stages.append(StageTime("learn", 0.0, 1.0))
        observations.add(iteration, {"time/iteration_s": 1.0})
    return observations.profile()


def _stats(waited_s: float) -> ChannelStats:
    return ChannelStats(
        capacity_items=1,
        depth_items=0,
        high_water_items=1,
        puts=1,
        gets=1,
        producer_wait_s=0.0,
        consumer_wait_s=waited_s,
        waits=(),
        depth_by_key={},
    )


SECONDS = {
    ("sync", "actor", "push_weights"): 0.1,
    ("sync", "rollout", "pull_weights"): 0.3,
    ("play", "env", "rollout"): 0.6,
    ("play", "env", "reset"): 0.2,
    ("play", "rollout", "answer"): 0.5,
    ("learn", "actor", "learn"): 0.4,
}


def predicted(found: Prepared, profile: Profile) -> Prediction:
    return predict(found.config, found.plan, found.case, profile)


def stages(found: Prepared, profile: Profile) -> dict[str, float]:
    numbers = predicted(found, profile).numbers
    names = ("sync", "play", "learn")
    return {name: round(numbers[f"time/{name}_s"], 3) for name in names}


def test_the_placement_that_was_measured_takes_what_was_measured() -> None:
    found = prepared(job())
    profile = measured(found, SECONDS)
    # The pull took 0.3 s, of which it waited 0.1 s for the push; env makes two calls one after the other.
    assert stages(found, profile) == {"sync": 0.3, "play": 0.8, "learn": 0.4}


def test_the_longest_stage_is_the_bottleneck() -> None:
    found = prepared(job())
    shown = limit(predicted(found, measured(found, SECONDS)))
    assert shown.startswith("bottleneck play, 0.80 of 1.50 s")


def test_ranks_share_the_work_of_a_call_and_weights_stay_whole() -> None:
    own = job()
    profile = measured(prepared(own), SECONDS)
    other = prepared(own, env="1-4", actor="0,7", rollout="5-6")
    assert stages(other, profile) == {"sync": 0.3, "play": 0.4, "learn": 0.2}
    fewer = prepared(own, env="1")
    assert stages(fewer, profile) == {"sync": 0.3, "play": 1.6, "learn": 0.4}


def test_a_call_that_is_constant_takes_as_long_on_any_number_of_ranks() -> None:
    own = job(scales="constant")
    profile = measured(prepared(own), SECONDS)
    assert stages(prepared(own, env="1-2,4-5", rollout="6-7"), profile)["play"] == 0.5
    assert stages(prepared(own, rollout="3-6"), profile)["play"] == 0.8


def test_what_the_loop_asks_for_is_no_work() -> None:
    found = prepared(job())
    took = {**SECONDS, ("play", "env", "take_metrics"): 0.1}
    profile = measured(found, took)
    assert not any("take_metrics" in name for name in profile.costs)
    assert stages(found, profile)["play"] == 0.8


def test_a_profile_of_other_numbers_of_ranks_lets_all_components_leave() -> None:
    places = {"actor": "0", "env": "1", "rollout": "2"}
    mapping = {"cluster": {"component_placement": places}, JOB: job()}
    first, *others = variants(mapping, 4)
    assert first.mapping is mapping
    assert len(others) == 3
    for other in others:
        assert all(other.mapping[name] == {"enable_offload": True} for name in places)


def test_the_slowest_rank_counts() -> None:
    found = prepared(job())
    profile = measured(found, SECONDS, slow_rank=1.5)
    assert stages(found, profile)["play"] == pytest.approx(1.2)


def test_ranks_that_are_more_than_the_processors_share_them() -> None:
    own = job()
    crowded = prepared(own, env="1-2,4-5")
    # Four ranks of env on two processors: each computes 0.2 s, and had one half of the time.
    model = MeasuredModel()
    calls = [
        RankCall("play", slot, "rollout", record(0.4, cpu_s=0.2))
        for slot in crowded.plan.placement.slots("env")
    ]
    iteration = IterationCalls(0, 0.0, 0.0, calls=calls)
    ((name, lap),) = model.laps(crowded.config, crowded.plan, iteration, {})
    assert name == "env.rollout/seconds"
    assert lap.size == 0.25
    assert (lap.cpu_s, lap.blocked_s) == (pytest.approx(0.2), pytest.approx(0.0))


def test_moves_take_as_long_as_their_bytes() -> None:
    own = job()

    def leaving(size: str) -> Prepared:
        block = {"enable_offload": True, "memory": {"weights": "1GiB", "full": size}}
        blocks = dict.fromkeys(("actor", "env"), block)
        return prepared(own, blocks, actor="0", env="0")

    took = {
        **SECONDS,
        ("play", "env", "move full"): 0.2,
        ("play", "actor", "move off"): 0.1,
        ("sync", "env", "move off"): 0.1,
        ("sync", "actor", "move weights"): 0.1,
        ("learn", "actor", "move full"): 0.3,
        ("learn", "env", "move off"): 0.1,
    }
    profile = measured(leaving("2GiB"), took)
    same = predicted(leaving("2GiB"), profile).numbers["time/moves_s"]
    twice = predicted(leaving("4GiB"), profile).numbers["time/moves_s"]
    assert same < twice <= 2 * same + 1e-9


TALK = (Channel("asks", "env", "rollout"), Channel("answers", "rollout", "env"))
TALKING = {
    ("play", "env", "rollout"): 1.0,
    ("play", "rollout", "answer"): 1.0,
    ("learn", "actor", "learn"): 0.4,
}


def test_components_that_take_turns_each_wait_for_the_other() -> None:
    own = job(channels=TALK)
    # Two ranks of env wait 0.4 s each for answers, the one of rollout 0.6 s for what is asked: they never work at once.
    waited = {"answers": 2 * 0.4, "asks": 0.6}
    profile = measured(prepared(own), TALKING, waited=waited)
    assert profile.counts["play/in_turns"] == pytest.approx(1.0)
    assert stages(prepared(own), profile)["play"] == 1.0
    # Work of 0.3 s instead of 0.6 s in env, and the same 0.4 s in rollout.
    wide = prepared(own, env="1-2,4-5")
    assert stages(wide, profile)["play"] == 0.7


def test_components_that_talk_and_work_at_once_take_as_long_as_the_longer_one() -> None:
    own = job(channels=TALK)
    waited = {"answers": 0.0, "asks": 0.6}
    profile = measured(prepared(own), TALKING, waited=waited)
    assert profile.counts["play/in_turns"] == pytest.approx(0.0)
    wide = prepared(own, env="1-2,4-5")
    assert stages(wide, profile)["play"] == 0.5


def record(seconds: float, *, cpu_s: float) -> CallRecord:
    return CallRecord(
        method="rollout",
        began_s=0.0,
        seconds=seconds,
        cpu_s=cpu_s,
        process=1,
        process_cpu_s=0.0,
        cores=CORES,
        parts=(),
        spans=(),
    )


def test_a_search_gives_a_job_of_ones_own_more_ranks_where_that_helps() -> None:
    own = job()
    found = prepared(own)
    profile = measured(found, SECONDS)
    space = Space(found.config, found.plan, fixed=("actor", "rollout"))
    answer = Search(space, profile).run()
    assert answer.proven
    assert answer.best is not None
    assert answer.current is not None
    assert answer.best.seconds < answer.current.seconds
    assert answer.best.layout.sizes["env"].ranks > 2
    # No bound is above what is predicted.
    assert answer.bound <= answer.best.value * (1 + 1e-9)


def test_a_job_of_ones_own_has_the_default_model() -> None:
    found = prepared(job())
    model = model_of(found.config)
    assert isinstance(model, MeasuredModel)
    assert model.subject(found.config, "env") == "Env"


def test_another_way_to_scale_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError) as caught:
        prepared(job(scales="constnat"))
    (problem,) = caught.value.problems
    assert problem.code == "unknown-choice"
    assert 'scales="constant"' in str(problem.fix)


def test_published_rates_tell_nothing_of_a_job_of_ones_own() -> None:
    found: Any = prepared(job())
    with pytest.raises(ConfigError, match="no seconds can be told") as caught:
        MeasuredModel().published_profile(found.config, found.plan, found.case)
    assert caught.value.problems[0].code == "nothing-published"


class Exchanging(Learner):
    """Averages gradients over its ranks."""

    needs_own_process = True


def test_the_interval_of_numbers_of_ranks_that_were_not_measured_holds_all_scalings() -> (
    None
):
    own = job()
    own.components["actor"] = Exchanging
    two = prepared(own, actor="0-1", env="2-3", rollout="4")
    profile = measured(two, SECONDS)
    # As measured: nothing is assumed.
    same = ranged(two, profile)
    assert same.least_s is None
    assert not scaling_notes(same)

    # One rank exchanges nothing, so that learn may take any time up to 0.8 s; env need not share its work.
    one = ranged(prepared(own, actor="0", env="1", rollout="2"), profile)
    assert one.numbers["time/learn_s"] == pytest.approx(0.8)
    assert one.numbers["time/play_s"] == pytest.approx(1.6)
    assert interval(one) == pytest.approx((0.3 + 0.8 + 0.0, 0.3 + 1.6 + 0.8))
    (note,) = scaling_notes(one)
    assert "actor.learn (measured with 2, here 1)" in note
    assert "env.rollout (measured with 2, here 1)" in note
    assert "rollout.answer" not in note

    # An exchange takes longer with more ranks.
    four = ranged(prepared(own, actor="0-3", env="4-5", rollout="6"), profile)
    assert interval(four) == pytest.approx((0.3 + 0.8 + 0.2, 0.3 + 0.8 + 0.8))
    assert prediction_record(four)["high_s"] == pytest.approx(1.9)


def test_an_exchange_that_was_not_measured_has_no_bound() -> None:
    own = job()
    own.components["actor"] = Exchanging
    one = prepared(own)
    two = ranged(prepared(own, actor="0,7"), measured(one, SECONDS))
    assert interval(two)[0] == pytest.approx(0.3 + 0.8 + 0.2)
    assert prediction_record(two)["high_s"] is None
    assert "s or more, by how ranks share their work" in render_prediction(two)


def test_between_two_measured_numbers_of_ranks_both_are_the_ends() -> None:
    own = job()
    one = measured(prepared(own, env="1"), SECONDS)
    both = one.merged(measured(prepared(own, env="1-4", rollout="5"), SECONDS))
    two = ranged(prepared(own, env="1-2"), both)
    assert two.least_s == pytest.approx(1.5)
    assert two.most_s == pytest.approx(1.5)
    assert [*two.costs.scaled] == ["env.rollout", "env.reset"]


def test_a_search_over_numbers_of_ranks_that_were_not_measured_proves_nothing() -> None:
    own = job()
    found = prepared(own)
    profile = measured(found, SECONDS)
    space = Space(found.config, found.plan, fixed=("actor", "rollout"))
    search = Search(space, profile)
    answer = search.run()
    assert answer.best is not None
    result = Result(
        name="own",
        search=search,
        answer=answer,
        front=(),
        turns=(),
        seconds=0.0,
        unmeasured=search.unmeasured(),
        ranged=search.ranged(answer.best),
    )
    assert result.unmeasured == {"env": (2,)}
    text = render_text(result)
    assert "proven" not in text
    assert "gap" not in text
    assert "only these numbers of ranks were measured: env 2" in text
    assert "assumed, not measured: that ranks share the work of env.rollout" in text
    assert render_json(result)["proven"] is False

    # All components stay: what is told was measured.
    fixed = Space(found.config, found.plan, fixed=("actor", "rollout", "env"))
    assert not Search(fixed, profile).unmeasured()


class Replay(Worker):
    """Has one memory, so one rank."""

    most_ranks = 1

    def serve(self, iteration: int) -> None: ...


def job_with_replay() -> Job:
    return Job(
        name="own",
        components={"actor": Learner, "replay": Replay, "env": Env},
        stages=[
            Stage("play", full("env").calls("rollout"), full("replay").calls("serve")),
            Stage("learn", full("actor").calls("learn")),
        ],
    )


def with_replay(place: Any) -> dict[str, Any]:
    places = {"actor": "0", "replay": place, "env": "1"}
    cluster = {"num_nodes": 1, "accelerators_per_node": 4}
    cluster |= {"accelerator": {"kind": "emulated"}, "component_placement": places}
    return {"cluster": cluster, JOB: job_with_replay()}


@pytest.mark.parametrize(
    ("place", "fix"),
    [
        ("2-3", "replay: 2"),
        ({"node_group": "node", "placement": "0:0-1"}, "replay: cpu"),
    ],
)
def test_more_ranks_than_a_class_allows_are_refused(place: Any, fix: str) -> None:
    with pytest.raises(PlacementError) as caught:
        prepare(with_replay(place))
    (problem,) = caught.value.problems
    assert problem.code == "most-ranks"
    assert problem.key == "cluster.component_placement.replay"
    assert problem.fix == fix
    assert prepare(with_replay(fix.partition(": ")[2]))


def test_what_is_measured_and_searched_has_no_more_ranks_than_a_class_allows() -> None:
    mapping = with_replay("2")
    places = [
        variant.mapping["cluster"]["component_placement"]
        for variant in variants(mapping, 4)
    ]
    assert {place["replay"] for place in places} == {"0", "2"}
    assert {place["env"] for place in places} == {"0", "0-1", "0-3", "1"}

    found = prepare(mapping)
    space = Space(found.config, found.plan)
    sizes = MeasuredModel().sizes(space, space.now)
    assert [size.ranks for size in sizes["replay"]] == [1]
    assert [size.ranks for size in sizes["env"]] == [1, 2, 4]


def test_a_component_without_accelerators_keeps_its_place_while_others_vary() -> None:
    found = variants(with_replay("cpu"), 4, staying=["replay"])
    places = [each.mapping["cluster"]["component_placement"] for each in found]
    assert {place["replay"] for place in places} == {"cpu"}


def ranged(found: Prepared, profile: Profile) -> Prediction:
    return predict(found.config, found.plan, found.case, profile, ranged=True)

"""Calls of iterations -> what each lap takes, and what is left around them."""

from __future__ import annotations

from array import array

import pytest

from rlplace.config import compose
from rlplace.foresight import observe
from rlplace.foresight.observe import Observations, quantiles, subjects
from rlplace.foresight.profile import Profile
from rlplace.report.calls import IterationCalls, RankCall
from rlplace.runtime.prepare import Prepared, prepare_composed
from rlplace.stopwatch import CallRecord, Part, Spans

WARM = 2
PLACE = "cluster.component_placement."


def job(config: str = "hybrid_ppo", *words: str) -> Prepared:
    (composed,) = compose.with_hydra(["--config-name", config, *words])
    return prepare_composed(composed)


def called(
    made: Prepared,
    component: str,
    name: str,
    *parts: Part,
    cpu_s: float,
    total_s: float,
    process: int,
    beside_s: float = 0.0,
    rank: int = 0,
) -> RankCall:
    record = CallRecord(
        method=name.partition(" ")[0],
        began_s=0.0,
        seconds=2 * cpu_s,
        cpu_s=cpu_s,
        process=process,
        process_cpu_s=total_s,
        beside_cpu_s=beside_s,
        parts=parts,
        spans=(Spans(0.0, ("lap",), b"", array("d")),)
        * (2 if any(part.name == "minibatch" for part in parts) else 1),
    )
    return RankCall("rollout", made.plan.placement.slots(component)[rank], name, record)


def observed(
    made: Prepared,
    iterations: int,
    calls: list[list[RankCall]],
    driver_cpu_s: float = 0.1,
) -> Profile:
    found = Observations(made.config, made.plan)
    for index in range(iterations):
        found.add(
            IterationCalls(index, 0.0, driver_cpu_s, 1.0, [], calls[index]),
            {"time/iteration_s": 1.0 + index},
        )
    return found.profile()


def test_laps_are_means_by_size_and_what_is_left_of_a_call_is_its_rest() -> None:
    made = job()
    calls = [
        [
            called(
                made,
                "env",
                "run",
                Part("sim", 16.0, 10, 0.2, 0.10 * (1 + index), 0.005, 0.001),
                Part("wait", 0.0, 10, 0.5, 0.01, 0.0005, 0.0),
                cpu_s=0.5 + 0.1 * index,
                total_s=1.0 * index,
                process=7,
            )
        ]
        for index in range(5)
    ]
    profile = observed(made, 5, calls)
    (sim,) = profile.costs["env.run/sim"].points
    # Iterations 2, 3 and 4 count: laps of 30, 40 and 50 ms.
    assert (sim.size, sim.laps, sim.cpu_s, sim.least_cpu_s, sim.blocked_s) == (
        16.0,
        30,
        0.04,
        0.005,
        0.001,
    )
    assert sim.spread == pytest.approx((2 / 3) ** 0.5 / 4)
    assert profile.costs["env.run/rest"].points[0].cpu_s == pytest.approx(
        0.8 - 0.4 - 0.01
    )
    # Of each second that the process has computed, what was inside the method is not around it.
    assert profile.costs["env/ray_call"].points[0].cpu_s == pytest.approx(1.0 - 0.8)
    assert profile.costs["driver/ray_call"].points[0].cpu_s == pytest.approx(0.1)
    assert profile.subjects["env"].startswith("gymnasium InvertedPendulum-v5")
    assert "env.run/sim" not in observed(made, WARM, calls).costs


def test_what_is_around_calls_is_shared_by_the_messages_in_which_they_came() -> None:
    made = job()
    calls = [
        [
            called(
                made, "env", "move full", cpu_s=0.1, total_s=0.9 + index, process=7
            )._replace(work=False),
            called(made, "env", "run", cpu_s=0.3, total_s=1.0 + index, process=7),
            called(
                made, "env", "write_state", cpu_s=0.2, total_s=0.5 + index, process=7
            ),
        ]
        for index in range(3)
    ]
    costs = observed(made, 3, calls).costs
    assert costs["env/ray_call"].points[0].cpu_s == pytest.approx((1.0 - 0.6) / 2)
    assert costs["driver/ray_call"].points[0].cpu_s == pytest.approx(0.1 / 2)


def test_work_on_a_gpu_takes_what_the_clock_says_and_waiting_for_others_is_none_of_it() -> (
    None
):
    made = job("hybrid_ppo", "cluster=8xH100")
    parts = (
        Part("wait", 0.0, 1, 3.0, 0.1, 0.1, 2.0),
        Part("minibatch", 64.0, 2, 0.6, 0.2, 0.1, 0.15),
        Part("exchange", 8.0, 2, 1.0, 0.2, 0.05, 0.01),
    )
    calls = [
        [
            called(made, "actor", "learn", *parts, cpu_s=0.6, total_s=0.0, process=7),
            called(made, "actor", "move full", cpu_s=0.1, total_s=0.0, process=7),
        ]
        for _ in range(3)
    ]
    profile = observed(made, 3, calls)
    seconds = {
        name: (curve.on, curve.points[0].cpu_s)
        for name, curve in profile.costs.items()
        if "learn" in name
    }
    assert seconds == {
        "actor.learn/wait": ("processor", pytest.approx(0.1)),
        "actor.learn/minibatch": ("accelerator", pytest.approx(0.3)),
        "actor.learn/exchange": ("accelerator", pytest.approx(0.06)),
        "actor.learn/rest": ("processor", pytest.approx(0.1)),
    }
    assert profile.costs["actor.move_full/rest"].on == "accelerator"
    assert profile.costs["actor.move_full/rest"].points[0].cpu_s == pytest.approx(0.2)


def test_other_threads_of_a_process_count_for_the_call_in_which_they_computed() -> None:
    made = job()
    calls = [
        [
            called(
                made,
                "actor",
                "push_weights",
                cpu_s=0.2,
                beside_s=0.3,
                total_s=0.6 * index,
                process=7,
            )
        ]
        for index in range(4)
    ]
    costs = observed(made, 4, calls).costs
    assert costs["actor.push_weights/rest"].points[0].cpu_s == pytest.approx(0.5)
    assert costs["actor/ray_call"].points[0].cpu_s == pytest.approx(0.6 - 0.5)


def test_waiting_for_other_ranks_is_nothing_that_a_call_takes() -> None:
    made = job()
    wait = Part("wait", 0.0, 4, 4.0, 0.4, 0.1, 0.9)
    calls = [
        [
            called(made, "rollout", "pull_weights", cpu_s=0.1, total_s=0.0, process=7),
            called(made, "env", "run", wait, cpu_s=0.5, total_s=0.0, process=8),
        ]
        for _ in range(3)
    ]
    costs = observed(made, 3, calls).costs
    assert costs["rollout.pull_weights/rest"].points[0].blocked_s == 0.0
    assert costs["env.run/wait"].points[0].blocked_s == 0.0


def test_processes_of_two_nodes_may_have_one_number() -> None:
    made = job(
        "hybrid_ppo",
        "cluster.num_nodes=2",
        PLACE + "actor=0-15",
        PLACE + "env=0-7",
        PLACE + "rollout=8-15",
    )
    calls = [
        [
            called(
                made,
                "actor",
                "learn",
                cpu_s=0.1,
                total_s=0.3 * index,
                process=7,
                rank=rank,
            )
            for rank in (0, 8)
        ]
        for index in range(4)
    ]
    assert observed(made, 4, calls).costs["actor/ray_call"].points[
        0
    ].cpu_s == pytest.approx(0.2)


def test_many_draws_are_kept_as_quantiles_whatever_order_they_come_in() -> None:
    drawn = quantiles([float(n) for n in range(1, 1001)])
    assert len(drawn) == 256
    assert sum(drawn) / len(drawn) == pytest.approx(500.5, rel=0.01)
    assert quantiles([3.0, 1.0, 2.0]) == (1.0, 2.0, 3.0)


def test_parts_that_enclose_others_do_not_count_twice() -> None:
    made = job()
    parts = (
        Part("learn", 0.0, 1, 1.0, 0.9, 0.9, 0.0),
        Part("minibatch", 64.0, 2, 0.6, 0.6, 0.3, 0.0),
    )
    calls = [
        [called(made, "actor", "learn", *parts, cpu_s=1.0, total_s=0.0, process=7)]
        for _ in range(3)
    ]
    profile = observed(made, 3, calls)
    assert "actor.learn/learn" not in profile.costs
    assert profile.costs["actor.learn/rest"].points[0].cpu_s == pytest.approx(0.4)


def test_moves_are_named_by_where_they_lead_and_a_call_without_laps_may_have_waited() -> (
    None
):
    made = job()
    calls = [
        [called(made, "actor", "move full", cpu_s=0.1, total_s=0.0, process=7)]
        for _ in range(3)
    ]
    (point,) = observed(made, 3, calls).costs["actor.move_full/rest"].points
    assert (point.cpu_s, point.blocked_s) == pytest.approx((0.1, 0.1))


def test_a_policy_that_decides_in_the_simulator_s_thread_is_no_part_of_its_wait() -> (
    None
):
    made = job("collocated_ppo_one_process")
    wait, policy = (
        Part("wait", 0.0, 4, 0.4, 0.4, 0.1, 0.0),
        Part("policy", 8.0, 4, 0.2, 0.2, 0.05, 0.0),
    )
    calls = [
        [
            called(made, "env", "run", wait, cpu_s=0.4, total_s=0.0, process=7),
            called(
                made,
                "rollout",
                "generate",
                policy,
                Part("wait", 0.0, 4, 1, 1, 1, 0),
                cpu_s=0.0,
                total_s=0,
                process=7,
            ),
        ]
        for _ in range(3)
    ]
    costs = observed(made, 3, calls).costs
    assert {"env.run/direct_wait", "rollout.generate/policy"} <= set(costs)
    assert not {"env.run/wait", "rollout.generate/wait", "rollout.generate/rest"} & set(
        costs
    )


def test_the_share_of_steps_before_the_kl_stops_them_is_counted() -> None:
    made = job("hybrid_ppo", "algorithm.target_kl=0.01")  # 5 epochs of 4 minibatches
    calls = [
        [
            called(
                made,
                "actor",
                "learn",
                Part("step", 0.0, 5, 1, 1, 1, 0),
                cpu_s=1.0,
                total_s=0.0,
                process=7,
            )
        ]
        for _ in range(3)
    ]
    assert observed(made, 3, calls).counts == {"actor.learn/steps_share": 0.25}
    assert observed(job(), 3, calls).counts == {}


def test_a_wrapper_with_other_kwargs_is_other_work() -> None:
    wrapper = (
        "{name: gymnasium.wrappers:FrameStackObservation, kwargs: {stack_size: %s}}"
    )
    jobs = (job("hybrid_ppo", f"env.wrappers=[{wrapper % size}]") for size in (4, 16))
    four, sixteen = (subjects(made.config, made.plan)["env"] for made in jobs)
    assert four.endswith(" gymnasium.wrappers:FrameStackObservation stack_size=4")
    assert sixteen.endswith(" gymnasium.wrappers:FrameStackObservation stack_size=16")


@pytest.mark.parametrize(
    ("machine_s", "own_s", "others"),
    [
        (20.0, 8.0, 0.6),  # full, and most of it by others
        (20.0, 17.0, None),  # what Ray and the system use
        (12.0, 4.0, None),  # processors are free: nothing is in the way
    ],
)
def test_other_processes_are_reported_where_they_are_certainly_in_the_way(
    machine_s: float,
    own_s: float,
    others: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = iter([(0.0, 100.0, 7.0), (10.0, 100.0 + machine_s, 7.0 + own_s)])
    now = next(looks)
    monkeypatch.setattr(observe, "usable_cores", lambda: 2)
    monkeypatch.setattr(observe.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(observe, "machine_worked_s", lambda: now[1])
    monkeypatch.setattr(observe, "worked_s", lambda processes: now[2])
    load = observe.MachineLoad()
    assert load.others is None
    load.look([1])
    assert load.others is None
    now = next(looks)
    load.look([1])
    assert load.others == (None if others is None else pytest.approx(others))


def test_a_machine_that_tells_nothing_is_not_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(observe, "machine_worked_s", lambda: None)
    load = observe.MachineLoad()
    load.look([1])
    load.look([1])
    assert load.others is None

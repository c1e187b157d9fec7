"""What the tools of a worker promise, on threads and on Ray alike."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlplace.comm.channel import ChannelSpec
from rlplace.config.blocks.machines import AcceleratorConfig
from rlplace.errors import ChannelBroken, ChannelTimeout, WorkerError, WorkerMisuse
from rlplace.metrics import reduce_metrics
from rlplace.placement.language.slots import FlexiblePlacementStrategy
from rlplace.workers.launch.cluster import Cluster
from rlplace.workers.launch.group import WorkerGroup, close_all, wait_all
from rlplace.workers.worker import Worker
from tests.contract.tool_workers import PATIENCE_S, Impossible, Joined, Peer

AT_ONCE_S = 15.0  # far below the deadlines that a death must not be waited for
NUMBERS = itertools.count()
Launch = Callable[..., WorkerGroup]


@pytest.fixture(
    scope="module", params=["inline", pytest.param("ray", marks=pytest.mark.ray)]
)
def launcher(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("output")


@pytest.fixture(scope="module")
def cluster(launcher: str, output: Path) -> Iterator[Cluster]:
    accelerator = AcceleratorConfig(kind="emulated", memory=1000)
    with Cluster(
        1,
        4,
        accelerator=accelerator,
        launcher=launcher,
        workers=[Peer],
        output=str(output),
    ) as cluster:
        cluster.reserve()
        yield cluster


@pytest.fixture
def launch(cluster: Cluster) -> Iterator[Launch]:
    """Starts ranks of a class on the accelerators named. The groups end with the test."""

    def start(
        name: str, *accelerators: int, worker: type[Worker] = Peer, **options: Any
    ) -> WorkerGroup:
        strategy = FlexiblePlacementStrategy([[number] for number in accelerators])
        return worker.create_group("a config").launch(
            cluster, name=name, placement_strategy=strategy, **options
        )

    yield start
    close_all(list(cluster._groups.values()))


def new_channel(cluster: Cluster, **fields: Any) -> Any:
    name = f"channel {next(NUMBERS)}"
    return cluster.channel(ChannelSpec(name=name, capacity_items=4, **fields))


# ── channels ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_channel_comes_as_an_argument_with_the_name_of_its_worker(
    cluster: Cluster, launch: Launch
) -> None:
    group = launch("peer", 0, 1, channels={})
    channel = new_channel(cluster)
    assert group.place().wait() == [
        ("a config", 0, 2, "peer"),
        ("a config", 1, 2, "peer"),
    ]
    assert group.put(channel, "item").wait() == ["peer rank 0", "peer rank 1"]
    assert set(channel.stats().producers) == {"peer rank 0", "peer rank 1"}
    assert group.execute_on(0).get(channel=channel).wait() == ["item"]
    assert group.execute_on(1).get_nested({"from": (channel, 1)}).wait() == ["item"]
    channel.put("by name")
    assert "the driver" in channel.stats().producers
    assert group.execute_on(0).get_by_name(channel.spec.name).wait() == ["by name"]


def test_async_methods_put_and_get_while_others_do(
    cluster: Cluster, launch: Launch
) -> None:
    group = launch("peer", 0, 1)
    other = launch("other", 2)
    there, back = new_channel(cluster), new_channel(cluster)
    asked = group.put_and_get(there, back)
    answered = other.answer(there, back, 2)
    assert wait_all([asked, answered], PATIENCE_S) == [
        [["for 0"], ["for 1"]],
        [2],
    ]


def test_a_group_knows_the_channels_of_its_launch_and_no_others(
    cluster: Cluster, launch: Launch
) -> None:
    channel, other = new_channel(cluster), new_channel(cluster)
    channel.put("item")
    group = launch("peer", 0, channels={"mine": channel})
    assert group.get_by_name("mine").wait() == ["item"]
    with pytest.raises(WorkerError) as failed:
        group.get_by_name("mien").wait()
    assert isinstance(failed.value.cause, WorkerMisuse)
    assert failed.value.cause.code == "unknown-channel"
    assert "did you mean 'mine'?" in str(failed.value)
    all_of_them = launch("all", 1)
    other.put("item")
    assert all_of_them.get_by_name(other.spec.name).wait() == ["item"]


def test_a_failure_frees_who_waits_at_a_channel_that_came_as_an_argument(
    cluster: Cluster, launch: Launch, launcher: str
) -> None:
    producer, consumer = launch("producer", 0), launch("consumer", 1)
    channel = new_channel(cluster)
    began = time.monotonic()
    waits = consumer.get(channel)
    if launcher == "ray":
        dies = producer.die_instead(channel)
    else:
        producer.put(channel, "taken").wait()
        assert waits.wait(PATIENCE_S) == ["taken"]
        waits = consumer.get(channel)
        dies = producer.get_nested({"from": channel})  # raises: no list
    with pytest.raises(WorkerError) as freed:
        waits.wait(PATIENCE_S)
    assert time.monotonic() - began < AT_ONCE_S
    assert isinstance(freed.value.cause, ChannelBroken)
    assert "producer rank 0" in str(freed.value.cause)
    with pytest.raises(WorkerError):
        dies.wait(PATIENCE_S)


# ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_messages_go_between_any_two_workers_in_order(launch: Launch) -> None:
    actor, rollout = launch("actor", 0, 1), launch("rollout", 2, 3)
    assert actor.sizes("actor", "rollout").wait() == [[2, 2]] * 2
    sent = [actor.execute_on(rank).send_batch("rollout", 1 - rank) for rank in range(2)]
    for rank in range(2):
        (got,) = rollout.execute_on(rank).receive_two("actor", 1 - rank).wait()
        other = 1 - rank
        assert got == [(f"{other}.{n}", 6.0 * other, [other]) for n in range(2)]
    wait_all(sent, PATIENCE_S)
    assert actor.exchange().wait() == ["of 1", "of 0"]
    assert rollout.spread(1).wait() == [{"from": 1}] * 2
    assert rollout.spread(0).wait() == [{"from": 0}] * 2


def test_a_message_that_does_not_come_names_its_sender(launch: Launch) -> None:
    launch("actor", 0)
    rollout = launch("rollout", 1)
    with pytest.raises(WorkerError) as late:
        rollout.receive("actor", 0, 0.1).wait()
    assert isinstance(late.value.cause, ChannelTimeout)
    assert late.value.cause.code == "message-timeout"
    assert "rollout rank 0: waited 0.1 s for a message of actor rank 0" in str(
        late.value
    )


@pytest.mark.parametrize(
    ("source", "rank", "code"),
    [("acter", 0, "unknown-group"), ("actor", 1, "no-such-rank")],
)
def test_a_sender_that_does_not_exist_is_told_at_once(
    launch: Launch, source: str, rank: int, code: str
) -> None:
    launch("actor", 0)
    rollout = launch("rollout", 1)
    with pytest.raises(WorkerError) as wrong:
        rollout.receive(source, rank).wait()
    assert isinstance(wrong.value.cause, WorkerMisuse)
    assert wrong.value.cause.code == code


def test_the_end_of_a_group_frees_who_waits_for_its_messages(
    launch: Launch, launcher: str
) -> None:
    actor, rollout = launch("actor", 0), launch("rollout", 1)
    began = time.monotonic()
    waits = rollout.receive("actor", 0)
    if launcher == "ray":
        with contextlib.suppress(WorkerError):
            actor.die().wait()
    else:
        actor.close()
    with pytest.raises(WorkerError) as freed:
        waits.wait(PATIENCE_S)
    assert time.monotonic() - began < AT_ONCE_S
    assert isinstance(freed.value.cause, ChannelBroken)
    assert freed.value.cause.code == "peer-gone"
    assert "a message of actor rank 0" in str(freed.value)


def test_a_group_that_was_launched_again_can_be_sent_to(launch: Launch) -> None:
    actor, rollout = launch("actor", 0), launch("rollout", 1)
    rollout.close()
    again = launch("rollout", 1)
    actor.send_batch("rollout", 0).wait()
    assert [name for name, _, _ in again.receive_two("actor", 0).wait()[0]] == [
        "0.0",
        "0.1",
    ]


@pytest.mark.ray
@pytest.mark.parametrize("launcher", ["ray"], indirect=True)
def test_a_rank_that_was_started_again_sends_and_receives(
    cluster: Cluster, launch: Launch
) -> None:
    actor, rollout = launch("actor", 0, 1), launch("rollout", 2)
    for group in (actor, rollout):
        group.outlast = "give up"
    waits = rollout.receive("actor", 1)
    dies = actor.execute_on(1).die()
    with pytest.raises(WorkerError):
        wait_all([waits, dies], PATIENCE_S)
    cluster.restart({"actor": {1}})
    for sender in (0, 1):  # one that has lived on, one that is new
        sent = actor.execute_on(sender).send_batch("rollout", 0)
        (got,) = rollout.receive_two("actor", sender).wait(PATIENCE_S)
        sent.wait()
        assert [name for name, _, _ in got] == [f"{sender}.0", f"{sender}.1"]
    assert actor.exchange().wait(PATIENCE_S) == ["of 1", "of 0"]


# ── metrics, logs, errors ────────────────────────────────────────────────────────────────────────────────────────────


def test_timers_numbers_and_results_are_metrics_until_they_are_taken(
    launch: Launch,
) -> None:
    group = launch("env", 0, 1)
    for _ in range(2):
        pending = group.work()
        pending.wait()
    reduced = reduce_metrics(group.take_metrics().wait())
    assert sorted(reduced) == [
        "env/inner_s",
        "env/loss",
        "env/return",
        "env/simulate_s",
        "env/steps",
    ]
    assert (reduced["env/steps"], reduced["env/return"], reduced["env/loss"]) == (
        32.0,
        0.5,
        1.0,
    )
    assert reduced["env/simulate_s"] >= reduced["env/inner_s"] >= 0.02
    assert group.take_metrics().wait() == [{}, {}]
    record = pending.calls[0].record
    assert record is not None
    names = {name for spans in record.spans for name in spans.names}
    assert names == {"other", "simulate", "inner"}, "the timeline shows them"


@pytest.mark.ray
@pytest.mark.parametrize("launcher", ["ray"], indirect=True)
def test_what_a_worker_prints_and_logs_is_in_its_file(
    launch: Launch, output: Path
) -> None:
    launch("talker", 0, 1).say("hello").wait()
    for rank in range(2):
        text = (output / f"talker-{rank}.txt").read_text()
        assert "printed hello" in text
        assert "INFO logged hello" in text


def test_an_exception_of_the_user_arrives_whole(launch: Launch) -> None:
    with pytest.raises(WorkerError) as failed:
        launch("peer", 0, 1).fail_on(1).wait()
    cause = failed.value.__cause__
    assert isinstance(cause, Impossible)
    assert cause is failed.value.cause
    assert (str(cause), cause.step) == ("step 7: not today", 7)


# ── torch.distributed ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.ray
@pytest.mark.parametrize("launcher", ["ray"], indirect=True)
def test_ranks_reduce_in_their_process_group(launch: Launch) -> None:
    group = launch("actor", 0, 1, 2, worker=Joined)
    assert group.variables().wait() == [[str(r), "3", str(r), "3"] for r in range(3)]
    # Twice: all ranks have closed the first group before the second is opened.
    for _ in range(2):
        assert group.reduced_by_variables().wait(PATIENCE_S) == [6.0] * 3
    assert group.reduced().wait(PATIENCE_S) == [6.0] * 3


def test_one_rank_joins_alone(launch: Launch, launcher: str) -> None:
    group = launch("actor", 0, worker=Joined)
    assert group.variables().wait() == [["0", "1", "0", "1"]]
    assert group.reduced().wait(PATIENCE_S) == [1.0]


def test_a_class_without_processes_of_its_own_joins_no_group(launch: Launch) -> None:
    with pytest.raises(WorkerError) as wrong:
        launch("peer", 0).process_group().wait()
    assert isinstance(wrong.value.cause, WorkerMisuse)
    assert wrong.value.cause.code == "no-process-group"

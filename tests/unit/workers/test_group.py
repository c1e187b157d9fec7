"""Which failure of several is raised, on handles whose calls end on command."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import pytest

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.ends import LocalChannel
from rlplace.errors import ChannelBroken, ClusterError, Problem, WorkerError
from rlplace.workers.launch.group import WorkerGroup, WorkerHandle, wait_all
from rlplace.workers.launch.heartbeat import LOOKS, Heartbeat
from rlplace.workers.launch.host import Done, Failure, GroupSpec, Outcome
from rlplace.workers.worker import Worker
from tests.open_calls import slot_of


class Stepper(Worker):
    def step(self) -> None: ...


class Handle(WorkerHandle):
    """A WorkerHandle without a worker."""

    def __init__(self, component: str, rank: int) -> None:
        super().__init__(slot_of(component, rank))
        self.settle: Callable[[Outcome], None] = lambda outcome: None  # the last call
        self.cancelled = threading.Event()
        self.ended = 0  # how often
        self.asked = 0  # how often where it is
        self.places: list[str] = []  # its answers; none to later questions

    def send(
        self, settle: Callable[[Outcome], None], method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self.settle = settle

    def where(self) -> Future[str]:
        self.asked += 1
        answer: Future[str] = Future()
        if self.places:
            answer.set_result(self.places.pop(0))
        return answer

    def cancel(self) -> None:
        self.cancelled.set()

    def proceed(self) -> Future[None]:
        self.cancelled.clear()
        told: Future[None] = Future()
        told.set_result(None)
        return told

    def end(self) -> None:
        self.ended += 1

    def die(self) -> None:
        self.settle(Failure(what="the worker process died"))

    def raises(self, cause: BaseException) -> None:
        self.settle(Failure(what=str(cause), traceback="a traceback", cause=cause))


class Job:
    """A group of three."""

    def __init__(self, name: str = "actor", **channels: LocalChannel) -> None:
        self.handles = [Handle(name, rank) for rank in range(3)]
        spec = GroupSpec(name=name, worker=Stepper, config=None, slots=(), channels=channels, seed=0)
        self.group = WorkerGroup(spec, self.handles, grace_s=0.01)


def broken() -> ChannelBroken:
    return ChannelBroken(Problem(code="channel-broken", key="actions", what="a peer died"))


def test_a_death_explains_the_errors_of_its_peers() -> None:
    """A peer of a killed rank often reports its lost connection before the death itself is known."""
    job = Job()
    pending = job.group.step()
    job.handles[2].raises(RuntimeError("connection closed by peer"))
    job.handles[1].die()
    job.handles[0].settle(Done(None))
    with pytest.raises(WorkerError, match=r"actor rank 1.*died"):
        pending.wait(timeout_s=30)


def test_a_broken_channel_is_explained_by_another_error() -> None:
    env, rollout = Job("env"), Job("rollout")
    pending = [rollout.group.step(), env.group.step()]
    rollout.handles[0].raises(broken())
    env.handles[1].raises(ValueError("bad action"))
    for handle in (*rollout.handles[1:], env.handles[0], env.handles[2]):
        handle.raises(broken())
    with pytest.raises(WorkerError, match=r"env rank 1.*bad action") as raised:
        wait_all(pending, timeout_s=30)
    assert rollout.group.failure is env.group.failure is raised.value
    assert all(h.cancelled.is_set() for h in (*env.handles, *rollout.handles))


def test_of_equal_failures_the_first_counts_and_what_we_stop_does_not() -> None:
    channel = LocalChannel(ChannelSpec(name="mail", capacity_items=1))
    job = Job(mail=channel)
    pending = job.group.step()
    job.handles[2].raises(ValueError("first"))
    job.handles[0].raises(ValueError("second"))  # rank 1 reacts to nothing and is stopped
    with pytest.raises(WorkerError, match=r"rank 2.*first") as raised:
        pending.wait(timeout_s=30)
    assert [call.stopped for call in pending.calls] == [False, True, False]
    assert len(job.group.failed_calls) == 2
    assert [handle.ended for handle in job.handles] == [1, 1, 1]
    with pytest.raises(ChannelBroken, match="actor rank 2"):
        channel.get()
    with pytest.raises(WorkerError) as again:
        job.group.execute_on(1).step()
    assert again.value is raised.value


def test_a_failure_breaks_the_channels_also_if_its_call_is_not_waited_for() -> None:
    channel = LocalChannel(ChannelSpec(name="mail", capacity_items=1))
    job = Job(mail=channel)
    job.group.step()
    job.handles[1].raises(ValueError("bad action"))
    with pytest.raises(ChannelBroken, match="bad action"):
        channel.get(timeout_s=30)


def test_ranks_that_give_up_outlast_a_failure_and_those_that_do_not_are_lost() -> None:
    job = Job("env")
    job.group.outlast = "give up"
    pending = job.group.step()
    job.handles[0].die()
    job.handles[1].raises(broken())  # rank 2 reacts to nothing
    with pytest.raises(WorkerError, match=r"env rank 0.*died"):
        pending.wait(timeout_s=30)
    assert set(job.group.lost()) == {0, 2}
    assert job.handles[1].cancelled.is_set()
    new = {rank: Handle("env", rank) for rank in (0, 2)}
    job.group.go_on(new)
    assert not job.handles[1].cancelled.is_set()
    again = job.group.step()
    for handle in (new[0], job.handles[1], new[2]):
        handle.settle(Done("done"))
    assert again.wait(timeout_s=30) == ["done"] * 3
    assert [handle.ended for handle in job.handles] == [0, 0, 0]  # that is the launcher's


@pytest.mark.parametrize("vain", [False, True])
def test_a_call_may_end_while_others_have_failed_unless_that_is_vain(vain: bool) -> None:
    actor, reward = Job("actor"), Job("reward")
    actor.group.outlast, actor.group.in_vain = "end the call", lambda: vain
    pending = [actor.group.step(), reward.group.step()]
    for handle in reward.handles:
        handle.die()
    if vain:
        actor.handles[0].raises(broken())
    else:
        assert not actor.handles[0].cancelled.wait(0.2)
        for handle in actor.handles:
            handle.settle(Done(None))
    with pytest.raises(WorkerError, match=r"reward rank 0.*died"):
        wait_all(pending, timeout_s=30)
    assert set(actor.group.lost()) == ({1, 2} if vain else set())


def test_calls_of_an_ended_worker_fail_at_once() -> None:
    job = Job("env")
    waiting = job.group.step()
    answer = job.handles[0].settle
    job.group.close(grace_s=0.0)
    for call in waiting.calls:
        assert call.stopped
        with pytest.raises(WorkerError, match="step failed: the worker was stopped"):
            call.result(timeout=0)
    answer(Done(None))  # that comes late changes nothing
    assert isinstance(waiting.calls[0].exception(), WorkerError)
    assert job.group.failed_calls == []
    with pytest.raises(ClusterError, match="group that is closed"):
        job.group.step()


def test_a_call_that_cannot_be_sent_leaves_nothing_under_way() -> None:
    """A group that is closed while a call runs breaks its channels, which others may go on to use."""
    channel = LocalChannel(ChannelSpec(name="mail", capacity_items=1))
    job = Job(mail=channel)

    def refuse(*call: object) -> None:
        raise TypeError("cannot pickle")

    job.handles[1].send = refuse  # type: ignore[method-assign]
    with pytest.raises(TypeError, match="cannot pickle"):
        job.group.step()
    del job.handles[1].send
    job.group.close(grace_s=0.0)
    assert not any(handle.cancelled.is_set() for handle in job.handles)
    channel.put("letter", timeout_s=0.0)


def test_a_busy_worker_that_answers_nothing_is_taken_for_lost() -> None:
    job, idle = Job("env"), Job("rollout")
    job.group.outlast = "give up"
    heart = Heartbeat([job.group, idle.group], heartbeat_s=60.0)
    pending = job.group.step()
    job.handles[1].places = ["step, at env.py:7 in step"]  # to the first question
    for answering in (job.handles[0], job.handles[2]):
        answering.places = ["step"] * 2 * LOOKS
    for _ in range(LOOKS + 1):
        heart.look()
    assert not pending.calls[1].done()
    assert [handle.asked for handle in job.handles] == [LOOKS + 1, 2, LOOKS + 1]
    assert [handle.asked for handle in idle.handles] == [0, 0, 0]
    heart.look()
    for handle in (job.handles[0], job.handles[2]):
        handle.raises(broken())
    told = (
        r"env rank 1 .*: step failed: has not answered for 60 s, since .*; before, it was in step, at env.py:7 in step"
    )
    with pytest.raises(WorkerError, match=told):
        pending.wait(timeout_s=30)
    assert set(job.group.lost()) == {1}


def test_a_worker_that_is_being_set_up_is_not_asked() -> None:
    job = Job()
    job.group.setup()
    heart = Heartbeat([job.group], heartbeat_s=1.0)
    for _ in range(2 * LOOKS):
        heart.look()
    assert [handle.asked for handle in job.handles] == [0, 0, 0]


def test_a_death_is_told_of_the_call_that_the_worker_was_at_and_later_calls_fail_when_they_are_awaited() -> None:
    job = Job("env")
    first, behind = job.group.step(), job.group.step()
    job.handles[1].die()  # the answer of the last call comes first
    assert [pending.calls[1].done() for pending in (first, behind)] == [True, True]
    late = job.group.step()
    with pytest.raises(WorkerError, match=r"env rank 1.*died"):
        wait_all([first, behind, late], 5.0)
    assert job.group.failed_calls[0] is first.calls[1]
    assert all(call.stopped for call in late.calls)

"""Which failure of several is raised, on handles whose calls end on command."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.ends import LocalChannel
from rlplace.errors import (
    ChannelBroken,
    ChannelTimeout,
    ClusterError,
    Problem,
    WorkerError,
    WorkerTimeout,
)
from rlplace.placement.schedule import Residency
from rlplace.workers.launch.group import (
    Pending,
    Settle,
    WorkerGroup,
    WorkerHandle,
    wait_all,
)
from rlplace.workers.launch.heartbeat import LOOKS, Heartbeat
from rlplace.workers.launch.host import Done, Failure, GroupSpec, Outcome, Request
from rlplace.workers.worker import Worker
from tests.open_calls import slot_of


class Stepper(Worker):
    def step(self) -> None: ...


class Handle(WorkerHandle):
    """A WorkerHandle without a worker."""

    def __init__(self, component: str, rank: int) -> None:
        super().__init__(slot_of(component, rank))
        self.answer: Settle = lambda outcomes: None  # to the last message
        self.sent: list[list[str]] = []  # the methods of each message
        self.cancelled = threading.Event()
        self.ended = 0  # how often
        self.asked = 0  # how often where it is
        self.places: list[str] = []  # its answers; none to later questions

    def send(self, settle: Settle, requests: Sequence[Request]) -> None:
        self.answer, self.sent = (
            settle,
            [*self.sent, [method for method, _, _ in requests]],
        )

    def settle(self, outcome: Outcome) -> None:
        """Answer the last message, of one call."""
        self.answer([outcome])

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
        self.answer(Failure(what="the worker process died"))

    def raises(self, cause: BaseException) -> None:
        self.settle(Failure(what=str(cause), traceback="a traceback", cause=cause))


class Job:
    """A group of three."""

    def __init__(self, name: str = "actor", **channels: LocalChannel) -> None:
        self.handles = [Handle(name, rank) for rank in range(3)]
        spec = GroupSpec(
            name=name, worker=Stepper, config=None, slots=(), channels=channels
        )
        self.group = WorkerGroup(spec, self.handles, grace_s=0.01)


def broken() -> ChannelBroken:
    return ChannelBroken(
        Problem(code="channel-broken", key="actions", what="a peer died")
    )


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


def test_a_wait_in_vain_tells_where_the_others_were() -> None:
    env, rollout = Job("env"), Job("rollout")
    for rank, handle in enumerate(env.handles):
        handle.places = [f"step, at loop.py:{rank} in step"]
    pending = [rollout.group.step(), env.group.step()]
    env.handles[2].settle(Done(None))
    late = ChannelTimeout(
        Problem(code="channel-timeout", key="actions", what="waited 5.0 s")
    )
    rollout.handles[0].raises(late)
    rollout.handles[1].settle(Done(None))
    rollout.handles[2].settle(Done(None))
    with pytest.raises(WorkerError) as raised:
        wait_all(pending, timeout_s=30)
    assert raised.value.cause is late
    assert raised.value.what.endswith(
        "\n  meanwhile at work: env rank 0: step, at loop.py:0 in step;"
        " env rank 1: step, at loop.py:1 in step"
    )
    assert env.handles[2].asked == rollout.handles[1].asked == 0


def test_other_failures_ask_no_worker_where_it_is() -> None:
    env, rollout = Job("env"), Job("rollout")
    pending = [rollout.group.step(), env.group.step()]
    rollout.handles[0].raises(ValueError("bad action"))
    with pytest.raises(WorkerError, match="bad action"):
        wait_all(pending, timeout_s=30)
    assert [handle.asked for handle in env.handles] == [0, 0, 0]


def test_of_equal_failures_the_first_counts_and_what_we_stop_does_not() -> None:
    channel = LocalChannel(ChannelSpec(name="mail", capacity_items=1))
    job = Job(mail=channel)
    pending = job.group.step()
    job.handles[2].raises(ValueError("first"))
    job.handles[0].raises(
        ValueError("second")
    )  # rank 1 reacts to nothing and is stopped
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
    assert [handle.ended for handle in job.handles] == [
        0,
        0,
        0,
    ]  # that is the launcher's


@pytest.mark.parametrize("vain", [False, True])
def test_a_call_may_end_while_others_have_failed_unless_that_is_vain(
    vain: bool,
) -> None:
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
    answer = job.handles[0].answer
    job.group.close(grace_s=0.0)
    for call in waiting.calls:
        assert call.stopped
        with pytest.raises(WorkerError, match="step failed: the worker was stopped"):
            call.result(timeout=0)
    answer([Done(None)])  # that comes late changes nothing
    assert isinstance(waiting.calls[0].exception(), WorkerError)
    assert job.group.failed_calls == []
    with pytest.raises(ClusterError, match="group that is closed"):
        job.group.step()


def test_a_call_that_cannot_be_sent_leaves_nothing_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A group that is closed while a call runs breaks its channels, which others may go on to use."""
    channel = LocalChannel(ChannelSpec(name="mail", capacity_items=1))
    job = Job(mail=channel)

    def refuse(*call: object) -> None:
        raise TypeError("cannot pickle")

    monkeypatch.setattr(job.handles[1], "send", refuse)
    with pytest.raises(TypeError, match="cannot pickle"):
        job.group.step()
    monkeypatch.undo()
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
        r"env rank 1 .*: step failed: has not answered for 60 s, since .*; "
        r"before, it was in step, at env.py:7 in step"
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


def test_a_death_is_told_of_the_call_that_the_worker_was_at_and_later_calls_fail_when_they_are_awaited() -> (
    None
):
    job = Job("env")
    first, behind = job.group.step(), job.group.step()
    job.handles[1].die()  # the answer of the last call comes first
    assert [pending.calls[1].done() for pending in (first, behind)] == [True, True]
    late = job.group.step()
    with pytest.raises(WorkerError, match=r"env rank 1.*died"):
        wait_all([first, behind, late], 5.0)
    assert job.group.failed_calls[0] is first.calls[1]
    assert all(call.stopped for call in late.calls)


def held(job: Job) -> list[Pending]:
    """What a rank is asked for in a stage."""
    job.group.hold()
    asked = [
        job.group.move(Residency.FULL),
        job.group.step(),
        job.group.move(Residency.OFF),
    ]
    assert not any(handle.sent for handle in job.handles)
    assert not job.group.at_work
    job.group.flush()
    return asked


def test_calls_that_are_held_go_to_each_rank_as_one_message_in_order_and_each_has_its_result() -> (
    None
):
    job = Job()
    asked = held(job)
    assert [handle.sent for handle in job.handles] == [[["move", "step", "move"]]] * 3
    for rank, handle in enumerate(job.handles):
        handle.answer([Done(f"{what} {rank}") for what in ("there", "done", "gone")])
    assert wait_all(asked, 30) == [
        [f"{what} {rank}" for rank in range(3)] for what in ("there", "done", "gone")
    ]
    assert [call.work is None for pending in asked for call in pending.calls[:1]] == [
        False,
        True,
        False,
    ]
    job.group.step()
    assert job.handles[0].sent[1:] == [["step"]], "nothing is held any more"


def test_a_failure_within_a_message_stops_what_is_behind_it() -> None:
    job = Job()
    asked = held(job)
    cause = ValueError("bad action")
    job.handles[1].answer(
        [Done(None), Failure(what="bad action", traceback="a traceback", cause=cause)]
    )
    with pytest.raises(WorkerError, match=r"actor rank 1 .*: step failed: bad action"):
        wait_all(asked, 30)
    first, work, behind = (pending.calls[1] for pending in asked)
    assert (first.exception(), work.stopped, behind.stopped) == (None, False, True)
    assert job.group.failed_calls == [work]


def test_what_happens_to_a_worker_is_named_after_the_work_of_its_message() -> None:
    job, moving = Job("env"), Job("rollout")
    asked = held(job)
    with pytest.raises(WorkerTimeout, match=r"env\.step: not finished") as late:
        wait_all(asked, 0.01)
    assert late.value.problem.got == "still working: env ranks 0,1,2 in step"
    assert {
        rank: call.method for rank, call in job.group.busy().items()
    } == dict.fromkeys(range(3), "step")
    behind = job.group.step()  # a message of its own, of which the death is told first
    job.handles[1].die()
    with pytest.raises(
        WorkerError, match=r"env rank 1 .*: step failed: the worker process died"
    ):
        wait_all([*asked, behind], 30)
    assert job.group.failed_calls[0] is asked[1].calls[1]
    moving.group.hold()
    moves = [moving.group.move(Residency.WEIGHTS), moving.group.move(Residency.OFF)]
    moving.group.flush()
    moving.handles[2].die()
    with pytest.raises(WorkerError, match=r"rollout rank 2 .*: move failed"):
        wait_all(moves, 30)
    assert moving.group.failed_calls == [moves[0].calls[2]]


def test_a_message_that_cannot_be_sent_leaves_nothing_under_way_and_what_is_dropped_is_never_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job()

    def refuse(*message: object) -> None:
        raise TypeError("cannot pickle")

    monkeypatch.setattr(job.handles[1], "send", refuse)
    with pytest.raises(TypeError, match="cannot pickle"):
        held(job)
    assert not job.group.at_work
    monkeypatch.undo()
    job.group.hold()
    job.group.step()
    job.group.drop()
    job.group.flush()
    job.group.step()
    assert job.handles[2].sent == [["step"]]


def test_calls_that_were_held_while_a_group_began_to_wind_down_are_stopped() -> None:
    job = Job()
    job.group.hold()
    asked = job.group.step()
    job.group.cancel("another group failed")
    job.group.wait_wound_down()
    job.group.flush()
    assert all(call.stopped for call in asked.calls)
    assert not any(handle.sent for handle in job.handles)

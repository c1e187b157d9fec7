"""The two threads of an evaluation end together."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any, cast

import pytest

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.ends import LocalChannel
from rlplace.errors import ChannelBroken, RlplaceError
from rlplace.workers.roles import evaluation


def test_a_signal_ends_the_thread_that_generates() -> None:
    answered, errors = threading.Event(), list[RlplaceError]()
    channel = LocalChannel(
        ChannelSpec(name="requests", capacity_items=1, timeout_s=20.0)
    )

    class Env:
        def answered(
            self, version: int, *, greedy: bool
        ) -> tuple[list[Any], dict[str, float]]:
            answered.set()
            return [], {}

    class Rollout:
        def generate(self, version: int) -> None:
            answered.wait()
            time.sleep(0.2)  # the other thread waits for this one now
            os.kill(os.getpid(), signal.SIGINT)
            try:
                channel.named("rollout").get()
            except RlplaceError as error:
                errors.append(error)

    env, rollout = cast(Any, Env()), cast(Any, Rollout())
    with pytest.raises(KeyboardInterrupt):
        evaluation._both(env, rollout, {"requests": channel}, greedy=True)
    assert isinstance(errors[0], ChannelBroken)

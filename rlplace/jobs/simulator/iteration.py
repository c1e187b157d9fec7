"""One iteration of a job on simulators.

::

    sync     actor pushes weights                ─▶ rollout pulls them
    rollout  env steps simulators, puts observations ⇄ rollout puts actions; env puts trajectories
    learn    actor takes trajectories and updates; policy version + 1

    evaluate: rollout plays whole episodes by itself; between two iterations
"""

from __future__ import annotations

from rlplace.contract.stages import PULL, PUSH, VERSION, Call, Step, Work

_LEARN = ("iteration", "version")


def work(*, evaluated: bool = False) -> Work:
    """Return the calls of worker methods in each stage of an iteration. `evaluated`: whether the run evaluates."""
    sync = Step(
        calls=(
            Call(component="actor", method=PUSH, arguments=(VERSION,)),
            Call(component="rollout", method=PULL, arguments=(VERSION,)),
        )
    )
    rollout = Step(
        calls=(
            Call(component="env", method="run"),
            Call(component="rollout", method="generate"),
        )
    )
    evaluation = Step(
        name="evaluate", calls=(Call(component="rollout", method="evaluate"),)
    )
    learn = Step(calls=(Call(component="actor", method="learn", arguments=_LEARN),))
    return Work(
        stages={"sync": (sync,), "rollout": (rollout,), "learn": (learn,)},
        trains=("learn",),
        evaluation=evaluation if evaluated else None,
    )

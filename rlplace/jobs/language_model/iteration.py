"""One iteration of a job on language models.

::

    sync     actor pushes weights ─▶ rollout pulls them             (─▶ a reference that is refreshed)
    rollout  env puts prompts ⇄ rollout puts answers; env grades them, puts whole groups of samples
             ‖ scorers that keep up with generation; ‖ actor, where it accumulates gradients of whole groups
    infer    reference, teacher, rewards, critic and actor score the samples, in turns where they share accelerators;
             behind the last turn the actor computes advantages from the scores
    learn    critic and actor update; policy version + 1 behind the last turn

    evaluate: env asks held-out prompts, rollout answers them; before rollout, and after the last iteration
"""

from __future__ import annotations

from rlplace.contract.stages import ITERATION, PULL, PUSH, VERSION, Call, Step, Work
from rlplace.placement.language.spec import role_of
from rlplace.placement.schedule import FROZEN, Needs

_BOTH = (ITERATION, VERSION)


def work(needs: Needs) -> Work:
    """Return the calls of worker methods in each stage of an iteration.

    `needs`: the components that work in each stage, with the residency that each of them needs.
    """
    stages = {"sync": _sync(needs), "rollout": _rollout(needs)}
    if "infer" in needs.residency:
        stages["infer"] = _infer(needs)
    learning = needs.residency["learn"]
    stages["learn"] = (Step(calls=tuple(_both(c, "learn") for c in learning)),)
    evaluation = Step(
        name="evaluate",
        calls=(
            Call(component="env", method="evaluate"),
            Call(component="rollout", method="generate"),
        ),
        # The seconds of generating held-out answers are not metrics of the iteration.
        metrics_of=("env",),
    )
    return Work(stages=stages, trains=("learn",), evaluation=evaluation)


def _sync(needs: Needs) -> tuple[Step, ...]:
    weights = Step(
        calls=(
            Call(component="actor", method=PUSH, arguments=(VERSION,)),
            Call(component="rollout", method=PULL, arguments=(VERSION,)),
        )
    )
    if "reference" not in needs.residency["sync"]:
        return (weights,)
    # Both skip iterations that are not due.
    refresh = Step(
        name="refresh",
        calls=(_both("actor", "refresh"), _both("reference", "refresh")),
        brings_weights=True,
    )
    return (weights, refresh)


def _rollout(needs: Needs) -> tuple[Step, ...]:
    calls = [
        Call(component="env", method="run"),
        Call(component="rollout", method="generate"),
        # Where the schedule has the actor in this stage, it accumulates.
        _both("actor", "accumulate"),
    ]
    for component in needs.components:
        if role_of(component) in FROZEN:
            calls.append(_both(component, "infer"))
    return (Step(calls=tuple(calls)),)


def _infer(needs: Needs) -> tuple[Step, ...]:
    scoring = Step(calls=tuple(_both(c, "infer") for c in needs.residency["infer"]))
    # On the host: no accelerator is in use.
    advantages = Step(
        name="compute_advantages",
        calls=(Call(component="actor", method="compute_advantages"),),
        last_turn=True,
        on_host=True,
    )
    return (scoring, advantages)


def _both(component: str, method: str) -> Call:
    return Call(component=component, method=method, arguments=_BOTH)

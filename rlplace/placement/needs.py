"""What the algorithms that learn from human or verifiable feedback need in each stage, for the components a job names.

::

               actor     critic   rollout   env, agents   reference, rewards
    sync       weights            weights                 weights, of a reference that is refreshed
    rollout                       full      full          full, where nobody works on their accelerators
    infer      weights   full                             full
    learn      full      full

In infer and learn nobody waits for another: components work at once, or in turns (turns.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from rlplace.placement.language.spec import role_of
from rlplace.placement.schedule import Needs, Residency

# Roles; a name such as reward.math is one more component of the role before its dot.
REQUIRED = ("actor", "rollout")
OPTIONAL = ("critic", "reference", "reward", "env", "agent")
_FROZEN = ("reference", "reward")  # what they say of a sample does not depend on what is learned
_RLHF = {  # in the order in which turns are given
    "sync": {"actor": Residency.WEIGHTS, "rollout": Residency.WEIGHTS, "reference": Residency.WEIGHTS},
    "rollout": {"env": Residency.FULL, "rollout": Residency.FULL, "agent": Residency.FULL},
    "infer": {
        "reference": Residency.FULL,
        "reward": Residency.FULL,
        "actor": Residency.WEIGHTS,  # log-probabilities under the weights that are about to learn
        # Its weights alone would do, but learn needs more in the same place: nothing more would fit, and it would move
        # twice. It is last, and first in learn: between them it stays where it is.
        "critic": Residency.FULL,
    },
    "learn": {"critic": Residency.FULL, "actor": Residency.FULL},
}


def rlhf_needs(names: Iterable[str], *, actor_infers: bool | None = None, refreshed: bool = False) -> Needs:
    """The needs of a job with these components; actor and rollout are always among them.

    `actor_infers`: its own log-probabilities are asked for before it learns; None: where anybody judges. `refreshed`:
    the reference takes the actor's weights now and then. Names without a role here are left out, so that placing one is
    an unknown component.
    """
    known = [n for n in names if role_of(n) in (*REQUIRED, *OPTIONAL)]
    components = tuple(dict.fromkeys((*REQUIRED, *known)))
    if actor_infers is None:
        actor_infers = any(role_of(c) in _RLHF["infer"] for c in components if c != "actor")
    absent = {*(() if refreshed else [("sync", "reference")]), *(() if actor_infers else [("infer", "actor")])}
    residency = {
        stage: {
            c: need
            for role, need in row.items()
            if (stage, role) not in absent
            for c in components
            if role_of(c) == role
        }
        for stage, row in _RLHF.items()
    }
    if not residency["infer"]:
        del residency["infer"]
    return Needs(
        stages=tuple(residency),
        residency=residency,
        turns=tuple(stage for stage in ("infer", "learn") if stage in residency),
        early={c: "rollout" for role in _FROZEN for c in components if role_of(c) == role},
    )

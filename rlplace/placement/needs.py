"""What the algorithms that learn from human or verifiable feedback need in each stage, for the components a job names.

::

               actor     critic   rollout   env, agents   reference, rewards
    sync       weights            weights
    rollout                       full      full
    infer      weights   full                             full
    learn      full      full
"""

from __future__ import annotations

from collections.abc import Iterable

from rlplace.placement.schedule import Needs, Residency
from rlplace.placement.spec import role_of

# Roles; a name such as reward.math is one more component of the role before its dot.
REQUIRED = ("actor", "rollout")
OPTIONAL = ("critic", "reference", "reward", "env", "agent")
_RLHF = {
    "sync": {"actor": Residency.WEIGHTS, "rollout": Residency.WEIGHTS},
    "rollout": {"rollout": Residency.FULL, "env": Residency.FULL, "agent": Residency.FULL},
    "infer": {
        "actor": Residency.WEIGHTS,  # log-probabilities under the weights that are about to learn
        "critic": Residency.FULL,
        "reference": Residency.FULL,
        "reward": Residency.FULL,
    },
    "learn": {"actor": Residency.FULL, "critic": Residency.FULL},
}


def rlhf_needs(names: Iterable[str]) -> Needs:
    """The needs of a job with these components; actor and rollout are always among them.

    Names without a role here are left out, so that placing one is an unknown component.
    """
    known = [n for n in names if role_of(n) in (*REQUIRED, *OPTIONAL)]
    components = tuple(dict.fromkeys((*REQUIRED, *known)))
    return Needs(
        stages=tuple(stage for stage, row in _RLHF.items() if stage != "infer" or _infers(components)),
        residency={
            stage: {c: row[role_of(c)] for c in components if role_of(c) in row} for stage, row in _RLHF.items()
        },
    )


def _infers(components: Iterable[str]) -> bool:
    return any(role_of(c) in ("critic", "reference", "reward") for c in components)

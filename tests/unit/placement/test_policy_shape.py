"""Networks of the user's own that the ledger cannot count, since they are not there or do not what a policy needs."""

from __future__ import annotations

import pytest

from rlplace.config.blocks.policies import ModuleConfig
from rlplace.envs.contract import DiscreteActions, Spaces
from rlplace.errors import ConfigError
from rlplace.placement.memory.policies import policy_shape

OWN = "tests.own_network"
SPACES = Spaces(observation_shape=(4,), actions=DiscreteActions(n=3))


@pytest.mark.slow  # each imports torch in a process of its own
@pytest.mark.parametrize(
    ("name", "kwargs", "code", "key"),
    [
        (f"{OWN}:Wrong", {}, "bad-network", "actor.model"),
        (f"{OWN}:Frozen", {}, "bad-network", "actor.model"),
        (f"{OWN}:Constant", {}, "bad-network", "actor.model"),
        (f"{OWN}:Spaces", {}, "unknown-module", "actor.model.name"),
        ("no_such_package:Net", {}, "unknown-module", "actor.model.name"),
        (f"{OWN}:Own", {"wdith": 3}, "bad-module-kwargs", "actor.model.kwargs"),
    ],
)
def test_a_network_that_cannot_be_used(
    name: str, kwargs: dict[str, object], code: str, key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        policy_shape(
            ModuleConfig(name=name, kwargs=kwargs), SPACES, normalize_observations=True
        )
    assert [(problem.code, problem.key) for problem in caught.value.problems] == [
        (code, key)
    ]

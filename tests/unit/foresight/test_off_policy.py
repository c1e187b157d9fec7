"""Seconds of off-policy jobs are predicted from a profile of the same algorithm, simulator and sizes alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rlplace
from rlplace.errors import ConfigError
from rlplace.foresight.known import find_profile
from rlplace.foresight.observe import subjects
from rlplace.foresight.profile import VERSION, VERSION_KEY


@pytest.mark.parametrize(
    ("words", "others"),
    [
        (["algorithm.batch_size=512"], "replay and actor"),
        (["algorithm.updates_per_step=2"], "replay and actor"),
        (["actor.critics=4"], "actor"),
        (["actor.hidden=[512]"], "actor and rollout"),
        (["env.total_num_envs=4"], "rollout"),
        (["env.id=MountainCarContinuous-v0"], "actor, rollout and replay"),
        (["algorithm.name=td3"], "actor and rollout"),
    ],
)
def test_a_profile_of_other_work_is_refused(
    words: list[str], others: str, tmp_path: Path
) -> None:
    here = rlplace.plan("sac")
    file = tmp_path / "profile.json"
    profile = {
        VERSION_KEY: VERSION,
        "subjects": subjects(here.config, here.plan),
        "costs": {},
    }
    file.write_text(json.dumps(profile))
    asked = [f"profile={file}"]
    same = rlplace.plan("sac", [*asked, "cluster.component_placement.rollout=0"])
    assert find_profile(same.config, same.plan, same.case) is not None
    other = rlplace.plan("sac", [*asked, *words])
    with pytest.raises(ConfigError) as caught:
        find_profile(other.config, other.plan, other.case)
    (told,) = caught.value.problems
    assert told.code == "profile-of-another"
    for component in ("actor", "rollout", "replay"):
        named = f"{component}:" in str(told.got)
        assert named == (component in others), told.got

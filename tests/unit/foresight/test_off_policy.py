"""Seconds of off-policy jobs are predicted from a profile of the same algorithm, simulator and sizes alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rlplace
from rlplace.errors import ConfigError
from rlplace.foresight.known import find_profile
from rlplace.foresight.model import model_of
from rlplace.foresight.observe import subjects
from rlplace.foresight.profile import VERSION, VERSION_KEY, read_profile
from rlplace.foresight.scaling import Scaling


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


def costs_of(words: list[str], points: list[dict[str, float]]) -> dict[str, float]:
    """Return assumption -> seconds of `learn` with 2 actor ranks. `points`: those that were measured."""
    profile = {
        VERSION_KEY: VERSION,
        "costs": {"actor.learn/seconds": {"points": points}},
        "counts": {"actor/on_processors": 1.0},
    }
    read = read_profile(json.dumps(profile), file="profile.json")
    config = rlplace.plan("td3", words).config
    found = {}
    for scaling in Scaling:
        costs = model_of(config).costs(config, read, scaling)
        found[scaling.value] = costs.of("actor.learn/seconds", 0.5).seconds
    return found


def test_a_part_of_an_update_stays_with_more_actor_ranks() -> None:
    words = ["actor.hidden=[256,256]", "algorithm.batch_size=256"]
    alone = {"size": 1.0, "cpu_s": 10.0}
    found = costs_of(words, [alone])
    # 1,000 updates of the critics and 500 of the policy, with an exchange each
    exchanged_s = 1500 * 2 * 5e-4
    assert found["shared"] == pytest.approx(10.0 * (0.2 + 0.8 / 2) + exchanged_s)
    # The range goes from ranks that share all work on
    assert found["least"] == pytest.approx(5.0)
    # Small batches are mostly spent beside matrix products
    small = costs_of([*words[:1], "algorithm.batch_size=16"], [alone])
    assert small["shared"] == pytest.approx(10.0 * (0.8 + 0.2 / 2) + exchanged_s)


def test_a_measured_number_of_actor_ranks_is_taken_as_it_is() -> None:
    points = [{"size": 0.5, "cpu_s": 7.0}, {"size": 1.0, "cpu_s": 10.0}]
    assert set(costs_of([], points).values()) == {7.0}

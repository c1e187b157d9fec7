"""Runs that go on through several placements and numbers of ranks, with the curve of a run that nothing interrupted.

A simulator policy goes on to the bit as long as the number of actor ranks is the same, wherever env and rollout are:
else sums over ranks round differently in their last bits. So do products of matrices where an engine has other answers
in flight, which depends on timing. `CLOSE` is a hundred times what was measured: 1e-6.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e import language, training
from tests.e2e.training import SMALL, Finished, placed, train

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]

Where = tuple[str, str, str]  # of actor, env and rollout
CLOSE = 1e-4
EACH = 2  # iterations in each place
SIMULATOR = (
    *SMALL[1:],
    *(
        "cluster.accelerators_per_node=8",
        "env.id=CartPole-v1",
        "runner.stop_at_return=null",
    ),
    "actor.optimizer.schedule=constant",
)
SIMULATED_PATHS: dict[str, list[Where]] = {
    "placements": [
        training.PLACEMENTS[f"{name}_ppo"]
        for name in ("hybrid", "collocated", "disaggregated")
    ],
    "world sizes": [
        ("0-7", "0-3", "4-7"),
        ("0-3", "0-3", "0-3"),
        ("0-1", "2-3", "4-7"),
        ("0-7", "0-3", "4-7"),
    ],
}
SIMULATED_PATHS["placements"].append(training.PLACEMENTS["hybrid_ppo"])
TEXT_PATHS: dict[str, list[Where]] = {
    "placements": [
        language.PLACEMENTS[f"{name}_grpo_llm"]
        for name in ("hybrid", "collocated", "disaggregated")
    ],
    "world sizes": [
        ("0-7", "0", "6-7"),
        ("0-3", "0", "4-5"),
        ("0-1", "0-1", "0-1"),
        ("0-7", "0", "6-7"),
    ],
}
TEXT_PATHS["placements"].append(language.PLACEMENTS["hybrid_grpo_llm"])


def ran(
    config: str, output: Path, job: Sequence[str], path: Sequence[Where]
) -> tuple[Finished, Finished]:
    """Return a run in the first place, and one through all of them; both of as many iterations."""
    last = f"runner.total_iterations={EACH * len(path)}"
    whole = train(config, output / "whole", *job, *placed(*path[0]), last)
    assert whole.code == 0, whole.err
    for number, where in enumerate(path, 1):
        until = f"runner.total_iterations={EACH * number}"
        moved = train(
            config, output / "moved", *job, *placed(*where), until, "resume=auto"
        )
        assert moved.code == 0, moved.err
        assert (
            number == 1
            or f"continues after iteration {EACH * (number - 1)}\n" in moved.out
        ), "and no episode is cut"
        before, now = (ranks_of(place) for place in (path[max(0, number - 2)], where))
        cut = (
            "samples are dealt to"
            if config == "hybrid_ppo"
            else "state is sharded over"
        )
        told = f"actor: its {cut} {now} rank{'s' * (now > 1)} instead of {before}\n"
        assert (told in moved.out) == (now != before), moved.out
    assert [line["iteration"] for line in moved.metrics()] == list(
        range(1, EACH * len(path) + 1)
    )
    return whole, moved


def ranks_of(where: Where) -> int:
    first, _, last = where[0].partition("-")
    return int(last or first) - int(first) + 1


@pytest.mark.parametrize("path", SIMULATED_PATHS)
def test_a_simulator_policy(path: str, tmp_path: Path) -> None:
    places = SIMULATED_PATHS[path]
    whole, moved = ran("hybrid_ppo", tmp_path, SIMULATOR, places)
    same = EACH * len(
        [
            *itertools.takewhile(
                lambda where: ranks_of(where) == ranks_of(places[0]), places
            )
        ]
    )
    for number, (line, expected) in enumerate(
        zip(moved.metrics(), whole.metrics(), strict=True)
    ):
        assert line.get("env/return") == expected.get("env/return")
        assert line["env/steps"] == expected["env/steps"]
        for name in (
            "actor/policy_loss",
            "actor/entropy",
            "actor/grad_norm",
            "actor/explained_variance",
        ):
            close = 0.0 if number < same else CLOSE
            assert line[name] == pytest.approx(
                expected[name], rel=close, abs=close * 1e-2
            ), (number, name)


@pytest.mark.parametrize(
    ("path", "more"),
    [(path, more) for path in TEXT_PATHS for more in ((), ("actor.lora_rank=4",))],
    ids=[f"{path}{lora}" for path in TEXT_PATHS for lora in ("", ", lora")],
)
def test_a_language_model(
    path: str, more: tuple[str, ...], model: Path, tmp_path: Path
) -> None:
    seeded = (
        "rollout.seed=0",
        "actor.optimizer.schedule=constant",
        "algorithm.kl_coef=0",
    )
    job = (*language.tiny(model), "cluster.accelerators_per_node=8", *seeded, *more)
    whole, moved = ran("hybrid_grpo_llm", tmp_path, job, TEXT_PATHS[path])
    for line, expected in zip(moved.metrics(), whole.metrics(), strict=True):
        for name in ("actor/samples", "actor/tokens_learned"):
            assert line[name] == expected[name]
        for name in ("actor/reward", "actor/entropy", "actor/grad_norm"):
            assert line[name] == pytest.approx(expected[name], rel=CLOSE), name
    assert moved.summary()["tokens_learned"] == whole.summary()["tokens_learned"]

"""Whole runs with a critic, a reference and a reward model as Ray processes, several ranks of each; real vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.test_rlhf_inline import NUMBERS, placed
from tests.e2e.test_rlhf_inline import SMALL as INLINE
from tests.e2e.training import Finished, train

pytestmark = pytest.mark.ray

SMALL, SHORT = INLINE[1:], ("runner.total_iterations=2",)  # without the launcher
EVERYBODY = ("actor", "critic", "reference", "reward", "rollout")
ONE_RANK_EACH = dict.fromkeys(EVERYBODY, "0")
PLACEMENTS = {
    "one rank each": ONE_RANK_EACH,
    "tokens of a critic on a cut actor": {
        "actor": "{placement: 0-1, tensor_parallel_size: 2}",
        "critic": "{placement: 1-2, context_parallel_size: 2}",
        "reference": "{placement: 2-3, tensor_parallel_size: 2}",
        "reward": "3",
        "rollout": "0",
    },
    "uneven": {
        "actor": "0-2",
        "critic": "3",
        "reference": "1-2",
        "reward": "0",
        "rollout": "0-3",
    },
}
Run = Callable[[str], Finished]


@pytest.fixture(scope="module")
def run_of(models: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same job, same seeds, in one of the placements; each is run once."""
    ended: dict[str, Finished] = {}

    def run(name: str) -> Finished:
        if name not in ended:
            where = {**PLACEMENTS[name], "env": "0"}
            launched = INLINE if PLACEMENTS[name] is ONE_RANK_EACH else SMALL
            ended[name] = train(
                "rlhf_tiny",
                tmp_path_factory.mktemp("runs"),
                *launched,
                *SHORT,
                *models,
                *placed(**where),
            )
        return ended[name]

    return run


@pytest.mark.parametrize(
    "name",
    [
        # Both slow: test_llm_ray.py compares placements on Ray, and contract tests compare ranks that cut a model.
        pytest.param("tokens of a critic on a cut actor", marks=pytest.mark.slow),
        pytest.param("uneven", marks=pytest.mark.slow),
    ],
)
def test_every_placement_makes_the_same_update(name: str, run_of: Run) -> None:
    first, other = run_of("one rank each"), run_of(name)
    assert first.code == 0, first.err
    assert other.code == 0, other.err
    for ours, theirs in zip(other.metrics(), first.metrics(), strict=True):
        for number in NUMBERS:
            assert ours[number] == pytest.approx(theirs[number], rel=1e-3, abs=1e-5), (
                number
            )
        assert max(ours["actor/mismatch_max"], theirs["actor/mismatch_max"]) < 1e-3


@pytest.mark.vllm
@pytest.mark.slow
def test_five_roles_learn_from_what_vllm_generates(
    models: tuple[str, ...], tmp_path: Path
) -> None:
    where = (
        "cluster.component_placement.actor='0-1'",
        "runner.total_iterations=12",
        "algorithm.prompts=8",
    )
    run = train(
        "rlhf_tiny",
        tmp_path,
        *SMALL,
        *models,
        "rollout.engine=vllm",
        "+rollout.enforce_eager=true",
        *where,
    )
    assert run.code == 0, run.err
    lines = run.metrics()
    assert lines[-1]["actor/reward"] > 1.3 * lines[0]["actor/reward"]
    assert lines[-1]["actor/kl_reference"] < 30.0
    assert all(line["actor/mismatch_max"] < 1e-3 for line in lines)

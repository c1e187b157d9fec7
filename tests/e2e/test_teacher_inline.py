"""Runs that learn from a teacher, in threads of this process: the KL falls, a resumed run goes on, misfits are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rlplace
from rlplace.errors import RlplaceError
from tests.e2e.language import INLINE, tiny
from tests.e2e.training import Finished, train
from tests.tiny_lm import tiny_model

CONFIG = "hybrid_grpo_llm"
TEACHER = (
    *INLINE,
    "cluster.accelerators_per_node=4",
    "+cluster.component_placement.teacher=2",
)
DISTILL = ("algorithm.name=distill", "algorithm.kl_coef=0", "rollout.seed=0")
SAME_CURVE = ("actor/kl_teacher_token", "actor/tokens_learned", "actor/grad_norm")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with other sizes and weights than the student's, and its tokenizer."""
    return tiny_model(tmp_path_factory.mktemp("teacher"), seed=1, hidden=128)


def taught(model: Path, teacher: Path, *more: str) -> tuple[str, ...]:
    path = f"+teacher.model.path={teacher}"
    return (*TEACHER, *tiny(model), *DISTILL, path, "runner.eval_every=0", *more)


def run(output: Path, words: tuple[str, ...], iterations: int, *more: str) -> Finished:
    last = f"runner.total_iterations={iterations}"
    found = train(CONFIG, output, *words, last, *more)
    assert found.code == 0, found.err
    return found


def test_the_actor_comes_near_to_its_teacher(
    model: Path, teacher: Path, tmp_path: Path
) -> None:
    found = run(tmp_path, taught(model, teacher), 12)
    kl = [line["actor/kl_teacher_token"] for line in found.metrics()]
    assert min(kl[:2]) > 0
    assert sum(kl[-3:]) / 3 < 0.8 * sum(kl[:3]) / 3
    measured = found.summary()["memory"]["teacher"]["full"]
    assert measured["measured"] == pytest.approx(measured["predicted"], rel=0.05)


@pytest.mark.slow
def test_a_taught_run_goes_on(model: Path, teacher: Path, tmp_path: Path) -> None:
    words = taught(model, teacher, "actor.optimizer.schedule=constant")
    whole = run(tmp_path / "whole", words, 4)
    run(tmp_path / "cut", words, 2)
    resumed = run(tmp_path / "cut", words, 4, "resume=auto")
    for name in SAME_CURVE:
        expected = [line[name] for line in whole.metrics()]
        numbers = [line[name] for line in resumed.metrics()]
        assert numbers == pytest.approx(expected, rel=1e-3), name


def told(words: tuple[str, ...]) -> dict[str, str]:
    """Return key -> what the plan says of a wrong job."""
    with pytest.raises(RlplaceError) as caught:
        rlplace.plan(CONFIG, words)
    return {problem.key: problem.render() for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("words", "key", "text"),
    [
        (("~+teacher", "~+cluster.component_placement.teacher"), "algorithm.name", "no teacher is placed"),
        (("~+teacher",), "teacher.model", "no model of its own"),
        (("algorithm.dynamic_sampling=true",), "algorithm.dynamic_sampling", "equal rewards"),
        (("+teacher.coef=0",), "teacher.coef", "must be > 0"),
        (("+teacher.discount=2",), "teacher.discount", "<= 1"),
    ],
)  # fmt: skip
def test_a_teacher_that_teaches_nothing_is_told(
    words: tuple[str, ...], key: str, text: str, model: Path, teacher: Path
) -> None:
    job = taught(model, teacher)
    for word in words:
        if word.startswith("~"):
            job = tuple(w for w in job if not w.startswith(word[1:]))
    job += tuple(w for w in words if not w.startswith("~"))
    assert text in told(job)[key]


def test_the_model_of_the_actor_is_no_teacher(model: Path) -> None:
    said = told(taught(model, model))["teacher.model.path"]
    assert "the model of the actor" in said
    assert "teacher-misfit" in said


def test_a_kl_penalty_of_rewards_that_nothing_reads_is_told(
    model: Path, teacher: Path
) -> None:
    words = taught(
        model,
        teacher,
        "+cluster.component_placement.reference=3",
        "algorithm.kl_coef=0.01",
        "algorithm.kl_in=reward",
    )
    assert "has no effect" in told(words)["algorithm.kl_in"]
    # As the fix says
    rlplace.plan(CONFIG, (*words, "algorithm.kl_in=loss", "algorithm.kl_estimator=k2"))


def test_the_fix_of_a_job_without_a_teacher_places_one(
    model: Path, teacher: Path
) -> None:
    words = (*INLINE, *tiny(model), *DISTILL)
    said = told(words)["algorithm.name"]
    assert "cluster.component_placement.teacher={same_as: actor}" in said
    assert "teacher.enable_offload=true" in said
    rlplace.plan(
        CONFIG,
        (
            *words,
            "cluster.component_placement.teacher={same_as: actor}",
            "teacher.enable_offload=true",
            f"teacher.model.path={teacher}",
        ),
    )


def test_a_teacher_with_another_tokenizer_is_told(model: Path, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other", seed=1)
    file = other / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    ids = tokenizer["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    found = told(taught(model, other))
    assert "the teacher has another tokenizer" in found["teacher.model.path"]

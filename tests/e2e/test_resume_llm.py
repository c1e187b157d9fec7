"""Language-model runs that go on with the same curve. Through other placements: test_resume_matrix.py.

Not to the bit: how many answers an engine has in flight depends on timing, and a product of matrices rounds by its
batch. What is saved and loaded is equal to the bit: tests/contract/test_state.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlplace.workers.roles.prompts import Prompts
from tests.e2e.language import INLINE, tiny
from tests.e2e.training import Finished, train

LORA = ("actor.lora_rank=4",)
SEEDED = ("rollout.seed=0", "actor.optimizer.schedule=constant", "algorithm.kl_coef=0")
CURVE = ("actor/reward", "actor/tokens_learned", "actor/entropy", "actor/grad_norm")


def curve(run: Finished) -> list[list[float]]:
    return [[line[name] for name in CURVE] for line in run.metrics()]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), id="all weights"),
        # Ranks go on from the state of factors in tests/contract/test_state.py.
        pytest.param(LORA, id="lora", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on(more: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    job = (*INLINE, *tiny(model), *SEEDED, *more)
    whole = train(
        "hybrid_grpo_llm", tmp_path / "whole", *job, "runner.total_iterations=4"
    )
    assert whole.code == 0, whole.err
    train("hybrid_grpo_llm", tmp_path / "cut", *job, "runner.total_iterations=2")
    run = train(
        "hybrid_grpo_llm",
        tmp_path / "cut",
        *job,
        "runner.total_iterations=4",
        "resume=auto",
    )
    assert run.code == 0, run.err
    for numbers, expected in zip(curve(run), curve(whole), strict=True):
        assert numbers == pytest.approx(expected, rel=1e-4)
    assert run.summary()["tokens_learned"] == whole.summary()["tokens_learned"]


@pytest.mark.slow
def test_prompts_that_short_rounds_have_left_are_asked_after_a_resume(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    episodes = Prompts.episodes

    def recorded(prompts: Prompts, number: int, samples: int) -> object:
        if samples > 1:  # else it is looked at only
            asked.append(number)
        return episodes(prompts, number, samples)

    job = (*INLINE, *tiny(model), "algorithm.short_rounds=2", "algorithm.name=grpo")
    first = train("hybrid_grpo_llm", tmp_path, *job, "runner.total_iterations=2")
    assert first.code == 0, first.err
    (file,) = tmp_path.glob("*/*/checkpoints/000002/env/tails_*.json")
    left = json.loads(file.read_text(encoding="utf-8"))["instead"]
    monkeypatch.setattr(Prompts, "episodes", recorded)
    run = train(
        "hybrid_grpo_llm", tmp_path, *job, "runner.total_iterations=4", "resume=auto"
    )
    assert run.code == 0, run.err
    assert sorted(left, key=int) == ["8", "9", "10", "11"]  # of the round that waits
    third = [number for number in asked if number in left.values()]
    assert sorted(third) == sorted(left.values())
    assert [line["env/prompts_left"] for line in run.metrics()] == [2, 2, 0, 2]


@pytest.mark.parametrize("short_rounds", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_no_prompt_is_skipped_or_asked_twice_with_another_number_of_prompts(
    short_rounds: int,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learned: list[int] = []
    episodes = Prompts.episodes

    def recorded(prompts: Prompts, number: int, samples: int) -> object:
        if samples > 1:  # else it is looked at only
            learned.append(number)
        return episodes(prompts, number, samples)

    monkeypatch.setattr(Prompts, "episodes", recorded)
    job = (*INLINE, *tiny(model), "algorithm.name=grpo", "runner.eval_every=0")
    job = (*job, f"algorithm.short_rounds={short_rounds}")
    runs = []
    for prompts, last in ((4, 3), (6, 6), (2, 9)):
        further = (f"algorithm.prompts={prompts}", f"runner.total_iterations={last}")
        allowed = ("resume=auto", "resume_allow=[algorithm.prompts]")
        run = train("hybrid_grpo_llm", tmp_path, *job, *further, *allowed)
        assert run.code == 0, run.err
        runs.append(run)
    assert "no row is skipped or asked twice" in runs[1].out
    # Short rounds ask prompts ahead, and ask postponed ones again
    assert sorted(set(learned)) == list(range(3 * 4 + 3 * 6 + 3 * 2))
    if not short_rounds:
        assert learned == sorted(set(learned))


REWARD = "def reward(transcript):\n    return {}\n"


def asked(folder: Path) -> tuple[Path, tuple[str, ...]]:
    """A data set, and a job that asks it and grades answers by code beside it."""
    data = folder / "rows.jsonl"
    rows = [json.dumps({"prompt": f"row {n}", "answer": "0"}) for n in range(20)]
    data.write_text("\n".join(rows))
    (folder / "changing_reward.py").write_text(REWARD.format("1.0"))
    job = (
        "env.task=prompts",
        f"env.kwargs={{path: {data}}}",
        "env.rewards=[{name: 'changing_reward:reward'}]",
        "runner.eval_every=0",
    )
    return data, job


def test_data_and_code_that_were_edited_are_named_and_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    data, task = asked(tmp_path)
    job = (*INLINE, *tiny(model), *task)
    first = train("hybrid_grpo_llm", tmp_path, *job, "runner.total_iterations=1")
    assert first.code == 0, first.err
    with data.open("a") as rows:
        rows.write(f"\n{json.dumps({'prompt': 'one more', 'answer': '0'})}")
    (tmp_path / "changing_reward.py").write_text(REWARD.format("-5.0"))
    further = ("runner.total_iterations=2", "resume=auto")
    refused = train("hybrid_grpo_llm", tmp_path, *job, *further)
    assert refused.code == 2
    assert refused.err.count("[other-experiment]") == 2
    assert "changing_reward.py has " in refused.err
    both = "resume_allow=[env.kwargs.path,env.rewards.name]"
    assert f"(or on purpose: {both})" in refused.err
    run = train("hybrid_grpo_llm", tmp_path, *job, *further, both)
    assert run.code == 0, run.err
    assert "env.kwargs.path: rows.jsonl has " in run.out
    assert "changes the numbers of what follows" in run.out


def test_the_folder_of_the_model_may_not_change(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "model"
    shutil.copytree(model, other)
    job = (*INLINE, *tiny(other))
    first = train("hybrid_grpo_llm", tmp_path, *job, "runner.total_iterations=1")
    assert first.code == 0, first.err
    settings = json.loads((other / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ messages[0]['content'] }}"
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    further = ("runner.total_iterations=2", "resume=auto")
    refused = train("hybrid_grpo_llm", tmp_path, *job, *further)
    assert refused.code == 2
    assert "tokenizer_config.json has " in refused.err

"""Runs that learn written answers, in threads of this process: they learn, resume, and are a start for other runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rlplace
from rlplace.errors import ProblemsError
from tests.e2e.language import INLINE, tiny
from tests.e2e.training import Finished, train

CONFIG = "sft_tiny"
SAME_CURVE = ("actor/loss", "actor/tokens_learned", "actor/grad_norm", "actor/lr")


def sft(model: Path, *more: str) -> tuple[str, ...]:
    return (
        "cluster.launcher=inline",
        "cluster.accelerator.kind=emulated",
        "cluster.component_placement.actor=0",
        f"actor.model.path={model}",
        "algorithm.prompts=16",
        "runner.eval_every=0",
        *more,
    )


def run(output: Path, words: tuple[str, ...], iterations: int, *more: str) -> Finished:
    last = f"runner.total_iterations={iterations}"
    found = train(CONFIG, output, *words, last, *more)
    assert found.code == 0, found.err
    return found


def written(folder: Path, rows: list[dict[str, Any]]) -> tuple[str, ...]:
    """Words for a run on a file of these rows."""
    file = folder / "rows.jsonl"
    lines = [json.dumps(row) for row in rows]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return ("env.task=prompts", f"env.kwargs={{path: {file}}}")


def test_a_run_learns_and_goes_on(model: Path, tmp_path: Path) -> None:
    words = sft(model, "runner.eval_every=6", "runner.eval_prompts=4")
    whole = run(tmp_path / "whole", words, 12)
    lines = whole.metrics()
    losses = [line["actor/loss"] for line in lines if "actor/loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    held_out = [line["eval/loss"] for line in lines if "eval/loss" in line]
    assert held_out[-1] < held_out[0]
    summary = whole.summary()
    assert summary["rows"] == 12 * 16
    assert summary["evaluations"].keys() == {"0", "6", "12"}
    full = summary["memory"]["actor"]["full"]
    assert full["measured"] == pytest.approx(full["predicted"], rel=0.05)
    assert "learn" in summary["predicted"]["seconds"]
    # The learning rate falls over all iterations, so both parts are of a run of 12
    run(tmp_path / "cut", words, 12, "runner.stop_at_return=0.0")
    resumed = run(tmp_path / "cut", words, 12, "resume=auto")
    for name in SAME_CURVE:
        expected = [line[name] for line in lines if name in line]
        numbers = [line[name] for line in resumed.metrics() if name in line]
        assert numbers == pytest.approx(expected, rel=1e-3), name


def test_low_rank_factors_learn_and_are_merged(model: Path, tmp_path: Path) -> None:
    lora = ("actor.lora_rank=4", "actor.optimizer.lr=0.02")
    found = run(tmp_path, sft(model, *lora), 10)
    losses = [line["actor/loss"] for line in found.metrics()]
    assert losses[-1] < losses[0]
    assert found.folder is not None
    names = {file.name for file in (found.folder / "policy").iterdir()}
    assert "model.safetensors" in names
    assert "adapter_model.safetensors" not in names


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "distill"])
def test_a_learned_model_is_a_start_and_a_teacher(
    name: str, model: Path, tmp_path: Path
) -> None:
    found = run(tmp_path / "sft", sft(model), 3)
    assert found.folder is not None
    learned = found.folder / "policy"
    words = (*INLINE, *tiny(learned), f"algorithm.name={name}")
    if name == "distill":
        words = (
            *words,
            "cluster.accelerators_per_node=4",
            "+cluster.component_placement.teacher=2",
            f"+teacher.model.path={learned}",
            # The student has its first weights
            f"actor.model.path={model}",
        )
    last = ("runner.total_iterations=1", "runner.eval_every=0")
    after = train("hybrid_grpo_llm", tmp_path / name, *words, *last)
    assert after.code == 0, after.err
    (line,) = after.metrics()
    assert line["actor/tokens_learned"] > 0
    # Engine and actor have the same weights
    assert line["actor/mismatch"] < 1e-4
    if name == "distill":
        # The mean over few sampled tokens may be below 0
        assert line["actor/kl_teacher_token"] != 0


MESSAGES = [
    {"role": "user", "content": "1+2?"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "and 1?"},
    {"role": "assistant", "content": "4"},
]


def test_chats_of_several_turns_are_learned(model: Path, tmp_path: Path) -> None:
    rows = [{"messages": MESSAGES}, {"messages": MESSAGES[:2]}] * 8
    words = written(tmp_path, rows)
    chat = ("env.chat=true", "env.kwargs.prompt=messages", "env.kwargs.answer=null")
    more = ("algorithm.sequence_length=128", "algorithm.max_prompt_length=64")
    found = run(tmp_path, (*sft(model), *words, *chat, *more), 2)
    (first, *_) = found.metrics()
    # Each answer is a digit and its end
    assert first["actor/tokens_learned"] == 8 * 4 + 8 * 2
    assert first["env/rows_cut"] == 0


def test_rows_that_are_cut_are_counted_and_told(model: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": "1+2=", "answer": "3"},
        {"prompt": "1+2=", "answer": "3" * 60},
        {"prompt": "1+2=" * 8, "answer": "3"},
    ]
    words = (
        *sft(model, "algorithm.prompts=3", "algorithm.sequence_length=24"),
        *written(tmp_path, rows),
    )
    found = run(tmp_path, words, 1)
    (line,) = found.metrics()
    assert line["env/rows"] == 3
    assert line["env/rows_cut"] == 2
    assert line["env/rows_unlearned"] == 1
    said = "2 of 3 rows are cut at 24 tokens, and nothing is learned of 1"
    assert said in " ".join(found.out.split())
    masked = run(tmp_path / "masked", (*words, "algorithm.truncated=mask"), 1)
    assert masked.metrics()[0]["env/rows_unlearned"] == 2


def told(words: tuple[str, ...]) -> dict[str, str]:
    """Return key -> what a start says of a wrong job."""
    with pytest.raises(ProblemsError) as caught:
        rlplace.plan(CONFIG, words)
    return {problem.key: problem.render() for problem in caught.value.problems}


@pytest.mark.parametrize("component", ["rollout", "critic", "reference", "teacher"])
def test_components_that_would_never_work_are_told(model: Path, component: str) -> None:
    key = f"cluster.component_placement.{component}"
    said = told((*sft(model), f"+{key}=0"))[key]
    assert "would never work" in said
    assert f"~{key}" in said


@pytest.mark.parametrize(
    ("word", "usual"),
    [
        ("algorithm.samples_per_prompt=8", "algorithm.samples_per_prompt=1"),
        ("algorithm.kl_coef=0.1", "algorithm.kl_coef=0.0"),
        ("algorithm.max_staleness=1", "algorithm.max_staleness=0"),
        ("critic.on_actor=true", "critic.on_actor=false"),
    ],
)
def test_keys_without_effect_are_told(model: Path, word: str, usual: str) -> None:
    key = word.partition("=")[0]
    said = told((*sft(model), f"+{word}"))[key]
    assert "no effect in sft" in said
    assert usual in said
    rlplace.plan(CONFIG, (*sft(model), f"+{usual}"))


@pytest.mark.parametrize(
    ("rows", "more", "text"),
    [
        ([{"prompt": MESSAGES[:1]}], ("+env.kwargs.answer=null",), "a row has no answer"),
        ([{"prompt": MESSAGES[1:]}], ("+env.kwargs.answer=null",), "begins with an answer"),
        ([{"prompt": "1+2?", "answer": "3" * 9}], ("algorithm.sequence_length=2",), "nothing is learned of any row"),
    ],
)  # fmt: skip
def test_rows_from_which_nothing_is_learned_are_told(
    rows: list[dict[str, Any]],
    more: tuple[str, ...],
    text: str,
    model: Path,
    tmp_path: Path,
) -> None:
    words = (*sft(model), *written(tmp_path, rows), *more)
    found = train(CONFIG, tmp_path / "run", *words)
    assert found.code == 2
    assert text in found.err


def test_a_task_of_conversations_is_told(model: Path, tmp_path: Path) -> None:
    words = (*sft(model), "env.task=guess_number", "env.kwargs={}")
    found = train(CONFIG, tmp_path, *words)
    assert found.code == 2
    assert "has no written answers" in found.err

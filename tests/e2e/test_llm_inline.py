"""Whole runs that train a language model, in threads of one process: what they learn, leave and refuse."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlplace.cli import train as command
from rlplace.models.checkpoint import Checkpoint
from tests.e2e.language import INLINE, seeing, tiny
from tests.e2e.training import train
from tests.pages import write_own_engine
from tests.tiny_lm import tiny_model
from tests.tiny_vlm import coloured_squares, tiny_vlm


def test_a_run_learns_and_leaves_a_model_that_others_can_load(
    model: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    asked = (
        "runner.total_iterations=16",
        "runner.eval_every=8",
        "runner.eval_prompts=4",
    )
    run = train("hybrid_grpo_llm", tmp_path, *INLINE, *tiny(model), *asked)
    assert run.code == 0, run.err
    lines, summary = run.metrics(), run.summary()
    assert lines[-1]["actor/reward"] > lines[1]["actor/reward"] + 0.3
    evaluated = [line["iteration"] for line in lines if "eval/reward" in line]
    assert evaluated == [0, 8, 16]
    assert list(summary["evaluations"]) == ["0", "8", "16"]
    assert summary["eval_last"] > summary["eval_first"]
    assert "held out" in run.out
    assert [line["iteration"] for line in lines] == list(range(17))
    assert lines[0]["policy/version"] == 0
    for line in lines[
        1:
    ]:  # the tokens trained are the tokens sampled, by the weights that are about to learn
        assert line["actor/tokens_learned"] == line["rollout/tokens"]
        assert line["actor/age_max"] == 0
        assert line["actor/mismatch_max"] < 1e-3
    memory = summary["memory"]
    assert set(memory) == {"actor", "env", "rollout"}
    for component, rows in memory.items():
        for residency, size in rows.items():
            assert size["measured"] == pytest.approx(size["predicted"], rel=0.05), (
                component,
                residency,
            )
    assert run.folder is not None
    files = {path.name for path in run.folder.iterdir()}
    assert {
        "policy",
        "summary.json",
        "memory.json",
        "metrics.jsonl",
        "plan.json",
        "config.yaml",
    } <= files
    trained = AutoModelForCausalLM.from_pretrained(run.folder / "policy").state_dict()
    first = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert trained.keys() == first.keys()
    assert any(not np.array_equal(trained[name], first[name]) for name in first)
    assert AutoTokenizer.from_pretrained(run.folder / "policy").chat_template


@pytest.mark.slow
def test_a_model_that_sees_learns_to_name_colours(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    model, squares = (
        tiny_vlm(tmp_path / "model"),
        coloured_squares(tmp_path / "squares"),
    )
    run = train(
        "hybrid_grpo_llm",
        tmp_path / "runs",
        *INLINE,
        *seeing(model, squares),
        "runner.total_iterations=20",
    )
    assert run.code == 0, run.err
    lines = run.metrics()
    assert (
        lines[-1]["actor/reward"] > 0.6 > 0.2 > lines[0]["actor/reward"]
    )  # a colour without looking is right in a third
    for line in lines:  # engine and actor were given the same tokens and images
        assert line["actor/mismatch_max"] < 1e-4
        assert line["sync/verify_max_diff"] < 1e-4
    for component, rows in run.summary()["memory"].items():
        for residency, size in rows.items():
            assert size["measured"] == pytest.approx(size["predicted"], rel=0.05), (
                component,
                residency,
            )
    assert run.folder is not None
    trained, first = (
        AutoModelForImageTextToText.from_pretrained(of).state_dict()
        for of in (run.folder / "policy", model)
    )
    assert trained.keys() == first.keys()
    tower = [name for name in first if ".visual." in name]
    assert any(not np.array_equal(trained[name], first[name]) for name in tower)
    assert (run.folder / "policy" / "preprocessor_config.json").is_file()


@pytest.mark.parametrize(
    "engine",
    ["transformers", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow])],
)
def test_a_mixture_of_experts_learns(engine: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_model(tmp_path / "experts", "qwen3_moe")
    run = train(
        "hybrid_grpo_llm",
        tmp_path,
        *INLINE,
        *tiny(model, engine),
        "runner.total_iterations=2",
    )
    assert run.code == 0, run.err
    assert all(
        line["actor/mismatch_max"] < 1e-3 for line in run.metrics()
    )  # the engine has what the actor sent
    for component, rows in run.summary()["memory"].items():
        for residency, size in rows.items():
            assert size["measured"] == pytest.approx(size["predicted"], rel=0.05), (
                component,
                residency,
            )
    assert run.folder is not None
    trained, first = (
        AutoModelForCausalLM.from_pretrained(of).state_dict()
        for of in (run.folder / "policy", model)
    )
    name = "model.layers.1.mlp.experts.down_proj"
    assert trained[name].shape == first[name].shape == (4, 64, 64)
    assert not np.array_equal(trained[name], first[name])
    stored = Checkpoint(run.folder / "policy").names
    assert (
        stored == Checkpoint(model).names
    )  # those of single experts, as engines and others read them
    assert name.replace("down_proj", "3.down_proj.weight") in stored


@pytest.mark.slow
def test_an_engine_of_ones_own_generates(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that docs/own_engine.md shows, by its name."""
    monkeypatch.syspath_prepend(write_own_engine(tmp_path))
    asked = (
        "runner.total_iterations=3",
        "actor.sync.verify=logprobs",
        "actor.sync.verify_every=1",
    )
    run = train(
        "hybrid_grpo_llm",
        tmp_path,
        *INLINE,
        *tiny(model, "plain_engine:PlainEngine"),
        *asked,
    )
    assert run.code == 0, run.err
    lines = run.metrics()
    assert len({line["actor/reward"] for line in lines}) > 1
    for line in lines:
        assert line["actor/tokens_learned"] == line["rollout/tokens"]
        assert max(line["actor/mismatch_max"], line["sync/verify_max_diff"]) < 1e-3
    for residency, size in run.summary()["memory"]["rollout"].items():
        assert size["measured"] == pytest.approx(size["predicted"], rel=0.05), residency


def test_a_conversation_learns_only_what_the_model_said(
    model: Path, tmp_path: Path
) -> None:
    asked = (
        "runner.total_iterations=2",
        "env.task=tests.e2e.text_tasks:Twice",
        "algorithm.sequence_length=200",
    )
    # An answer that is cut ends the conversation; of so many long ones, some end by themselves.
    many = (
        "algorithm.samples_per_prompt=16",
        "algorithm.max_new_tokens=48",
        "rollout.seed=0",
    )
    run = train("hybrid_llm_multiturn", tmp_path, *INLINE, *tiny(model), *asked, *many)
    assert run.code == 0, run.err
    for line in run.metrics():
        assert (
            line["actor/tokens_learned"]
            == line["rollout/tokens"]
            < line["actor/tokens"]
        )
        assert 1 < line["actor/turns"] < 2


@pytest.mark.parametrize(
    ("override", "code", "status"),
    [
        ("algorithm.max_prompt_length=4", "long-prompts", 2),
        ("rollout.kv_cache_memory=9GiB", "does-not-fit", 3),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    model: Path,
    override: str,
    code: str,
    status: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The other codes are tested with the checks that report them."""
    assert (
        command.main(["--config-name", "hybrid_grpo_llm", *tiny(model), override])
        == status
    )
    error = capsys.readouterr().err
    assert f"[{code}]" in error
    assert "nothing was started" in error or status == 3

"""LoRA factors as adapters of the library peft: at every save of a run, in an export, and as the start of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlplace.cli.export import main
from rlplace.config.read import read_config
from rlplace.errors import ConfigError
from rlplace.jobs.language_model.folders import with_folder
from rlplace.models.causal_lm import CausalLm, LmSpec, build
from rlplace.models.lora import first_values, is_factor
from rlplace.models.packed import Packed
from rlplace.placement.schedule import Residency
from rlplace.workers.training.ranks import Ranks
from tests.contract.test_export import commit, files, text_job
from tests.lm_ranks import (
    ADAM,
    LmScenario,
    everything,
    iterate,
    made_up_samples,
    make_lm_worker,
    run_lm_ranks,
)
from tests.reference_rlhf import Rules, adamw, assert_same, grpo_step
from tests.tiny_lm import tiny_model
from tests.worker_ranks import context_of, in_processes, listen, rendezvous_at

TOKENS = torch.arange(40, 60)[None]
TRAINED = {"lora_rank": 3, "lora_alpha": 7.5, "optimizer": ADAM | {"lr": 0.05}}


def save_actor(
    given: tuple[Path, Path, int], rank: int, rendezvous: Any, channels: Path
) -> None:
    """One rank trains, saves its model and a checkpoint; the first rank commits the checkpoint."""
    base, out, ranks = given
    scenario = LmScenario(model=base, ranks=ranks, trained=TRAINED)
    actor = make_lm_worker(scenario, rank, rendezvous)
    try:
        iterate(actor)
        actor.save_model(str(out / "policy"))
        actor.move(Residency.OFF)
        run = out / "run"
        if rank == 0:
            job = text_job(base, actor=TRAINED)
            commit(run, "actor", ranks, actor.write_state, job)
        else:
            actor.write_state(str(run / "checkpoints" / "000003.part" / "actor"))
    finally:
        actor.close()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(TOKENS).logits
    return found


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("qwen", 1),
        pytest.param("llama", 1, marks=pytest.mark.slow),
        pytest.param("qwen", 2, marks=pytest.mark.slow),
    ],
)
def test_every_save_has_the_factors_as_peft_reads_them(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, ranks: int
) -> None:
    base: Path = request.getfixturevalue(kind)
    given = (base, tmp_path, ranks)
    if ranks == 1:
        save_actor(given, 0, rendezvous_at(listen()), tmp_path)
    else:
        in_processes(save_actor, given, ranks)
    saved = tmp_path / "policy_adapter"
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "policy"))
    plain = AutoModelForCausalLM.from_pretrained(base)
    before = logits(plain)
    by_peft = logits(PeftModel.from_pretrained(plain, saved))
    assert (by_peft - before).abs().max() > 0.01, "nothing was learned"
    torch.testing.assert_close(by_peft, merged, atol=1e-4, rtol=0)

    # Names and shapes are those that peft itself would have written
    config = LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM")
    fresh = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    fresh.save_pretrained(tmp_path / "fresh")
    weights = "adapter_model.safetensors"
    of_peft = load_file(tmp_path / "fresh" / weights)
    ours = load_file(saved / weights)
    assert {name: t.shape for name, t in ours.items()} == {
        name: t.shape for name, t in of_peft.items()
    }

    # A checkpoint and an export have the same files
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("0*")
    assert files(checkpoint / "actor" / "adapter") == files(saved)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert f"actor/adapter/{weights}" in manifest["files"]
    out = tmp_path / "exported"
    assert main([str(tmp_path / "run"), str(out), "--adapter"]) == 0
    assert files(out) == files(saved)


def test_an_export_without_factors_says_so(
    qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def save(folder: str) -> None:
        (Path(folder) / "rank_00000.json").write_text("{}")

    commit(tmp_path / "run", "actor", 1, save, text_job(qwen))
    out = tmp_path / "out"
    assert main([str(tmp_path / "run"), str(out), "--adapter"]) == 2
    assert "there are no LoRA factors" in capsys.readouterr().err
    assert not out.exists()


# ── as a start ───────────────────────────────────────────────────────────────────────────────────────────────────────


def adapter(folder: Path, base: Path, **config: Any) -> Any:
    """An adapter that peft has made and written, with random factors."""
    asked = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "down_proj"]}
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(**asked | config)
    )
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    return model


def completed(base: Path, folder: Path, **actor: object) -> Any:
    keys = {"model": {"path": str(base)}, "compute": "fp32"}
    config = read_config(
        {
            "cluster": {"component_placement": dict.fromkeys(["actor", "env"], 0)},
            "actor": {**keys, "lora_adapter": str(folder), **actor},
            "env": {"task": "arithmetic"},
        }
    )
    return with_folder(config, {})


@pytest.mark.parametrize("rslora", [False, True], ids=["plain", "rslora"])
def test_training_begins_with_the_factors_of_an_adapter(
    qwen: Path, tmp_path: Path, rslora: bool
) -> None:
    model = adapter(tmp_path / "adapter", qwen, use_rslora=rslora)
    config = completed(qwen, tmp_path / "adapter", lora_rank=4)
    actor = config.actor
    assert (actor.lora_rank, actor.lora_alpha) == (4, 24.0 if rslora else 12.0)
    assert actor.lora_targets == ("down_proj", "q_proj")
    spec = LmSpec.of(actor, "actor", 0, job_folder=qwen, own_folder=None)
    ranks = Ranks(context_of("actor", 0, 1, rendezvous_at(listen()), {}), 60.0)
    try:
        module = build(CausalLm, spec, ranks.mesh)
        stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        found = [n for n, _ in module.named_tensors() if is_factor(n)]
        assert len(found) == len(stored) == 2 * 2 * 2
        tokens = TOKENS[0].numpy()
        with torch.no_grad():
            scores = module(Packed.of([tokens], [np.arange(len(tokens)) > 0])).logprobs
    finally:
        ranks.close()
    expected = logits(model)[0, :-1].log_softmax(-1).gather(-1, TOKENS[0, 1:, None])
    torch.testing.assert_close(scores, expected[:, 0], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "whole modules beside"),
        ({"rank_pattern": {"q_proj": 2}}, "rank of their own"),
        ({"layers_to_transform": [1]}, "it has no factors for model.layers.0"),
        ({"target_modules": ["q_proj", "lm_head"]}, "for the head, lm_head"),
    ],
    ids=str,
)
def test_an_adapter_that_is_more_than_plain_factors_is_refused(
    qwen: Path, tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    adapter(tmp_path / "adapter", qwen, **config)
    with pytest.raises(ConfigError) as caught:
        completed(qwen, tmp_path / "adapter")
    assert caught.value.codes == ("unfit-adapter",)
    assert said in str(caught.value)


def test_an_adapter_of_another_model_is_refused(qwen: Path, tmp_path: Path) -> None:
    deep = tiny_model(tmp_path / "deep", "qwen3", layers=3)
    adapter(tmp_path / "of_deep", deep)
    other = tiny_model(tmp_path / "other", "qwen3", seed=9)
    adapter(tmp_path / "of_other", other)
    for name, said in (
        ("of_deep", "the model has no linear layer model.layers.2"),
        ("of_other", f"the weights of {other} are other ones"),
    ):
        with pytest.raises(ConfigError) as caught:
            completed(qwen, tmp_path / name)
        assert caught.value.codes == ("unfit-adapter",)
        assert said in str(caught.value)


def test_what_is_no_adapter_or_has_other_values_is_refused(
    qwen: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        completed(qwen, qwen)
    assert caught.value.codes == ("not-an-adapter",)
    adapter(tmp_path / "adapter", qwen)
    with pytest.raises(ConfigError, match=f"lora_adapter: {tmp_path}/adapter"):
        completed(qwen, tmp_path / "adaptr")
    with pytest.raises(ConfigError, match="lora_rank: 4"):
        completed(qwen, tmp_path / "adapter", lora_rank=8)


# ── learning ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4], ids=["one copy", "two copies"])
def test_ranks_that_split_tokens_train_factors_as_a_padded_loop_does(
    qwen: Path, ranks: int
) -> None:
    """Two ranks have the tokens of a copy between them, and sum the gradients of several micro-batches."""
    trained = {"lora_rank": 3, "token_budget": 12, "optimizer": ADAM | {"lr": 1e-2}}
    iterations = 2
    scenario = LmScenario(
        model=qwen,
        ranks=ranks,
        context_parallel=2,
        iterations=iterations,
        trained=trained,
    )
    tokens = sum(len(sample.tokens) for sample in everything(0))
    assert tokens > 2 * ranks * 12, "one micro-batch of each copy is enough"
    outcomes = run_lm_ranks(scenario)

    config = LoraConfig(r=3, lora_alpha=16, target_modules="all-linear")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(qwen), config)
    first = []
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            own = name.removeprefix("base_model.model.")
            first.append(weight)
            with torch.no_grad():
                weight.copy_(first_values(own, tuple(weight.shape), seed=7))
    optimizer = adamw(first, trained["optimizer"])
    for iteration in range(iterations):
        samples = [
            sample
            for group in made_up_samples(iteration, version=iteration)
            for sample in group
        ]
        loss, norm = grpo_step(model, optimizer, samples, Rules())
        for outcome in outcomes[:1]:
            metrics = outcome.metrics[iteration]
            assert metrics["actor/loss"].value == pytest.approx(loss, rel=1e-3)
            assert metrics["actor/grad_norm"].value == pytest.approx(norm, rel=1e-3)
    merged = model.merge_and_unload()
    before = AutoModelForCausalLM.from_pretrained(qwen).state_dict()
    learned = {n: w for n, w in merged.state_dict().items() if n in before}
    moves = [
        float((weight - before[name]).abs().max()) for name, weight in learned.items()
    ]
    assert max(moves) > 5e-3, "nothing was learned"
    for outcome in outcomes:
        found = {n: torch.from_numpy(w) for n, w in outcome.weights.items()}
        assert_same(found, learned)

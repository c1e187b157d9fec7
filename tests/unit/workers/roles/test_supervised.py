"""An update on written answers: that of one padded batch, however rows are packed, accumulated and dealt to ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.lm_ranks import ADAM
from tests.sft_ranks import SftOutcome, SftScenario, rows, run_sft_ranks
from tests.tiny_lm import PAD, tiny_model

IGNORED = -100  # label of a token that transformers does not learn
CLOSE = {"rtol": 0, "atol": 1e-5}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def padded() -> dict[str, torch.Tensor]:
    """All rows as one batch, as transformers takes them."""
    longest = max(len(row.tokens) for row in rows())
    batch: dict[str, list[Any]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for row in rows():
        more = longest - len(row.tokens)
        ones = np.ones(len(row.tokens), int)
        labels = np.where(row.mask, row.tokens, IGNORED)
        batch["input_ids"].append(np.pad(row.tokens, (0, more), constant_values=PAD))
        batch["attention_mask"].append(np.pad(ones, (0, more)))
        batch["labels"].append(np.pad(labels, (0, more), constant_values=IGNORED))
    return {
        name: torch.tensor(np.stack(values)).long() for name, values in batch.items()
    }


@pytest.fixture(scope="module")
def expected(model: Path) -> tuple[dict[str, np.ndarray], float]:
    """The weights behind one step by transformers and torch alone, and its loss."""
    lm = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loss = lm(**padded()).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(lm.parameters(), ADAM["max_grad_norm"])
    adam = torch.optim.AdamW(
        lm.parameters(), lr=ADAM["lr"], eps=ADAM["eps"], weight_decay=0.0
    )
    adam.step()
    weights = {name: p.detach().numpy() for name, p in lm.named_parameters()}
    return weights, loss.item()


def check(outcomes: list[SftOutcome], expected: tuple[dict[str, Any], float]) -> None:
    weights, loss = expected
    for outcome in outcomes:
        assert outcome.weights.keys() == weights.keys()
        for name, tensor in outcome.weights.items():
            np.testing.assert_allclose(tensor, weights[name], **CLOSE, err_msg=name)
        assert outcome.learned["actor/loss"].value == pytest.approx(loss, abs=1e-5)
        assert outcome.held_out["eval/loss"].value == pytest.approx(loss, abs=1e-5)


def test_an_update_is_that_of_one_padded_batch(
    model: Path, expected: tuple[dict[str, Any], float]
) -> None:
    check(run_sft_ranks(SftScenario(model=model)), expected)


def test_accumulation_over_micro_batches_weighs_all_tokens_equally(
    model: Path, expected: tuple[dict[str, Any], float]
) -> None:
    # About one row in each micro-batch: the mean of their means would be another loss
    small = {"token_budget": 12}
    check(run_sft_ranks(SftScenario(model=model, trained=small)), expected)


@pytest.mark.parametrize("budget", [16, pytest.param(8192, marks=pytest.mark.slow)])
def test_two_ranks_make_the_update_of_one(
    model: Path, budget: int, expected: tuple[dict[str, Any], float]
) -> None:
    trained = {"token_budget": budget}
    check(run_sft_ranks(SftScenario(model=model, ranks=2, trained=trained)), expected)


@pytest.mark.slow
def test_the_mean_of_the_means_would_be_seen(
    expected: tuple[dict[str, Any], float], model: Path
) -> None:
    """The rows are uneven enough: a loss by rows is another one."""
    algorithm = {"loss": "sequence"}
    (outcome,) = run_sft_ranks(SftScenario(model=model, algorithm=algorithm))
    weights, _ = expected
    name = "lm_head.weight"
    assert np.abs(outcome.weights[name] - weights[name]).max() > 1e-4


def test_an_evaluation_counts_rows_that_a_greedy_engine_would_write(
    model: Path, expected: tuple[dict[str, Any], float]
) -> None:
    lm = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    batch = padded()
    with torch.no_grad():
        best = lm(batch["input_ids"], batch["attention_mask"]).logits.argmax(dim=-1)
    labels = batch["labels"][:, 1:]
    learned = labels != IGNORED
    right = (best[:, :-1] == labels) & learned
    (outcome,) = run_sft_ranks(SftScenario(model=model))
    share = float(right.sum() / learned.sum())
    assert outcome.held_out["eval/token_accuracy"].value == pytest.approx(share)
    # The row of which nothing is learned does not count
    assert outcome.held_out["eval/accuracy"].weight == len(rows()) - 1


@pytest.mark.slow
def test_an_update_is_that_of_trl(
    model: Path, expected: tuple[dict[str, Any], float], tmp_path: Path
) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    # TRL has no rows without a learned token
    learned = [row for row in rows() if row.mask.any()]
    data = datasets.Dataset.from_list(
        [
            {
                "input_ids": row.tokens.tolist(),
                "completion_mask": row.mask.astype(int).tolist(),
            }
            for row in learned
        ]
    )
    settings = trl.SFTConfig(
        output_dir=str(tmp_path),
        max_steps=1,
        # Two micro-batches of an uneven number of tokens
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=ADAM["lr"],
        adam_epsilon=ADAM["eps"],
        max_grad_norm=ADAM["max_grad_norm"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        completion_only_loss=True,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    lm = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    trainer = trl.SFTTrainer(
        lm, args=settings, train_dataset=data, processing_class=tokenizer
    )
    trainer.train()
    weights, _ = expected
    for name, parameter in trainer.model.named_parameters():
        np.testing.assert_allclose(
            parameter.detach().numpy(), weights[name], **CLOSE, err_msg=name
        )

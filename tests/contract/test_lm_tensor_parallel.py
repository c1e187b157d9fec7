"""Ranks with a model or tokens between them make the update of one; state and saved model are those of one."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlplace.models.causal_lm import CausalLm, LmSpec
from rlplace.models.lora import LoraSpec
from rlplace.models.saved_lm import write_lm
from rlplace.workers.arguments import WEIGHTS
from rlplace.workers.worker import Rendezvous
from tests.contract.test_lm_ranks import QUICK, check_update_of_one
from tests.lm_ranks import LmScenario, Outcome, iterate, make_lm_worker, run_lm_ranks
from tests.tiny_lm import tiny_model
from tests.worker_ranks import Session, in_processes, spec_of

# By name: the model, ranks, how many of these have a copy between them, and copies the tokens, what they learn.
SCENARIOS: dict[str, tuple[str, int, tuple[int, int], LmScenario]] = {
    "norms of heads": ("qwen", 2, (2, 1), LmScenario(model=Path())),
    "two copies, tied, several steps": (
        "llama",
        4,
        (2, 1),
        LmScenario(
            model=Path(),
            algorithm={
                "tis_cap": 1.5,
                "epochs": 2,
                "train_batch": 5,
                "entropy_coef": 0.01,
            },
            trained={"zero_stage": 2},
        ),
    ),
    "factors, merged": (
        "qwen",
        2,
        (2, 1),
        LmScenario(model=Path(), trained={"lora_rank": 3, "optimizer": QUICK}),
    ),
    "two copies, factors apart": (
        "qwen",
        4,
        (2, 1),
        LmScenario(
            model=Path(),
            algorithm={"kl_coef": 0.1, "train_batch": 5},
            trained={"lora_rank": 3, "optimizer": QUICK, "sync": {"mode": "lora"}},
            reference={"share_actor": True},
        ),
    ),
    "critic, nothing recomputed": (
        "llama",
        2,
        (2, 1),
        LmScenario(model=Path(), component="critic", trained={"checkpointing": False}),
    ),
    "tokens, several steps and rows of a sequence": (
        "qwen",
        2,
        (1, 2),
        LmScenario(
            model=Path(),
            algorithm={
                "tis_cap": 1.5,
                "epochs": 2,
                "train_batch": 5,
                "entropy_coef": 0.01,
                "ratio": "sequence",
            },
        ),
    ),
    "tokens and weights, factors": (
        "llama",
        4,
        (2, 2),
        LmScenario(
            model=Path(),
            algorithm={"kl_coef": 0.1, "train_batch": 5},
            trained={"lora_rank": 3, "optimizer": QUICK},
            reference={"share_actor": True},
        ),
    ),
    "tokens of two copies, critic": (
        "llama",
        4,
        (1, 2),
        LmScenario(model=Path(), component="critic", trained={"zero_stage": 2}),
    ),
}

SLOW = {
    "two copies, factors apart",
    "norms of heads",
    "two copies, tied, several steps",
    "factors, merged",
    "critic, nothing recomputed",
    "tokens, several steps and rows of a sequence",
    "tokens of two copies, critic",
}


@functools.cache
def outcomes(
    folder: Path, name: str, ranks: int, weights: int, tokens: int
) -> list[Outcome]:
    cut = {"ranks": ranks, "tensor_parallel": weights, "context_parallel": tokens}
    return run_lm_ranks(
        dataclasses.replace(SCENARIOS[name][3], model=folder, iterations=2, **cut)
    )


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in SCENARIOS],
)
def test_ranks_of_a_copy_make_the_update_of_one(
    request: pytest.FixtureRequest, name: str
) -> None:
    model, ranks, within, scenario = SCENARIOS[name]
    folder: Path = request.getfixturevalue(model)
    check_update_of_one(
        outcomes(folder, name, ranks, *within),
        outcomes(folder, name, 1, 1, 1),
        scenario.component,
    )


FACTORS = {"lora_rank": 3, "optimizer": QUICK}


@pytest.mark.parametrize(
    "trained",
    [{}, pytest.param(FACTORS, marks=pytest.mark.slow)],
    ids=["all weights", "factors"],
)
def test_a_state_goes_on_however_its_model_is_cut(
    qwen: Path, tmp_path: Path, trained: dict[str, Any]
) -> None:
    chain = ((4, 2), (1, 1), (2, 2))  # ranks, and of each copy
    scenario = LmScenario(model=qwen, trained=trained, iterations=len(chain))
    (expected,), load = run_lm_ranks(scenario), None
    for index, (ranks, within) in enumerate(chain):
        folder = tmp_path / str(index)
        folder.mkdir()
        session = Session(first=index, load=load, save=folder, save_after=index + 1)
        cut = {"ranks": ranks, "tensor_parallel": within, "iterations": index + 1}
        outcomes, load = (
            run_lm_ranks(dataclasses.replace(scenario, **cut, session=session)),
            folder,
        )
    for name, weight in expected.weights.items():
        np.testing.assert_allclose(
            outcomes[0].weights[name], weight, rtol=2e-4, atol=4e-5, err_msg=name
        )


def _save_rank(
    scenario: LmScenario, rank: int, rendezvous: Rendezvous, folder: Path
) -> None:
    worker = make_lm_worker(scenario, rank, rendezvous, folder=folder)
    iterate(worker)
    worker.save_model(str(scenario.model.parent / "saved"))
    worker.write_state(str(scenario.model.parent))
    worker.close()


def test_a_saved_model_and_an_exported_one_are_that_of_one_rank(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    scenario = LmScenario(model=folder, ranks=4, tensor_parallel=2, trained=FACTORS)
    in_processes(_save_rank, scenario, 4, channels=(spec_of(WEIGHTS),))
    (alone,) = run_lm_ranks(
        dataclasses.replace(scenario, ranks=1, tensor_parallel=1, iterations=1)
    )
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    for name, weight in alone.weights.items():
        np.testing.assert_allclose(
            saved[name], weight, rtol=1e-4, atol=2e-5, err_msg=name
        )
    spec = LmSpec(
        folder=folder, lora=LoraSpec(rank=3, alpha=scenario.job.config.actor.lora_alpha)
    )
    write_lm(tmp_path, tmp_path / "exported", spec, CausalLm, average=False)
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in saved.items())

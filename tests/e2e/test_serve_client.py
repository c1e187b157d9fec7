"""The published client `tinker`, unchanged, trains and samples by a training API of processes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import tinker

from rlplace.models.tokenizer import Tokenizer
from tests.e2e.serving import KEY, run_with

pytestmark = pytest.mark.slow

LORA = ("actor.lora_rank=8", "actor.lora_alpha=16")
REINFORCED = 20
RAY = ("cluster.launcher=ray",)
TWO_RANKS = (
    *RAY,
    "cluster.component_placement.actor=0-1",
    "cluster.component_placement.rollout=1",
    "cluster.accelerator.emulated_per_node=2",
    "actor.enable_offload=true",
    "rollout.enable_offload=true",
)


def made(future: Any) -> Any:
    return future.result() if hasattr(future, "result") else future


def datum(prompt: list[int], answer: list[int], **inputs: list[float]) -> Any:
    """A datum whose inputs are given for the tokens of the answer; they are 0 for the prompt."""
    tokens = [*prompt, *answer]
    zeros = [0.0] * (len(prompt) - 1)
    given = {name: [*zeros, *values] for name, values in inputs.items()}
    return tinker.types.Datum(
        model_input=tinker.types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], **given},
    )


def problems(
    tokenizer: Tokenizer, count: int, seed: int
) -> list[tuple[list[int], list[int]]]:
    """Sums of two digits below 5, and the tokens of their results."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        a = draw.randrange(5)
        b = draw.randrange(5)
        prompt = tokenizer.encode(f"{a}+{b}=").tolist()
        found.append((prompt, tokenizer.encode(str(a + b)).tolist()))
    return found


@pytest.mark.parametrize(
    ("placement", "supervised"),
    # Few enough supervised steps that a reward can still rise
    [((), 10), ((*TWO_RANKS, *LORA), 20)],
    ids=["inline", "two-ranks-lora"],
)
def test_supervised_and_reinforced_loops_learn(
    placement: tuple[str, ...],
    supervised: int,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    types = tinker.types
    tokenizer = Tokenizer.load(model)

    def client(url: str) -> tuple[list[float], list[float]]:
        service = tinker.ServiceClient(base_url=url, api_key=KEY)
        training = service.create_lora_training_client(
            base_model="a-model", rank=8
        ).result()
        losses = []
        for step in range(supervised):
            rows = problems(tokenizer, 16, step)
            weight = 1 / sum(len(answer) for _, answer in rows)
            data = [datum(p, a, weights=[weight] * len(a)) for p, a in rows]
            passed = training.forward_backward(data, "cross_entropy")
            stepped = training.optim_step(types.AdamParams(learning_rate=1e-2))
            losses.append(passed.result().metrics["loss:sum"])
            stepped.result()
        rewards = []
        for step in range(REINFORCED):
            sampler = training.save_weights_and_get_sampling_client().result()
            rows = problems(tokenizer, 16, 100 + step)
            parameters = types.SamplingParams(max_tokens=1, temperature=1.0)
            asked = [
                sampler.sample(types.ModelInput.from_ints(prompt), 8, parameters)
                for prompt, _ in rows
            ]
            data = []
            total = 0.0
            for (prompt, answer), future in zip(rows, asked, strict=True):
                sequences = future.result().sequences
                scores = [float(s.tokens[0] == answer[0]) for s in sequences]
                mean = sum(scores) / len(scores)
                total += mean
                for sequence, score in zip(sequences, scores, strict=True):
                    inputs = {
                        "logprobs": sequence.logprobs,
                        "advantages": [score - mean],
                    }
                    data.append(datum(prompt, sequence.tokens, **inputs))
            rewards.append(total / len(rows))
            passed = training.forward_backward(data, "importance_sampling")
            stepped = training.optim_step(types.AdamParams(learning_rate=3e-3))
            passed.result()
            stepped.result()
        saved = training.save_state("last").result()
        again = made(
            service.create_training_client_from_state_with_optimizer(saved.path)
        )
        data = [
            datum(p, a, weights=[1.0] * len(a)) for p, a in problems(tokenizer, 8, 7)
        ]
        one = training.forward(data, "cross_entropy").result().metrics["loss:sum"]
        two = again.forward(data, "cross_entropy").result().metrics["loss:sum"]
        assert one == pytest.approx(two, rel=1e-5)
        return losses, rewards

    losses, rewards = run_with(
        model, tmp_path, client, *placement, monkeypatch=monkeypatch
    )
    assert losses[-1] < 0.5 * losses[0]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3

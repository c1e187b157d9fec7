"""How far engine and actor are apart in bf16 on a tiny mixture of experts, with and without the engine's experts.

    PYTHONPATH=. .venv/bin/python benchmarks/router_replay.py

The transformers engine samples answers in bf16, token by token, and records the experts of each token. The same model
in bf16 then scores them as the actor does, in packed passes: once with its own choice of experts, once with those that
were recorded. Weights are random, and equal on both sides. The last line says how far bf16 without experts is apart: a
dense model of the same sizes.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor

from rlplace.algo.kl import mismatch_metrics
from rlplace.config.blocks.language_model import TextRolloutConfig
from rlplace.models.causal_lm import CausalLm, FrozenLm
from rlplace.models.packed import Packed
from rlplace.placement.schedule import Residency
from rlplace.tokens import Completion, Episode, Request, Sample
from rlplace.workers.engines.contract import EngineSettings
from rlplace.workers.engines.transformers import TransformersEngine
from tests.rollout_stage import Ledger

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 8, 8, 24, 48
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 64}


class Measured(NamedTuple):
    """`mean`, `largest`: differences of log-probabilities of a token. `kl`: by the estimator k3. `moved`: share of
    (token, layer) pairs that the actor itself would send to another set of experts; None: a dense model.
    """

    mean: float
    largest: float
    kl: float
    moved: float | None


def make_model(folder: Path, family: str, seed: int) -> dict[str, Tensor]:
    keys = EXPERTS if family == "qwen3_moe" else {}
    config = transformers.AutoConfig.for_model(family, **SIZES, **keys)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return dict(model.named_parameters(remove_duplicate=False))


def sampled(folder: Path, weights: dict[str, Tensor], *, routes: bool) -> list[Sample]:
    """Answers of the engine as samples, a group after the other."""
    rollout = TextRolloutConfig(
        engine="transformers",
        dtype="bf16",
        seed=1,
        kv_cache_memory=1 << 28,
        step_sequences=PROMPTS * SAMPLES,
    )
    settings = EngineSettings(
        rollout=rollout,
        model=folder,
        context=PROMPT_TOKENS + NEW_TOKENS,
        routes=routes,
    )
    engine = TransformersEngine(settings, device=Ledger(), owner="rollout rank 0")
    engine.move(Residency.WEIGHTS)
    engine.load(weights, 0)
    engine.move(Residency.FULL)
    prompts = np.random.default_rng(0).integers(2, 512, (PROMPTS, PROMPT_TOKENS))
    for group, prompt in enumerate(prompts.astype(np.int32)):
        engine.submit(
            Request(
                env_rank=0,
                iteration=0,
                group=group,
                first_sample=0,
                samples=SAMPLES,
                turn=0,
                tokens=prompt,
                max_new_tokens=NEW_TOKENS,
            )
        )
    answers: list[Completion] = []
    while engine.in_flight:
        answers += engine.step()
    samples = []
    for answer in sorted(answers, key=lambda a: (a.group, a.sample)):
        prompt = prompts[answer.group].astype(np.int32)
        episode = Episode(group=answer.group, sample=answer.sample, prompt=prompt)
        episode.answered(answer)
        samples.append(episode.finish({}, {}))
    return samples


def measured(folder: Path, samples: Sequence[Sample], *, replay: bool) -> Measured:
    module = FrozenLm(CausalLm, folder, "bf16", None, torch.device("cpu")).module
    by_actor = []
    moved = list[Tensor]()
    for group in range(PROMPTS):
        members = [sample for sample in samples if sample.group == group]
        packed = Packed.of(
            [s.tokens for s in members],
            [s.mask for s in members],
            alike=[(group, PROMPT_TOKENS)] * len(members),
            routes=[s.routes for s in members],
        )
        given = packed if replay else dataclasses.replace(packed, routes=None)
        with torch.no_grad(), module.routers.recorded() as chosen:
            by_actor.append(module(given).logprobs)
        if chosen and not replay and packed.routes is not None:
            routes = packed.routes.long().sort(-1).values
            own = torch.stack(chosen, 1).sort(-1).values
            known = routes[..., 0] >= 0
            moved.append((own != routes).any(-1)[known])
    by_engine = torch.tensor(np.concatenate([s.logprobs[s.mask] for s in samples]))
    everything = torch.ones(len(by_engine), dtype=torch.bool)
    found = mismatch_metrics(torch.cat(by_actor), by_engine, everything, ~everything)
    share = float(torch.cat(moved).double().mean()) if moved else None
    return Measured(
        mean=found["actor/mismatch"].value,
        largest=found["actor/mismatch_max"].value,
        kl=found["actor/mismatch_kl"].value,
        moved=share,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    seed = parser.parse_args().seed
    print(
        f"{'experts of the actor':24} {'mismatch':>9} {'largest':>8} {'KL':>9}  moved"
    )
    for family, replays in (("qwen3_moe", (False, True)), ("qwen3", (False,))):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            has_experts = family == "qwen3_moe"
            weights = make_model(folder, family, seed)
            samples = sampled(folder, weights, routes=has_experts)
            for replay in replays:
                row = measured(folder, samples, replay=replay)
                title = "as recorded" if replay else "its own"
                if not has_experts:
                    title = "none: a dense model"
                moved = "" if row.moved is None else f"{row.moved:.2%}"
                print(
                    f"{title:24} {row.mean:9.5f} {row.largest:8.4f} {row.kl:9.2e}  {moved}"
                )


if __name__ == "__main__":
    main()

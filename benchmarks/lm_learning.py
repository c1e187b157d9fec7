"""How fast the actor learns from an iteration's samples, against a plain loop of transformers over padded batches.

    python benchmarks/lm_learning.py [--layers 3] [--samples 16] [--answers 4] [--repeat 3]

All make the same update: one step on the same samples, in float32 on one thread, within the same tokens per
micro-batch; the actor with prompts computed once for the answers to them, and with each sample by itself. Seconds are
the processor's own, so that a busy machine disturbs less. The model has the shape of SmolLM2-135M with fewer layers and
random weights: with few of them, the head takes most of the time. A token counts once, padding does not.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1]))

from rlplace.config.blocks.language_model import LanguageModelJobConfig
from rlplace.config.read import read_config
from rlplace.models.causal_lm import LmSpec
from rlplace.placement.memory.model import read_model
from rlplace.tokens import Sample
from rlplace.workers.arguments import TextArguments
from rlplace.workers.training.experience import AdvantageEstimator
from rlplace.workers.training.lm_learner import ActorLearner
from rlplace.workers.training.optimizer import Trainer
from rlplace.workers.training.ranks import Ranks
from rlplace.workers.training.trained_model import TrainedLm
from tests.worker_ranks import context_of, listen, rendezvous_at

BUDGET = 1024  # tokens of a micro-batch


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--answers", type=int, default=4, help="samples of one prompt")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--checkpointing", action="store_true", help="in all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    groups = made_up(options.samples, options.answers)
    samples = [sample for group in groups for sample in group]
    tokens = sum(sample.weight for sample in samples)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), options.layers)
        if options.checkpointing:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
        configs = [
            config_of(Path(folder), groups, share_prompts=share)
            for share in (True, False)
        ]
        ranks = Ranks(
            context_of("actor", 0, 1, rendezvous_at(listen()), {}), timeout_s=120.0
        )
        learners = [
            make_learner(config, Path(folder), ranks, options.checkpointing)
            for config in configs
        ]
        estimator = AdvantageEstimator(
            TextArguments(config=configs[0], ranks={"actor": 1, "env": 1, "rollout": 1})
        )
        seconds: list[list[float]] = [
            [],
            [],
            [],
        ]  # of the plain loop, with shared prompts, without
        for _ in range(options.repeat + 1):  # the first warms up
            began = time.process_time()
            plain_step(model.train(), optimizer, samples)
            seconds[0].append(time.process_time() - began)
            for learner, taken in zip(learners, seconds[1:], strict=True):
                began = time.process_time()
                learned = estimator(groups, {}, {})
                (shard,) = learner.shards(learned.groups, 0, targets=learned.targets)
                learner.learn(shard, 0)
                taken.append(time.process_time() - began)
        ranks.close()
    plain, together, apart = (tokens / min(taken[1:]) for taken in seconds)
    print(
        f"{len(samples)} samples, {tokens} tokens, {sum(s.response_tokens for s in samples)} of them learned"
    )
    print(f"plain loop           {plain:8.1f} tokens/s")
    print(f"actor                {together:8.1f} tokens/s    {together / plain:.2f} x")
    print(f"share_prompts=false  {apart:8.1f} tokens/s    {apart / plain:.2f} x")


def made_up(samples: int, answers: int = 4) -> list[tuple[Sample, ...]]:
    """Groups of answers of 8 to 200 tokens to prompts of 30 to 80."""
    rng = np.random.default_rng(0)
    groups = []
    for group in range(samples // answers):
        prompt = rng.integers(0, 49152, rng.integers(30, 80))
        groups.append(
            tuple(answer(rng, group, number, prompt) for number in range(answers))
        )
    return groups


def answer(
    rng: np.random.Generator, group: int, number: int, prompt: np.ndarray
) -> Sample:
    length = int(rng.integers(8, 200))
    mask = np.arange(len(prompt) + length) >= len(prompt)
    reward = float(rng.integers(0, 2))
    return Sample(
        group=group,
        sample=number,
        tokens=np.concatenate([prompt, rng.integers(0, 49152, length)]).astype(
            np.int32
        ),
        mask=mask,
        logprobs=np.where(mask, -10.8, 0.0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        reward=reward,
        rewards={"made up": reward},
        turns=1,
        truncated=False,
    )


def write_model(folder: Path, layers: int) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        dtype="float32",
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return model


def make_learner(
    config: LanguageModelJobConfig, folder: Path, ranks: Ranks, checkpointing: bool
) -> ActorLearner:
    lm = TrainedLm(LmSpec(folder=folder, checkpointing=checkpointing), ranks)
    trainer = Trainer(
        lm, config.actor.optimizer, ranks, iterations=1, component="actor"
    )
    keys = json.loads((folder / "config.json").read_text())
    again = read_model(keys).read_again if config.algorithm.share_prompts else None
    return ActorLearner(config, lm, trainer, ranks, again)


def config_of(
    folder: Path, groups: Sequence[Sequence[Sample]], *, share_prompts: bool
) -> LanguageModelJobConfig:
    config = read_config(
        {
            "cluster": {"component_placement": {}},
            "algorithm": {
                "name": "grpo",
                "loss": "token",
                "tis_cap": None,
                "prompts": len(groups),
                "samples_per_prompt": len(groups[0]),
                "share_prompts": share_prompts,
            },
            "actor": {
                "model": {"path": str(folder)},
                "compute": "fp32",
                "token_budget": BUDGET,
            },
            "env": {"task": "arithmetic"},
        }
    )
    assert isinstance(config, LanguageModelJobConfig)
    return config


def plain_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, samples: list[Sample]
) -> None:
    """Padded micro-batches of neighbours in length, the whole vocabulary's log-probabilities of all tokens."""
    by_length = sorted(samples, key=lambda s: s.weight)
    learned = sum(s.response_tokens for s in samples)
    advantages = {id(s): s.reward - 0.5 for s in samples}
    size = max(1, BUDGET // by_length[-1].weight)
    for start in range(0, len(by_length), size):
        chosen = by_length[start : start + size]
        ids = padded([torch.tensor(s.tokens, dtype=torch.int64) for s in chosen])
        attended = padded([torch.ones(s.weight, dtype=torch.int64) for s in chosen])
        mask = padded([torch.tensor(s.mask) for s in chosen])[:, 1:]
        old = padded([torch.tensor(s.logprobs) for s in chosen])[:, 1:]
        logits = model(input_ids=ids, attention_mask=attended).logits[:, :-1]
        logprobs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
        advantage = torch.tensor([advantages[id(s)] for s in chosen])[:, None]
        ratio = torch.exp((logprobs - old) * mask)
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        (-(surrogate * mask).sum() / learned).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def padded(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


if __name__ == "__main__":
    main()

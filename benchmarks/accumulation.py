"""What reducing the gradients of every micro-batch costs, against reducing once: of whole ones, or of one larger pass.

    python benchmarks/accumulation.py [--models small larger] [--tokens 32 512] [--ranks 2 4] [--repeat 5]

Steps of the trainer on gloo over the same tokens, in three ways in turn: 4 micro-batches, each of which is reduced; 4
that are reduced once, until when every rank keeps the whole model's gradients in float32; and one micro-batch of all
tokens, as a larger token_budget makes it. `saved` is what the last two take off a step: the median over turns.

Only an idle machine with a core for each rank gives figures: elsewhere ranks wait for a core, not for bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.lm_learning import write_model
from rlplace.config.blocks.training import OptimizerConfig
from rlplace.models.causal_lm import LmSpec
from rlplace.models.packed import Packed
from rlplace.workers.training.optimizer import Trainer
from rlplace.workers.training.ranks import Ranks
from rlplace.workers.training.trained_model import TrainedLm
from rlplace.workers.worker import Rendezvous
from tests.memory_peaks import language_model
from tests.tiny_lm import tiny_model
from tests.worker_ranks import context_of, in_processes

MICRO_BATCHES = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    model: Path
    ranks: int
    tokens: int  # of a micro-batch
    repeat: int


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 512])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", default=["tiny", "small", "larger"])
    parser.add_argument(
        "--layers",
        type=int,
        default=1,
        help="of the larger model, 28 million parameters and 3.5 each",
    )
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    print(
        "| model | ranks | tokens | every micro-batch s | once s | saved | one micro-batch s | saved |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        folders = {name: Path(folder, name) for name in ("tiny", "small", "larger")}
        tiny_model(folders["tiny"])
        language_model(folders["small"])
        write_model(folders["larger"], options.layers)
        for name in options.models:
            for ranks in options.ranks:
                for tokens in options.tokens:
                    job = Job(
                        model=folders[name],
                        ranks=ranks,
                        tokens=tokens,
                        repeat=options.repeat,
                    )
                    every, *others = in_processes(rank_seconds, job, ranks)[0]
                    row = f"| {name} | {ranks} | {tokens} | {statistics.median(every):.3f} |"
                    for other in others:
                        saved = statistics.median(
                            1 - b / a for a, b in zip(every, other, strict=True)
                        )
                        row += f" {statistics.median(other):.3f} | {saved:.0%} |"
                    print(row, flush=True)


def rank_seconds(
    job: Job, rank: int, rendezvous: Rendezvous, folder: Path
) -> list[list[float]]:
    """Return the seconds of each step that reduces every micro-batch, that reduces once, and of a micro-batch."""
    ranks = Ranks(
        context_of("actor", rank, job.ranks, rendezvous, {}, folder=folder),
        timeout_s=60.0,
    )
    lm = TrainedLm(LmSpec(folder=job.model), ranks)
    trainer = Trainer(lm, OptimizerConfig(), ranks, iterations=1, component="actor")
    tokens = np.random.default_rng(rank).integers(2, 300, job.tokens)
    one, all_in_one = (
        Packed.of([tokens] * n, [np.arange(job.tokens) > 0] * n)
        for n in (1, MICRO_BATCHES)
    )
    ways = (
        ([one] * MICRO_BATCHES, True),
        ([one] * MICRO_BATCHES, False),
        ([all_in_one], True),
    )
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(job.repeat + 1):  # the first warms up
        for (passes, always), taken in zip(ways, seconds, strict=True):
            ranks.sum(torch.zeros(1))  # all begin together
            began = time.perf_counter()
            for number, packed in enumerate(passes, start=1):
                cast(FSDPModule, lm.module).set_requires_gradient_sync(
                    always or number == len(passes)
                )
                (-lm.module(packed).logprobs.mean()).backward()
            numbers = trainer.sum_over_ranks([], torch.zeros(0), 0)
            assert numbers is not None, "the numbers are finite"
            trainer.step(numbers["grad_norm"], 1e-6)
            taken.append(time.perf_counter() - began)
    lm.drop_gathered()
    ranks.close()
    return [taken[1:] for taken in seconds]


if __name__ == "__main__":
    main()

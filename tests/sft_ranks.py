"""Ranks of an actor that learns written answers: real FSDP and gloo, no launcher, made-up rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.comm.ends import LocalChannel
from rlplace.config.read import read_config
from rlplace.metrics import Metric
from rlplace.placement.schedule import Residency
from rlplace.tokens import Sample
from rlplace.workers.arguments import HELD_OUT, SAMPLES, TextArguments
from rlplace.workers.roles.supervised import SupervisedActor
from rlplace.workers.worker import Rendezvous
from tests.lm_ranks import ADAM
from tests.worker_ranks import WORKING, context_of, in_processes, spec_of

ROWS = 9


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SftScenario:
    """One iteration on the rows of `rows`, and an evaluation on the same rows before it."""

    model: Path
    ranks: int = 1
    trained: Mapping[str, object] = dataclasses.field(default_factory=dict)
    algorithm: Mapping[str, object] = dataclasses.field(default_factory=dict)

    @property
    def job(self) -> TextArguments:
        actor = {
            "model": {"path": str(self.model)},
            "compute": "fp32",
            "checkpointing": False,
            "optimizer": ADAM,
            **self.trained,
        }
        config = read_config(
            {
                "cluster": {"component_placement": {"actor": 0, "env": "cpu"}},
                "algorithm": {"name": "sft", "prompts": ROWS, **self.algorithm},
                "actor": actor,
                "rollout": {},
                "env": {"task": "arithmetic"},
                "runner": {"seed": 7, "total_iterations": 4},
            }
        )
        return TextArguments(
            config=config,
            ranks={"actor": self.ranks, "env": 1},
            working={"actor": WORKING},
        )


def rows() -> list[Sample]:
    """Rows of uneven lengths: one or two answers, and one row of which nothing is learned."""
    rng = np.random.default_rng(3)
    made = []
    for number in range(ROWS):
        answers = rng.integers(1, 9)
        between = rng.integers(0, 4)
        mask = np.concatenate(
            [np.zeros(rng.integers(2, 7)), np.ones(answers), np.zeros(between)]
        ).astype(bool)
        mask = np.concatenate([mask, np.ones(between, bool)])
        if number == ROWS - 1:
            mask[:] = False
        tokens = rng.integers(3, 300, len(mask)).astype(np.int32)
        made.append(
            Sample(
                group=number,
                sample=0,
                tokens=tokens,
                mask=mask,
                logprobs=np.zeros(len(mask), np.float32),
                versions=np.full(len(mask), -1, np.int32),
                reward=0.0,
                rewards={},
                turns=1,
                truncated=False,
            )
        )
    return made


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SftOutcome:
    """What one rank has at the end."""

    weights: dict[str, NDArray[Any]]
    learned: Mapping[str, Metric]
    held_out: Mapping[str, Metric]


def _rank(
    scenario: SftScenario, rank: int, rendezvous: Rendezvous, folder: Path
) -> SftOutcome:
    channels = {name: LocalChannel(spec_of(name)) for name in (SAMPLES, HELD_OUT)}
    context = context_of("actor", rank, scenario.ranks, rendezvous, channels)
    worker = SupervisedActor(scenario.job, context)
    worker.setup()
    try:
        if rank == 0:
            put(channels[SAMPLES], rows())
            put(channels[HELD_OUT], rows())
            channels[HELD_OUT].put(())
        worker.move(Residency.FULL)
        held_out = worker.evaluate(0)
        learned = worker.learn(0, 0)
        weights = {
            name: tensor.detach().cpu().numpy().copy()
            for name, tensor in worker._model.whole_weights()
        }
    finally:
        worker.close()
    return SftOutcome(weights=weights, learned=learned, held_out=held_out)


def put(channel: Any, samples: Sequence[Sample]) -> None:
    """In another order than they are numbered."""
    for sample in reversed(samples):
        channel.put((sample,))


def run_sft_ranks(scenario: SftScenario) -> list[SftOutcome]:
    """The scenario in one process per rank."""
    return in_processes(_rank, scenario, scenario.ranks)

"""Scorers without a launcher: one rank in this process, or several in processes of their own, fed by a test."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlplace.comm.channel import Channel, ChannelSpec
from rlplace.comm.ends import LocalChannel
from rlplace.comm.shared_memory.channel import SharedChannel
from rlplace.config.read import read_config
from rlplace.envs.text import Transcript
from rlplace.metrics import Metrics
from rlplace.placement.language.spec import Parallel
from rlplace.placement.schedule import Residency
from rlplace.tokens import Sample, Scores
from rlplace.workers.arguments import (
    REFERENCE_WEIGHTS,
    TextArguments,
    samples_for,
    scores_of,
)
from rlplace.workers.launch.devices import Device
from rlplace.workers.roles.scorer import ReferenceWorker, RewardModelWorker, Scorer
from rlplace.workers.worker import Rendezvous
from tests.lm_ranks import PROMPTS, made_up_samples
from tests.worker_ranks import WORKING, context_of, in_processes

KINDS: Mapping[str, type[Scorer]] = {
    "reference": ReferenceWorker,
    "reward": RewardModelWorker,
}
Said = dict[tuple[int, int], list[float]]  # (group, sample) -> values
TIMEOUT_S = 30.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScorerScenario:
    """One iteration of made-up samples before one scorer."""

    model: Path  # the policy's
    component: str = "reference"
    block: Mapping[str, object] = dataclasses.field(
        default_factory=dict
    )  # of its config
    env: Mapping[str, object] = dataclasses.field(default_factory=dict)
    faults: Mapping[str, object] = dataclasses.field(default_factory=dict)
    algorithm: Mapping[str, object] = dataclasses.field(default_factory=dict)
    ranks: int = 1
    tensor_parallel: int = 1
    context_parallel: int = 1
    temperature: float = 1.0
    timeout_s: float = TIMEOUT_S  # of channels

    @property
    def job(self) -> TextArguments:
        model = (
            {}
            if self.component == "reward" and {"function", "url"} & set(self.block)
            else {"dtype": "fp32"}
        )
        config = read_config(
            {
                "cluster": {
                    "component_placement": {
                        "actor": "0",
                        "rollout": "0",
                        "env": "0",
                        self.component: "0",
                    }
                },
                "actor": {"model": {"path": str(self.model)}},
                "algorithm": {
                    "name": "grpo",
                    "prompts": PROMPTS,
                    "samples_per_prompt": 4,
                    **self.algorithm,
                },
                self.component: {"token_budget": 48, **model, **self.block},
                "rollout": {"temperature": self.temperature},
                "env": {"task": "arithmetic", **self.env},
                "faults": dict(self.faults),
                "runner": {"channel_timeout_s": TIMEOUT_S},
            }
        )
        components = ("actor", "env", "rollout", self.component)
        parallel = Parallel(
            tensor_parallel_size=self.tensor_parallel,
            context_parallel_size=self.context_parallel,
        )
        return TextArguments(
            config=config,
            ranks=dict.fromkeys(components, 1),
            working={self.component: WORKING},
            read_again={"reference": 0.25} if config.algorithm.share_prompts else {},
            parallel={self.component: parallel},
        )

    @property
    def specs(self) -> tuple[ChannelSpec, ...]:
        names = (
            samples_for(self.component),
            scores_of(self.component),
            REFERENCE_WEIGHTS,
        )
        return tuple(
            ChannelSpec(name=name, capacity_items=64, timeout_s=self.timeout_s)
            for name in names
        )


def make_scorer(
    scenario: ScorerScenario,
    channels: Mapping[str, Channel],
    *,
    rank: int = 0,
    rendezvous: Rendezvous | None = None,
    device: Device | None = None,
    kind: type[Scorer] | None = None,
) -> Scorer:
    """One rank that is set up and FULL; without a device on an emulated accelerator of a GiB. A collective."""
    named = {
        name: channel.named(f"{scenario.component} rank {rank}")
        for name, channel in channels.items()
    }
    alone = Rendezvous(host="127.0.0.1", port=0)
    context = context_of(
        scenario.component,
        rank,
        scenario.ranks,
        rendezvous or alone,
        named,
        device=device,
    )
    scorer = (kind or KINDS[scenario.component])(scenario.job, context)
    scorer.setup()
    scorer.move(Residency.FULL)
    return scorer


@contextlib.contextmanager
def sole_scorer(
    scenario: ScorerScenario,
    device: Device | None = None,
    kind: type[Scorer] | None = None,
) -> Iterator[tuple[Scorer, dict[str, Channel]]]:
    """The only rank, here, and its channels."""
    channels: dict[str, Channel] = {
        spec.name: LocalChannel(spec) for spec in scenario.specs
    }
    scorer = make_scorer(scenario, channels, device=device, kind=kind)
    try:
        yield scorer, channels
    finally:
        scorer.close()


def give(
    scenario: ScorerScenario,
    channels: Mapping[str, Channel],
    groups: Sequence[Sequence[Sample]],
) -> None:
    for group in groups:
        channels[samples_for(scenario.component)].put(tuple(group))


def said(
    scenario: ScorerScenario, channels: Mapping[str, Channel], samples: int
) -> Said:
    """Waits for scores of so many samples, and that there are no more."""
    found: Said = {}
    channel = channels[scores_of(scenario.component)]
    while len(found) < samples:
        scores: tuple[Scores, ...] = channel.get()
        for score in scores:
            assert (score.group, score.sample) not in found
            found[score.group, score.sample] = score.values.tolist()
    assert channel.stats().depth_items == 0
    return found


def scored_by(
    scenario: ScorerScenario,
    groups: Sequence[Sequence[Sample]] | None = None,
    **making: Any,
) -> Said:
    """Scores of the only rank, of samples that are all there before it begins."""
    groups = made_up_samples() if groups is None else groups
    with sole_scorer(scenario, **making) as (scorer, channels):
        give(scenario, channels, groups)
        scorer.infer(0, 0)
        return said(scenario, channels, sum(map(len, groups)))


def with_text(
    groups: Sequence[Sequence[Sample]], answer: Callable[[Sample], str] = str
) -> list[tuple[Sample, ...]]:
    """The same samples as an env rank gives them to scorers that read text."""

    def transcribed(sample: Sample) -> Sample:
        transcript = Transcript(
            prompt=f"question {sample.group}",
            answers=(answer(sample),),
            replies=(),
            facts={"answer": str(sample.group)},
            tokens=sample.response_tokens,
            truncated=False,
        )
        return dataclasses.replace(sample, transcript=transcript)

    return [tuple(map(transcribed, group)) for group in groups]


# ── several ranks ────────────────────────────────────────────────────────────────────────────────────────────────────


def _rank(
    scenario: ScorerScenario, rank: int, rendezvous: Rendezvous, folder: Path
) -> list[Metrics]:
    channels = {
        spec.name: SharedChannel.attach(folder / f"{spec.name}.channel")
        for spec in scenario.specs
    }
    scorer = make_scorer(scenario, channels, rank=rank, rendezvous=rendezvous)
    try:
        scorer.move(Residency.OFF)
        scorer.move(Residency.FULL)
        first = scorer.infer(0, 0)
        (folder / f"{rank}.done").touch()
        ends = time.monotonic() + TIMEOUT_S
        while (
            len(list(folder.glob("*.done"))) < scenario.ranks
        ):  # as a loop does, which waits for all ranks
            assert time.monotonic() < ends, (
                "another rank has not ended its first iteration"
            )
            time.sleep(0.01)
        return [first, scorer.infer(1, 1)]
    finally:
        scorer.close()


def score_by_ranks(scenario: ScorerScenario) -> list[Said]:
    """Two iterations in one process per rank; of the first, each group is given when the one before was scored."""
    first: Said = {}
    second: Said = {}

    def feed(channels: Mapping[str, Channel]) -> None:
        for group in made_up_samples():
            give(scenario, channels, [group])
            first.update(said(scenario, channels, len(group)))
        later = made_up_samples(1)
        give(scenario, channels, later)
        second.update(said(scenario, channels, sum(map(len, later))))

    in_processes(
        _rank, scenario, scenario.ranks, channels=scenario.specs, meanwhile=feed
    )
    return [first, second]


def values(scores: Said) -> np.ndarray:
    """All of them, by group and sample."""
    return np.concatenate([scores[place] for place in sorted(scores)])

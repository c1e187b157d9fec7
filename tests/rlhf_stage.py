"""Workers of one job that learn or score, one rank each in this process, fed with made-up samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlplace.comm.ends import LocalChannel
from rlplace.config.read import read_config
from rlplace.jobs.language_model.job import worker_of
from rlplace.metrics import Metrics, reduce_metrics
from rlplace.placement.schedule import Residency
from rlplace.tokens import Sample
from rlplace.workers.arguments import (
    REFERENCE_WEIGHTS,
    RETURNS,
    SAMPLES,
    WEIGHTS,
    TextArguments,
    samples_for,
    scores_of,
)
from rlplace.workers.worker import Worker
from tests.lm_ranks import ADAM, PROMPTS, SAMPLES_PER_PROMPT
from tests.worker_ranks import context_of, listen, rendezvous_at, spec_of

Groups = Sequence[Sequence[Sample]]


class RlhfStage:
    """Workers of the components that are named; `blocks` are of the config, over what suits a tiny model in float32."""

    def __init__(
        self, model: Path, components: Sequence[str], **blocks: Mapping[str, Any]
    ) -> None:
        trained = {"compute": "fp32", "token_budget": 48, "optimizer": ADAM}
        usual: dict[str, dict[str, Any]] = {
            "algorithm": {
                "name": "ppo",
                "prompts": PROMPTS,
                "samples_per_prompt": SAMPLES_PER_PROMPT,
                "tis_cap": None,
                "loss": "token",
            },
            "actor": {"model": {"path": str(model)}, **trained},
            "critic": dict(trained),
            "reference": {"dtype": "fp32"},
            "reward": {},
            "runner": {"seed": 7, "total_iterations": 4},
        }
        config = read_config(
            {
                "cluster": {
                    "component_placement": dict.fromkeys(
                        (*components, "rollout", "env"), "0"
                    )
                },
                "env": {"task": "arithmetic"},
                **{
                    name: {**block, **blocks.get(name, {})}
                    for name, block in usual.items()
                },
            }
        )
        ranks = dict.fromkeys((*components, "rollout", "env"), 1)
        again = {component: 0.25 for component in components if component != "reward"}
        self.job = TextArguments(config=config, ranks=ranks, read_again=again)
        names = [
            SAMPLES,
            WEIGHTS,
            RETURNS,
            *map(samples_for, self.job.scorers),
            *map(scores_of, self.job.scorers),
        ]
        names += [REFERENCE_WEIGHTS] if config.reference.refresh_every else []
        self.channels = {name: LocalChannel(spec_of(name)) for name in names}
        self.workers = {component: self._worker(component) for component in components}

    def _worker(self, component: str) -> Any:
        named = {
            name: channel.named(f"{component} rank 0")
            for name, channel in self.channels.items()
        }
        context = context_of(component, 0, 1, rendezvous_at(listen()), named)
        return worker_of(self.job.config, component)(self.job, context)

    def __enter__(self) -> RlhfStage:
        try:
            for worker in self.workers.values():
                worker.setup()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()

    def give(self, groups: Groups) -> None:
        """What the env puts."""
        for group in reversed(groups):  # in another order than they are numbered
            for name in (SAMPLES, *map(samples_for, self.job.scorers)):
                self.channels[name].put(tuple(group))

    def iterate(self, groups: Groups, iteration: int = 0) -> dict[str, float]:
        """From samples to the next version, each alone on the accelerator in turn; the metrics of all."""
        self.give(groups)
        scorers = [self.workers[name] for name in self.job.scorers]
        numbers: list[Metrics] = [
            self._alone(worker, "infer", iteration) for worker in scorers
        ]
        actor = self.workers["actor"]
        if self.job.config.actor_infers:
            numbers.append(self._alone(actor, "infer", iteration))
        if self.job.config.actor_infers or scorers:
            numbers.append(actor.compute_advantages(iteration))
        learning = [
            self.workers[name] for name in ("critic", "actor") if name in self.workers
        ]
        numbers += [self._alone(worker, "learn", iteration) for worker in learning]
        return reduce_metrics(numbers)

    @staticmethod
    def _alone(worker: Worker, method: str, iteration: int) -> Metrics:
        worker.move(Residency.FULL)
        metrics: Metrics = getattr(worker, method)(iteration, iteration)
        worker.move(Residency.OFF)
        return metrics

    def weights(self, component: str) -> dict[str, Any]:
        """Of one that learns, by their names in its folder."""
        worker = self.workers[component]
        worker.move(Residency.WEIGHTS)
        found = {name: tensor.clone() for name, tensor in worker._model.whole_weights()}
        worker.move(Residency.OFF)
        return found

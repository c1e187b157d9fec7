"""Predictions of jobs whose work takes round numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlplace.config import compose
from rlplace.foresight.predict import Prediction, predict
from rlplace.foresight.profile import PROCESSOR, Curve, Point, Profile
from rlplace.runtime.prepare import Prepared, prepare_composed

PLACE = "cluster.component_placement."
MS = 0.001


def timed(
    costs: Mapping[str, float],
    *words: str,
    config: str = "hybrid_ppo",
    cores: int = 8,
    sizes: Mapping[str, float] | None = None,
    samples: Mapping[str, Sequence[float]] | None = None,
    on: str = PROCESSOR,
) -> Prediction:
    """Predict a shipped config with `words`; a lap takes so many milliseconds, of any size or growing from `sizes`.

    `samples`: distributions that lengths are drawn from.
    """
    job, profile = (
        job_of(config, *words),
        profile_of(costs, cores=cores, sizes=sizes, samples=samples, on=on),
    )
    return predict(job.config, job.plan, job.case, profile)


def job_of(config: str, *words: str) -> Prepared:
    (composed,) = compose.with_hydra(["--config-name", config, *words])
    return prepare_composed(composed)


def profile_of(
    costs: Mapping[str, float],
    *,
    cores: int = 8,
    sizes: Mapping[str, float] | None = None,
    samples: Mapping[str, Sequence[float]] | None = None,
    on: str = PROCESSOR,
) -> Profile:
    """Return a profile in which a lap takes so many milliseconds."""
    curves = {}
    for name, ms in costs.items():
        points = [(0.0, ms)]
        if sizes and name in sizes:
            points = [
                (size, ms * size / sizes[name])
                for size in (sizes[name], 2 * sizes[name])
            ]
        curves[name] = Curve(
            points=tuple(
                Point(size=s, laps=1, cpu_s=v * MS, least_cpu_s=v * MS, blocked_s=0.0)
                for s, v in points
            ),
            on=on,
        )
    drawn = {name: tuple(values) for name, values in (samples or {}).items()}
    return Profile(
        machine={"cores": cores}, versions={}, subjects={}, costs=curves, samples=drawn
    )

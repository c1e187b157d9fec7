"""Profiles of jobs with simulators: random ones, and one like that of a small run."""

from __future__ import annotations

import random
from collections.abc import Sequence

from rlplace.foresight.profile import ACCELERATOR, PROCESSOR, Curve, Point, Profile

SIZED = {
    "actor.learn/estimate": (64, 4096),
    "actor.learn/exchange": (1, 16),
    "actor.learn/minibatch": (8, 512),
    "env.run/sim": (1, 64),
    "env.run/cold_sim": (1, 64),
    "rollout.generate/policy": (1, 64),
    "rollout.generate/cold_policy": (1, 64),
}
FLAT = (
    *(
        f"{c}.move_{to}/rest"
        for c in ("actor", "env", "rollout")
        for to in ("off", "weights", "full")
    ),
    *(
        f"{c}/{launcher}_call"
        for c in ("actor", "driver", "env", "rollout")
        for launcher in ("ray", "inline")
    ),
    *(f"actor.learn/{part}" for part in ("rest", "step", "wait")),
    *("actor.push_weights/rest", "rollout.pull_weights/rest"),
    *(
        f"env.run/{part}"
        for part in (
            "direct_put",
            "direct_wait",
            "put",
            "rest",
            "wait",
            "cold_put",
            "cold_wait",
        )
    ),
    *(
        f"rollout.generate/{part}"
        for part in ("put", "rest", "wait", "cold_put", "cold_wait")
    ),
)
_USUAL = {  # cost -> size, seconds of a lap of a small run
    "actor.learn/estimate": ((512, 8.5e-4), (4096, 1.0e-3)),
    "actor.learn/exchange": ((1, 4.7e-5), (2, 1.5e-4), (8, 2.2e-4)),
    "actor.learn/minibatch": ((128, 6.0e-4), (512, 1.1e-3)),
    "env.run/sim": ((8, 2.7e-4), (16, 4.3e-4), (64, 1.3e-3)),
    "rollout.generate/policy": ((8, 2.0e-4), (64, 2.6e-4)),
}
_USUAL_ELSE = (
    ("_call", 1.5e-3),
    ("move_", 6.0e-4),
    ("weights", 1.0e-3),
    ("rest", 1.0e-3),
    ("", 7.0e-5),
)


def random_profile(rng: random.Random) -> Profile:
    """Make costs of 1 us to 5 ms, some of them with time that no processor shortens."""

    def point(size: float, cpu_s: float) -> Point:
        blocked_s = rng.choice([0.0, 0.0, rng.uniform(0.0, 0.003)])
        return Point(
            size=size,
            laps=rng.randint(1, 99),
            cpu_s=cpu_s,
            least_cpu_s=cpu_s,
            blocked_s=blocked_s,
        )

    costs = {
        name: Curve(points=(point(0.0, 10 ** rng.uniform(-6, -2.3)),)) for name in FLAT
    }
    device = rng.random() < 0.5
    for name, (low, high) in SIZED.items():
        sizes = sorted(rng.uniform(low, high) for _ in range(rng.randint(1, 4)))
        there = ACCELERATOR if device and not name.startswith("env") else PROCESSOR
        costs[name] = Curve(
            points=tuple(point(size, 10 ** rng.uniform(-5, -2.5)) for size in sizes),
            on=there,
        )
    return Profile(
        machine={"cores": rng.choice([1, 2, 3, 8, 32])},
        versions={},
        subjects={},
        costs=costs,
    )


_TEXT_SIZED = {
    "{}.infer/infer": (8, 2048),
    "{}.infer/score": (8, 2048),
    "{}.infer/exchange": (1, 4),
    "{}.learn/micro_batch": (8, 2048),
    "{}.learn/exchange": (1, 4),
    "{}.generate/prefill": (4, 64),
    "{}.generate/decode": (1, 64),
}
_TEXT_FLAT = (
    *(f"{{}}.move_{to}/rest" for to in ("off", "weights", "full")),
    *(
        "{}/ray_call",
        "{}/inline_call",
        "{}.push_weights/rest",
        "{}.pull_weights/rest",
        "{}.compute_advantages/rest",
    ),
    *(f"{{}}.run/{part}" for part in ("sim", "reward", "wait", "put", "rest")),
    *(f"{{}}.infer/{part}" for part in ("infer_wait", "wait", "rest")),
    *(f"{{}}.learn/{part}" for part in ("wait", "step", "rest")),
    *(f"{{}}.generate/{part}" for part in ("wait", "put", "rest", "update")),
)


def random_text_profile(rng: random.Random, components: Sequence[str]) -> Profile:
    """Make costs of these components and lengths of prompts and answers."""
    device, costs = rng.random() < 0.5, dict[str, Curve]()

    def curve(sizes: Sequence[float], most: float, on: str = PROCESSOR) -> Curve:
        drawn = sorted(10 ** rng.uniform(-5, most) for _ in sizes)
        blocked_s = rng.choice([0.0, rng.uniform(0.0, 0.002)])
        points = zip(sizes, drawn, strict=True)
        return Curve(
            points=tuple(
                Point(size=x, laps=3, cpu_s=s, least_cpu_s=s, blocked_s=blocked_s)
                for x, s in points
            ),
            on=on,
        )

    for component in (*components, "driver"):
        for name in _TEXT_FLAT:
            costs[name.format(component)] = curve([0.0], -2.5)
        for name, (low, high) in _TEXT_SIZED.items():
            sizes = sorted(rng.uniform(low, high) for _ in range(rng.randint(1, 3)))
            costs[name.format(component)] = curve(
                sizes, -2.0, ACCELERATOR if device else PROCESSOR
            )
    samples = {
        "env.prompt_tokens": tuple(float(rng.randint(3, 20)) for _ in range(5)),
        "rollout.answer_tokens": tuple(float(rng.randint(1, 40)) for _ in range(9)),
    }
    cores = rng.choice([1, 2, 8, 32])
    return Profile(
        machine={"cores": cores}, versions={}, subjects={}, costs=costs, samples=samples
    )


def usual_profile(cores: int = 2) -> Profile:
    """Return one like that of a small run on a machine with so many cores."""
    lines = {
        name: ((0.0, next(s for part, s in _USUAL_ELSE if part in name)),)
        for name in FLAT
    } | _USUAL
    costs = {
        name: Curve(
            points=tuple(
                Point(size=x, laps=9, cpu_s=s, least_cpu_s=s, blocked_s=0.0)
                for x, s in points
            )
        )
        for name, points in lines.items()
    }
    return Profile(machine={"cores": cores}, versions={}, subjects={}, costs=costs)

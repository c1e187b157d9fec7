"""No prediction is below its bound, over random placements and profiles; bounds of sizes are below those of plans."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest

from rlplace.config import compose
from rlplace.config.schema import Config
from rlplace.contract.planning import make_plan, memory_case
from rlplace.errors import ProblemsError
from rlplace.foresight.alike import Alike, seconds_of
from rlplace.foresight.bounds import Bounds
from rlplace.foresight.costs import Costs
from rlplace.foresight.loads import Mode, Size
from rlplace.foresight.predict import predict
from rlplace.foresight.profile import Curve, Point, Profile
from rlplace.foresight.search import Search
from rlplace.foresight.space import Layout, Space
from rlplace.placement.plan import Plan
from rlplace.runtime.prepare import Prepared, prepare_composed
from tests.foresight_profiles import random_profile, random_text_profile


def random_layout(rng: random.Random, space: Space) -> Layout:
    nodes, count = space.plan.topology.nodes, space.plan.topology.num_accelerators
    mode, sizes, starts = Mode(rng.choice([1, 2, 4]), rng.random() < 0.2), {}, {}
    for component in ("actor", "env", "rollout"):
        node = rng.choice(nodes)
        size = rng.choice([*range(1, node.accelerators + 1), count])
        sizes[component] = Size(size, size)
        starts[component] = (
            0
            if size == count
            else node.first + rng.randint(0, node.accelerators - size)
        )
    if mode.shared:
        sizes["rollout"], starts["rollout"] = sizes["env"], starts["env"]
    stays = tuple(c for c in sizes if rng.random() < 0.3)
    return Layout(mode=mode, sizes=sizes, starts=starts, stays=stays)


def random_text_layout(rng: random.Random, space: Space) -> Layout:
    sizes = {c: rng.choice(several) for c, several in space.sizes(space.now).items()}
    starts = {
        c: rng.choice(
            [at for at, _ in space.places(space.empty, c, sizes[c].accelerators)]
        )
        for c in space.free
    }
    return Layout(
        mode=space.now,
        sizes=sizes,
        starts=starts,
        stays=tuple(c for c in starts if rng.random() < 0.3),
    )


def prepared(*words: str) -> Prepared:
    (composed,) = compose.with_hydra(
        ["--config-name", "hybrid_ppo", "algorithm.rollout_steps=4", *words]
    )
    return prepare_composed(composed)


def random_plans(
    space: Space, tries: int, drawn: Callable[[], Layout]
) -> Iterator[tuple[Layout, Config, Plan]]:
    """Give so many drawn layouts that are valid plans."""
    while tries:
        layout = drawn()
        config = space.config_of(layout)
        with contextlib.suppress(ProblemsError):
            yield layout, config, make_plan(config, space.plan.topology)
            tries -= 1


NODES = "cluster.num_nodes=2", "cluster.accelerators_per_node=4"

TEXT = "runner.eval_every=0", "algorithm.max_new_tokens=32", "algorithm.prompts=6"
APART = tuple(
    f"cluster.component_placement.{c}={at}"
    for at, c in enumerate(("actor", "env", "rollout"))
)
GRPO = ("hybrid_grpo_llm", *TEXT)
RLHF = ("rlhf_tiny", *TEXT, "cluster.accelerators_per_node=4")


@pytest.mark.parametrize(
    ("words", "tries"),
    [
        ((*GRPO, "rollout.engine=transformers"), 15),
        (GRPO, 10),
        ((*GRPO, "algorithm.max_staleness=1", *APART), 10),
        ((*GRPO, "algorithm.max_staleness=2", *APART), 10),
        ((*RLHF, "algorithm.short_rounds=2"), 3),
        (RLHF, 8),
        pytest.param((*RLHF, "cluster.num_nodes=2"), 200, marks=pytest.mark.slow),
        pytest.param(RLHF, 20, marks=pytest.mark.slow),
        pytest.param(GRPO, 200, marks=pytest.mark.slow),
    ],
)
def test_no_prediction_of_a_job_with_text_is_below_its_bound(
    words: tuple[str, ...], tries: int
) -> None:
    (composed,) = compose.with_hydra(["--config-name", *words])
    job, rng = prepare_composed(composed), random.Random(tries)
    space = Space(job.config, job.plan)
    sizes = space.sizes(space.now)
    for layout, config, plan in random_plans(
        space, tries, partial(random_text_layout, rng, space)
    ):
        profile = random_text_profile(rng, plan.placement.components)
        bounds = Bounds(config, plan, Costs(profile))
        found = predict(config, plan, memory_case(plan, config), profile)
        assert not found.costs.missing
        bound = bounds.of_iteration(
            plan.schedule, layout.mode, layout.sizes, space.spread(layout)
        )
        assert 0.0 < bound <= found.seconds * (1 + 1e-9), (
            layout,
            plan.placement.canonical(),
        )
        assert bounds.of_sizes(
            layout.mode, {c: (s,) for c, s in layout.sizes.items()}
        ) <= found.seconds * (1 + 1e-9)
        assert bounds.of_sizes(layout.mode, sizes) <= found.seconds * (1 + 1e-9)
        search, one = Search(space, profile), {c: (s,) for c, s in layout.sizes.items()}
        search.sharpen(space.now, one)  # where there are processors for everybody
        assert sum(
            search.least(layout, plan.schedule, search.keys(layout, plan.schedule))
        ) <= found.seconds * (1 + 1e-9)
        assert search.of_sizes(layout.mode, one) <= found.seconds * (1 + 1e-9)
        assert search.of_sizes(layout.mode, sizes) <= search.of_sizes(
            layout.mode, one
        ) * (1 + 1e-9)


def steady_profile(rng: random.Random, components: Sequence[str]) -> Profile:
    """Make costs of a node with many processors and fast messages, and long answers."""
    profile = random_text_profile(rng, components)
    step_s = 10 ** rng.uniform(-3.0, -2.0)
    fast = ("_call", "env.run/sim", "env.run/put", "_weights/rest")

    def curve(*points: tuple[float, float]) -> Curve:
        return Curve(
            points=tuple(
                Point(size=size, laps=1, cpu_s=s, least_cpu_s=s, blocked_s=0.0)
                for size, s in points
            ),
            on=profile.costs["rollout.generate/decode"].on,
        )

    costs = {
        name: curve((0.0, 1e-6)) if name.endswith(fast) else known
        for name, known in profile.costs.items()
    }
    grows = rng.uniform(1.0, 8.0)
    costs["rollout.generate/decode"] = curve((1, step_s), (32, grows * step_s))
    read_s = rng.uniform(0.3, 3.0) * step_s
    costs["rollout.generate/prefill"] = curve((4, read_s), (64, 2 * read_s))
    answers = tuple(float(rng.randint(100, 250)) for _ in range(9))
    samples = {**profile.samples, "rollout.answer_tokens": answers}
    return dataclasses.replace(
        profile, machine={"cores": 64}, costs=costs, samples=samples
    )


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_engines_that_take_all_requests_at_once_are_not_below_their_bound(
    ahead: int, engine: str
) -> None:
    rng = random.Random(f"{ahead} {engine}")
    steady = 0
    for _ in range(3):
        words = (
            f"algorithm.max_staleness={ahead}",
            f"algorithm.prompts={rng.randint(4, 8)}",
            f"algorithm.samples_per_prompt={rng.choice([2, 4])}",
            "algorithm.max_new_tokens=256",
            "runner.eval_every=0",
            f"rollout.engine={engine}",
            *APART,
        )
        (composed,) = compose.with_hydra(["--config-name", "hybrid_grpo_llm", *words])
        job = prepare_composed(composed)
        space = Space(job.config, job.plan)
        drawn = partial(random_text_layout, rng, space)
        for layout, config, plan in random_plans(space, 2, drawn):
            profile = steady_profile(rng, plan.placement.components)
            bounds = Bounds(config, plan, Costs(profile))
            others = dataclasses.replace(profile, machine={"cores": 1})
            crowded = Bounds(config, plan, Costs(others))
            one = {c: (size,) for c, size in layout.sizes.items()}
            bound_s = bounds.of_stage("rollout", layout.mode, one)
            steady += bound_s > crowded.of_stage("rollout", layout.mode, one) * 1.01
            case = memory_case(plan, config)
            seconds = predict(config, plan, case, profile).seconds
            where = plan.schedule, layout.mode, layout.sizes, space.spread(layout)
            assert bounds.of_iteration(*where) <= seconds * (1 + 1e-9)
            assert bounds.of_sizes(layout.mode, one) <= seconds * (1 + 1e-9)
    assert steady >= 3


@pytest.mark.parametrize(
    ("words", "tries"),
    [
        pytest.param(
            (*RLHF, "cluster.accelerators_per_node=2"), 60, marks=pytest.mark.slow
        ),
        (
            (
                *RLHF,
                "cluster.num_nodes=2",
                "cluster.accelerators_per_node=2",
                "algorithm.train_batch=8",
            ),
            30,
        ),
        (("hybrid_ppo", "algorithm.rollout_steps=2", "env.total_num_envs=48"), 60),
        (
            (
                *GRPO,
                "algorithm.max_staleness=1",
                *APART,
                "cluster.num_nodes=2",
                "cluster.accelerators_per_node=2",
            ),
            25,
        ),
        pytest.param(
            (*RLHF, "cluster.accelerators_per_node=2"), 1500, marks=pytest.mark.slow
        ),
        pytest.param(
            (*RLHF, "reference.sharded=false", "reward.sharded=false"),
            800,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_stages_that_depend_on_the_same_take_as_long(
    words: tuple[str, ...], tries: int
) -> None:
    (composed,) = compose.with_hydra(["--config-name", *words])
    job, rng = prepare_composed(composed), random.Random(tries)
    space, again = Space(job.config, job.plan), 0
    simulated = job.config.job == "simulator"
    known: dict[object, float] = {}
    drawn = partial(random_layout if simulated else random_text_layout, rng, space)
    for number, (layout, config, plan) in enumerate(random_plans(space, tries, drawn)):
        if number % 60 == 0:
            profile = (
                random_profile(rng)
                if simulated
                else random_text_profile(rng, plan.placement.components)
            )
            alike, known = Alike(space, profile), {}
        keys = alike.keys(layout, plan.schedule)
        for key, seconds in seconds_of(
            predict(config, plan, memory_case(plan, config), profile), keys
        ).items():
            again += key in known
            assert known.setdefault(key, seconds) == pytest.approx(seconds, rel=1e-9), (
                key
            )
    assert again >= tries // 4


@pytest.mark.parametrize(
    ("words", "tries"),
    [
        ((), 20),
        (("cluster.launcher=inline", "cluster.component_placement.actor=0"), 20),
        (("rollout.merge_requests=true",), 20),
        (NODES, 15),
        pytest.param((), 800, marks=pytest.mark.slow),
        pytest.param(
            (*NODES, "rollout.merge_requests=true"), 400, marks=pytest.mark.slow
        ),
    ],
)
def test_no_prediction_is_below_its_bound(words: tuple[str, ...], tries: int) -> None:
    job, rng = (
        prepared("env.total_num_envs=48", *words),
        random.Random(len(words) + tries),
    )
    space = Space(job.config, job.plan)
    for layout, config, plan in random_plans(
        space, tries, lambda: random_layout(rng, space)
    ):
        profile = random_profile(rng)
        bounds = Bounds(config, plan, Costs(profile))
        seconds = predict(config, plan, memory_case(plan, config), profile).seconds
        bound = sum(
            bounds.of_stages(
                plan.schedule, layout.mode, layout.sizes, space.spread(layout)
            )
        )
        assert bound <= seconds * (1 + 1e-9), (layout, plan.placement.canonical())
        several = {c: (size, Size(8, 8)) for c, size in layout.sizes.items()}
        one = bounds.of_sizes(
            layout.mode, {c: (size,) for c, size in layout.sizes.items()}
        )
        assert bounds.of_sizes(layout.mode, several) <= one * (1 + 1e-9)
        assert one <= bound * (1 + 1e-9)

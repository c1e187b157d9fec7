"""A search finds the best of all plans of a small cluster, which are written as configs one by one and all predicted.

The oracle knows what docs/search.md says of the plans, and neither the spaces nor the bounds nor the keys of a search.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from rlplace.config import compose
from rlplace.config.read import read_config
from rlplace.config.schema import Config
from rlplace.contract.planning import make_plan, memory_case
from rlplace.errors import ProblemsError
from rlplace.foresight.predict import predict
from rlplace.foresight.profile import Profile
from rlplace.foresight.search import OBJECTIVES, Search
from rlplace.foresight.space import Space
from rlplace.jobs.language_model.performance import ranks, whole
from rlplace.jobs.language_model.performance.published import published_profile
from rlplace.placement.memory.ledger import MemoryCase
from rlplace.placement.plan import Plan
from rlplace.runtime.prepare import Prepared, prepare_composed
from tests.foresight_profiles import random_profile, random_text_profile

PROFILES = 10  # of each job
SLICE, SLICES = 100, 20  # searches of each slow test: 2,000 in all
ROLES = ("actor", "env", "rollout")
FEW = ("algorithm.rollout_steps=1", "algorithm.epochs=1", "algorithm.num_minibatches=1")
SHORT = (
    "runner.eval_every=0",
    "algorithm.max_new_tokens=4",
    "algorithm.samples_per_prompt=2",
    "algorithm.prompts=2",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instance:
    """A job on a small cluster, and which of its components may be elsewhere."""

    job: Prepared
    each: int  # accelerators of a node
    nodes: int
    fixed: Sequence[str]

    @property
    def free(self) -> list[str]:
        return [c for c in self.job.plan.placement.components if c not in self.fixed]

    @property
    def simulated(self) -> bool:
        return self.job.config.job == "simulator"


def random_instance(rng: random.Random) -> Instance:
    nodes, each = rng.choice([(1, 2), (1, 2), (1, 3), (2, 1)])
    cluster = f"cluster.num_nodes={nodes}", f"cluster.accelerators_per_node={each}"
    name, *words = rng.choice(
        [
            ("hybrid_ppo", *FEW, f"env.total_num_envs={rng.choice([4, 6, 12])}"),
            (
                "hybrid_ppo",
                *FEW,
                "env.total_num_envs=4",
                f"cluster.accelerator.memory={rng.choice([280, 330])}MiB",
            ),
            (
                "hybrid_ppo",
                *FEW,
                "env.total_num_envs=4",
                "rollout.merge_requests=true",
                "cluster.launcher=inline",
            ),
            ("hybrid_grpo_llm", *SHORT, "rollout.engine=transformers"),
            ("rlhf_tiny", *SHORT, "cluster.component_placement.env=cpu"),
        ]
    )
    fixed = rng.sample(ROLES, rng.choice([0, *[1] * 9, 2, 2]))
    if name == "rlhf_tiny":
        roles = ("actor", "critic", "reference", "reward", "rollout")
        fixed = ["env", *rng.sample(roles, rng.choice([3, 4, 4, 4]))]
        words += [
            f"cluster.component_placement.{c}={rng.randrange(nodes * each)}"
            for c in roles
        ]
    elif name == "hybrid_grpo_llm" and not fixed:
        fixed = [rng.choice(ROLES)]
    if name != "rlhf_tiny":
        words += [
            f"cluster.component_placement.{c}={rng.randrange(nodes * each)}"
            for c in ROLES
        ]
    (composed,) = compose.with_hydra(["--config-name", name, *words, *cluster])
    try:
        job = prepare_composed(composed)
    except ProblemsError:  # such as simulators that do not fit beside what stays
        return random_instance(rng)
    return Instance(job=job, each=each, nodes=nodes, fixed=fixed)


def intervals(each: int, nodes: int) -> Iterator[range]:
    """All within a node, and all nodes together."""
    for node, first in itertools.product(range(nodes), range(each)):
        yield from (
            range(node * each + first, node * each + stop)
            for stop in range(first + 1, each + 1)
        )
    if nodes > 1:
        yield range(nodes * each)


def places(instance: Instance, groups: int, component: str) -> list[range]:
    """The intervals on which a component has work for every rank: rows, or a share of a node for language models."""
    found = intervals(instance.each, instance.nodes)
    if instance.simulated:
        rows = instance.job.config.env.total_num_envs // (
            1 if component == "actor" else groups
        )
        return [held for held in found if rows % len(held) == 0]
    return [
        held
        for held in found
        if instance.each % len(held) == 0 or len(held) > instance.each
    ]


def every_config(instance: Instance) -> Iterator[dict[str, Any]]:
    """All configs that a search may choose: where, in how many stage groups, in which processes, who stays."""
    job, free = instance.job, instance.free
    all_groups, processes = (
        [job.plan.stage_groups if instance.simulated else 0],
        [False],
    )
    if instance.simulated and "rollout" in free:
        rows = job.config.env.total_num_envs
        all_groups = [groups for groups in (1, 2, 4) if rows % groups == 0]
    if instance.simulated and {"env", "rollout"} <= {*free}:
        processes = [False, True]
    for groups, shared in itertools.product(all_groups, processes):
        for chosen in itertools.product(*(places(instance, groups, c) for c in free)):
            held = dict(zip(free, chosen, strict=True))
            if not shared or held["env"] == held["rollout"]:
                yield from with_stays(instance, held, groups, shared=shared)


def with_stays(
    instance: Instance, held: Mapping[str, range], groups: int, *, shared: bool
) -> Iterator[dict[str, Any]]:
    placement, config = (
        instance.job.plan.placement,
        copy.deepcopy(dict(instance.job.mapping)),
    )
    lines = dict(config["cluster"]["component_placement"])
    for component, there in held.items():
        line = f"{there[0]}-{there[-1]}"
        pair = shared and component in ("env", "rollout")
        lines[component] = {"accelerators": line, "process": "shared"} if pair else line
    config["cluster"]["component_placement"] = lines
    if groups:
        config["rollout"]["pipeline_stage_num"] = groups
    where = {c: {*placement.accelerators(c)} for c in placement.components} | {
        c: {*held[c]} for c in held
    }
    sharing = [
        c for c in held if any(where[c] & where[other] for other in where if other != c)
    ]
    for stays in itertools.product((False, True), repeat=len(sharing)):
        for component, stay in zip(sharing, stays, strict=True):
            config[component]["enable_offload"] = not stay
        config["cluster"]["allow_resident"] = list(itertools.compress(sharing, stays))
        yield copy.deepcopy(config)


class Candidate(tuple[Config, Plan, MemoryCase]):
    """A plan that holds and fits."""

    __slots__ = ()

    @property
    def alike(self) -> object:
        """What is the same for plans that differ in the numbers of accelerators of a node alone."""
        config, plan, _ = self
        on: dict[tuple[int, int], set[tuple[str, int]]] = {}
        for component in plan.placement.components:
            for slot in plan.placement.slots(component):
                for accelerator in slot.accelerators or (-1,):
                    on.setdefault((slot.node, accelerator), set()).add(
                        (component, slot.rank)
                    )
        held = sorted(
            (node, accelerator < 0, sorted(ranks))
            for (node, accelerator), ranks in on.items()
        )
        processes = [
            slot.process
            for c in plan.placement.components
            for slot in plan.placement.slots(c)
        ]
        return str((held, processes, plan.schedule.residency, config.rollout))


def candidates(instance: Instance) -> list[Candidate]:
    found: dict[object, Candidate] = {}
    topology = instance.job.plan.topology
    for mapping in (instance.job.mapping, *every_config(instance)):
        config = read_config(mapping)
        try:
            plan = make_plan(config, topology)
            case = memory_case(plan, config)
        except ProblemsError:
            continue
        if case.ledger().fits:
            one = Candidate((config, plan, case))
            found.setdefault(one.alike, one)
    return [*found.values()]


def profile_of(rng: random.Random, instance: Instance) -> Profile:
    components = instance.job.plan.placement.components
    profile = (
        random_profile(rng)
        if instance.simulated
        else random_text_profile(rng, components)
    )
    if (
        rng.random() < 0.3
    ):  # no run has shown how a component moves: what needs it cannot be predicted
        gone = f"{rng.choice(components)}.move_"
        costs = {
            name: curve
            for name, curve in profile.costs.items()
            if not name.startswith(gone)
        }
        profile = dataclasses.replace(profile, costs=costs)
    return profile


def values(
    found: Sequence[Candidate],
    profile: Profile,
    objective: str,
    accelerators: Sequence[int],
) -> list[float]:
    """The values of all plans that can be predicted, the best first."""
    known = []
    for config, plan, case in found:
        used = len(plan.placement.used)
        if not accelerators or used in accelerators:
            prediction = predict(config, plan, case, profile)
            calls = {
                f"{call.slot.component}.{call.name}"
                for call in prediction.iterations[-1].calls
            }
            moves = {
                f"{call.replace(' ', '_')}/rest" for call in calls if ".move " in call
            }
            if moves <= {*profile.costs}:
                known.append(
                    prediction.seconds
                    * (used if objective == "accelerator_seconds" else 1)
                )
    return sorted(known)


@pytest.mark.parametrize(
    ("seed", "tries"),
    [
        pytest.param(40, 40, marks=pytest.mark.slow),
        *(pytest.param(seed, SLICE, marks=pytest.mark.slow) for seed in range(SLICES)),
    ],
)
def test_the_best_plan_is_that_of_all_configs_written_one_by_one(
    seed: int, tries: int
) -> None:
    rng, found_any, several = random.Random(seed), 0, 0
    for _ in range(tries // PROFILES):
        instance = random_instance(rng)
        found = candidates(instance)
        several += len(found) >= 10
        for _ in range(PROFILES):
            profile, objective = profile_of(rng, instance), rng.choice(OBJECTIVES)
            count = instance.each * instance.nodes
            accelerators = [rng.randint(1, count)] if rng.random() < 0.3 else []
            space = Space(
                instance.job.config,
                instance.job.plan,
                fixed=instance.fixed,
                accelerators=accelerators,
            )
            answer = Search(space, profile).run(objective=objective, keep=3)
            known = values(found, profile, objective, accelerators)
            told = (
                instance.job.view.name,
                instance.job.plan.placement.canonical(),
                instance.fixed,
                accelerators,
            )
            assert answer.proven, told
            assert [f.value for f in answer.found[:1]] == pytest.approx(
                known[:1], rel=1e-9
            ), told
            for other in answer.found[1:]:
                assert min(abs(other.value / value - 1.0) for value in known) < 1e-9, (
                    told
                )
            found_any += bool(known)
    assert several > tries // PROFILES // 3
    assert found_any > tries // 2


@pytest.mark.slow
def test_a_reward_that_begins_while_answers_are_generated_makes_another_plan() -> None:
    where = {"actor": 2, "critic": 2, "reference": 0, "reward": 2, "rollout": 0}
    words = [
        f"cluster.component_placement.{component}={number}"
        for component, number in where.items()
    ]
    cluster = (
        "cluster.num_nodes=1",
        "cluster.accelerators_per_node=3",
        "cluster.component_placement.env=cpu",
    )
    (composed,) = compose.with_hydra(
        ["--config-name", "rlhf_tiny", *SHORT, *words, *cluster]
    )
    fixed = [component for component in where if component != "reward"]
    instance, rng = (
        Instance(
            job=prepare_composed(composed), each=3, nodes=1, fixed=[*fixed, "env"]
        ),
        random.Random(5),
    )
    found = candidates(instance)
    for _ in range(8):
        profile = random_text_profile(rng, instance.job.plan.placement.components)
        space = Space(instance.job.config, instance.job.plan, fixed=instance.fixed)
        best = Search(space, profile).run(keep=1).best
        assert best is not None
        assert best.value == pytest.approx(
            values(found, profile, "seconds", ())[0], rel=1e-9
        )


AHEAD = (
    "cluster.component_placement.actor=0-1",
    "cluster.component_placement.rollout=2-3",
)


@pytest.mark.parametrize(
    ("objective", "many", "more"),
    [
        ("seconds", 1, ()),
        ("accelerator_seconds", 10**9, ()),
        ("seconds", 1, ("algorithm.max_staleness=1", *AHEAD)),
        pytest.param(
            *("seconds", 10**9, ("algorithm.max_staleness=2", *AHEAD)),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["as a whole", "message by message", "one ahead", "two ahead"],
)
def test_on_published_rates_the_best_plan_is_that_of_all_configs(
    objective: str,
    many: int,
    more: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(whole, "MANY", many)
    monkeypatch.setattr(ranks, "MANY", many)
    words = (
        "--config-name=grpo_qwen3_8b",
        "model@actor.model=smollm2",
        "cluster.nodes.0.accelerators=4",
        "algorithm.prompts=16",
        "algorithm.max_new_tokens=64",
        "runner.eval_every=0",
        "profile=published",
        *more,
    )
    (composed,) = compose.with_hydra(words)
    instance = Instance(job=prepare_composed(composed), each=4, nodes=1, fixed=["env"])
    job = instance.job
    profile = published_profile(job.config, job.plan, job.case)
    found = candidates(instance)
    assert len(found) > 20
    answer = Search(Space(job.config, job.plan, fixed=["env"]), profile).run(
        objective=objective, keep=3
    )
    known = values(found, profile, objective, ())
    assert answer.proven
    assert answer.best is not None
    assert answer.best.value == pytest.approx(known[0], rel=1e-9)

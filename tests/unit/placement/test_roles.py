"""Five roles in one config: what they ask of each other, their channels, and what each of them asks of memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rlplace.config.read import read_config
from rlplace.config.schema import Config
from rlplace.contract.planning import make_plan, memory_case
from rlplace.errors import PlacementError, Source
from rlplace.placement import Plan, Topology
from rlplace.placement.memory.demands import HostPart, Part, ScoringDemand
from rlplace.placement.memory.ledger import Load, MemoryCase
from rlplace.placement.memory.model import read_model
from rlplace.placement.memory.solve import find_remedies
from rlplace.placement.schedule import Residency
from rlplace.placement.transfers import transfers
from tests.unit.placement import memory_cases
from tests.unit.placement.memory_cases import held
from tests.unit.placement.test_llm_channels import MODEL

GIB = 1 << 30
ON = {"enable_offload": True}
ALL = dict.fromkeys(("actor", "critic", "reference", "reward", "rollout", "env"), "0-3")
RATIO = {"gpu_memory_utilization": 0.4}


def config(placement: dict[str, Any], *, task: bool = True, **blocks: Any) -> Config:
    """All leave the accelerators that they share, unless their own block is given."""
    asked = {
        "name": "ppo",
        "prompts": 6,
        "samples_per_prompt": 4,
        "max_prompt_length": 32,
        "max_new_tokens": 8,
    }
    mapping = {
        "cluster": {"component_placement": placement},
        "algorithm": asked | blocks.pop("algorithm", {}),
        "env": ON | ({"task": "arithmetic"} if task else {}),
        "rollout": ON | RATIO,
        **dict.fromkeys(("actor", "critic", "reference", "reward"), ON),
        **blocks,
        "actor": {"model": MODEL} | blocks.get("actor", ON),
    }
    return read_config(mapping)


def layout(
    config: Config, nodes: int = 1, sources: dict[str, Source] | None = None
) -> Plan:
    return make_plan(config, Topology.uniform(nodes, 4, "emulated", GIB), sources)


WITHOUT_CRITIC = {c: place for c, place in ALL.items() if c != "critic"}
WITHOUT_REFERENCE = {c: place for c, place in ALL.items() if c != "reference"}
LORA = {"actor": ON | {"lora_rank": 4}}


ON_ACTOR = {"critic": {"on_actor": True}}
PLACES = "cluster.component_placement"
SHARED = {"share_actor": True}
ELSEWHERE = {"url": "http://localhost:1"}
NUMERIC = {"function": "numeric"}
CONTRADICTIONS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (ALL, {"critic": ON | {"on_actor": True}}, "critic.on_actor"),
    (ALL, {"algorithm": {"name": "grpo"}}, f"{PLACES}.critic"),
    (WITHOUT_CRITIC, {"algorithm": {"name": "rloo"}} | ON_ACTOR, "critic.on_actor"),
    (
        WITHOUT_CRITIC,
        {"critic": {"on_actor": True, "warmup_iterations": 2}},
        "critic.warmup_iterations",
    ),
    (ALL, LORA | {"reference": ON | SHARED}, "reference.share_actor"),
    (WITHOUT_REFERENCE, {"reference": SHARED}, "reference.share_actor"),
    (
        WITHOUT_REFERENCE,
        LORA | {"reference": SHARED | {"refresh_every": 3}},
        "reference.refresh_every",
    ),
    (
        ALL,
        {
            "reference": ON
            | {"refresh_every": 3, "model": MODEL | {"num_hidden_layers": 1}}
        },
        "reference.model",
    ),
    (ALL, {"algorithm": {"kl_target": 0.1}}, "algorithm.kl_target"),
    (
        ALL,
        {"algorithm": {"kl_coef": 0.1, "kl_in": "loss"}},
        "algorithm.kl_estimator",
    ),  # k1 holds nothing back there
    (ALL | {"reward": "cpu"}, {"reward": NUMERIC | ELSEWHERE}, "reward.url"),
    (ALL, {"reward": {}}, f"{PLACES}.reward"),  # a model, a function, an endpoint?
    (
        ALL | {"reward.math": "cpu"},
        {"reward": {"math": {"function": "score"}}},
        f"{PLACES}.reward",
    ),
]


@pytest.mark.parametrize(
    ("placement", "blocks", "key", "code"),
    [
        *((*contradiction, "roles-contradict") for contradiction in CONTRADICTIONS),
        (WITHOUT_CRITIC, {}, f"{PLACES}.critic", "critic-missing"),
        (
            WITHOUT_REFERENCE,
            {"algorithm": {"kl_coef": 0.01}},
            "algorithm.kl_coef",
            "reference-missing",
        ),
        (ALL, {"reward": ON | ELSEWHERE}, f"{PLACES}.reward", "needs-no-accelerators"),
        (ALL, {"reward": ON | NUMERIC}, f"{PLACES}.reward", "needs-no-accelerators"),
        (
            ALL | {"reward": "cpu"},
            {"reward": {"maths": {}}},
            "reward.maths",
            "unknown-component",
        ),
    ],
)
def test_contradictions_are_refused(
    placement: dict[str, Any], blocks: dict[str, Any], key: str, code: str
) -> None:
    with pytest.raises(PlacementError) as caught:
        layout(
            config(placement, **blocks), sources={key: Source(file="a.yaml", line=7)}
        )
    found = {p.key: p for p in caught.value.problems}
    assert found[key].code == code
    assert str(found[key].source) == "a.yaml:7"
    assert found[key].why
    assert found[key].fix


@pytest.mark.parametrize(
    "line", ["0-1:0-3", {"placement": "0-1", "ranks_per_accelerator": 2}], ids=str
)
@pytest.mark.parametrize("component", ["actor", "critic", "reference", "reward"])
def test_ranks_that_compute_together_have_a_gpu_each(
    component: str, line: object
) -> None:
    """On emulated accelerators they are processes of the host, and so are all others on GPUs."""
    asked = config(ALL | {component: line})
    layout(asked)
    with pytest.raises(PlacementError) as caught:
        make_plan(asked, Topology.uniform(1, 4, "cuda", GIB))
    assert [(p.code, p.key) for p in caught.value.problems] == [
        ("ranks-share-gpu", f"{PLACES}.{component}")
    ]
    assert (caught.value.problems[0].fix or "").startswith(f"{component}: 0-1 ")
    make_plan(
        config(ALL | {component: "0-1", "env": "0-1:0-3"}),
        Topology.uniform(1, 4, "cuda", GIB),
    )


@pytest.mark.parametrize(
    ("placed", "block", "text"),
    [
        (
            {"reward.math": "cpu"},
            "maths",
            "no such component is placed, did you mean 'math'? | placed are reward.math | math: ...",
        ),
        (
            {"reward.math": "cpu"},
            "safety",
            "no such component is placed | placed are reward.math | "
            "cluster.component_placement: {reward.safety: ...}        (or remove the block)",
        ),
        (
            {},
            "math",
            "no such component is placed | placed are no rewards | "
            "cluster.component_placement: {reward.math: ...}        (or remove the block)",
        ),
    ],
)
def test_a_block_of_a_reward_that_is_not_placed(
    placed: dict[str, str], block: str, text: str
) -> None:
    others = {c: place for c, place in ALL.items() if c != "reward"}
    blocks: dict[str, Any] = {
        name.partition(".")[2]: {"function": "score"} for name in placed
    }
    with pytest.raises(PlacementError) as caught:
        layout(config(others | placed, reward=blocks | {block: {}}))
    found = {p.key: p for p in caught.value.problems}[f"reward.{block}"]
    assert f"{found.what} | {found.why} | {found.fix}" == text


def test_rewards_that_share_a_block_stay_by_its_key() -> None:
    """The key of a fix exists: for `reward.math`, it is that of the block that it shares with others."""
    placement = WITHOUT_CRITIC | {
        "critic": "0-3",
        "reward.math": "0-3",
        "reward.safety": "0-1",
    }
    del placement["reward"]
    shared = {"reward": {"enable_offload": False}}
    with pytest.raises(PlacementError) as caught:
        layout(
            config(placement, **shared),
            sources={"reward.enable_offload": Source(file="a.yaml", line=7)},
        )
    assert [(p.code, p.key, str(p.source)) for p in caught.value.problems] == [
        ("residents-clash", "reward.enable_offload", "a.yaml:7")
    ] * 2
    blocks = {name: {"enable_offload": False} for name in ("math", "safety")}
    with pytest.raises(PlacementError) as caught:
        layout(config(placement, reward=blocks))
    assert [p.key for p in caught.value.problems] == [
        "reward.math.enable_offload",
        "reward.safety.enable_offload",
    ]


def test_remedies_of_rewards_that_share_a_block_are_those_of_the_block() -> None:
    placement = WITHOUT_CRITIC | {
        "critic": "0-3",
        "reward.math": "0-3",
        "reward.safety": "0-3",
    }
    del placement["reward"]
    shared = case(
        config(placement, reward=ON | {"token_budget": 1 << 22, "dtype": "fp32"})
    )
    (remedy, *_) = find_remedies(shared)
    assert remedy.fix.startswith("reward.token_budget: ")
    assert remedy.enough
    for demand in (
        remedy.case.demands["reward.math"],
        remedy.case.demands["reward.safety"],
    ):
        assert isinstance(demand, ScoringDemand)
        assert remedy.fix.endswith(f": {demand.block.token_budget}")
    assert not any(r.fix.startswith("reward.math") for r in find_remedies(shared))


def test_ranks_of_partners_need_not_match_in_a_run() -> None:
    """Groups are scattered over the ranks that score them, whatever their number."""
    uneven = ALL | {"critic": "0-1", "reward": "0-2"}
    assert layout(config(uneven)).schedule.active["infer 2"] == ("reward",)
    with pytest.raises(PlacementError, match="uneven-partners"):
        layout(config(uneven, task=False))


def test_what_is_planned_only_may_lack_components() -> None:
    planned = layout(config(WITHOUT_CRITIC, task=False))
    assert planned.channels == ()
    assert [s for s in planned.schedule.stages if s.startswith("infer")] == [
        "infer 1",
        "infer 2",
        "infer 3",
    ]
    with pytest.raises(PlacementError, match="roles-contradict"):
        layout(config(ALL, task=False, critic=ON | {"on_actor": True}))


def test_every_scorer_gets_the_samples_and_sends_scores() -> None:
    plan = layout(config(ALL))
    channels = {c.name: (c.source, c.target, c.capacity_items) for c in plan.channels}
    assert channels == {
        "requests": ("env", "rollout", 6 + 4),
        "completions": ("rollout", "env", 6 * 4 + 4),
        "samples": ("env", "actor", 6),
        "weights": ("actor", "rollout", 8),
        "samples.critic": ("env", "critic", 6),
        "scores.critic": ("critic", "actor", 24),
        "samples.reference": ("env", "reference", 6),
        "scores.reference": ("reference", "actor", 24),
        "samples.reward": ("env", "reward", 6),
        "scores.reward": ("reward", "actor", 24),
        "returns": ("actor", "critic", 6),
    }
    assert {(j.name, j.source, j.target) for j in transfers(plan)} == {
        (name.partition(".")[0], source, target)
        for name, (source, target, _) in channels.items()
    }
    refreshed = layout(config(ALL, reference=ON | {"refresh_every": 2}))
    (weights,) = (c for c in refreshed.channels if c.name == "weights.reference")
    assert [
        j.amount.split()[0] for j in transfers(refreshed) if j.name == "weights"
    ] == ["a", "1"]
    assert (weights.source, weights.target, weights.keys) == (
        "actor",
        "reference",
        ("0", "1", "2", "3"),
    )
    assert refreshed.schedule.active["sync"] == ("actor", "rollout", "reference")


def test_the_actor_infers_where_the_algorithm_asks_for_it() -> None:
    scored = {"actor": "0-1", "env": "2-3", "rollout": "2-3", "reference": "0-1"}
    grpo = {"name": "grpo", "kl_coef": 0.01}
    assert (
        "infer"
        not in layout(
            config(scored, algorithm=grpo | {"kl_in": "loss", "kl_estimator": "k3"})
        ).schedule.active
    )
    active = layout(
        config(scored, algorithm=grpo | {"kl_in": "reward"})
    ).schedule.active
    assert active["infer"] == ("actor",)
    assert active["rollout"] == ("env", "rollout", "reference")
    plain = {"actor": "0-1", "env": "2-3", "rollout": "2-3"}
    assert layout(config(plain, algorithm={"name": "grpo"})).schedule.stages == (
        "sync",
        "rollout",
        "learn",
    )
    shared = config(
        plain,
        algorithm=grpo | {"kl_in": "loss", "kl_estimator": "k3"},
        **LORA,
        reference={"share_actor": True},
    )
    assert layout(shared).schedule.active["infer"] == ("actor",)


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def case(config: Config, nodes: int = 1) -> MemoryCase:
    return memory_case(layout(config, nodes), config)


def at(case: MemoryCase, stage: str, *, host: bool = False) -> Load:
    ledger = case.ledger()
    return memory_cases.at((ledger.hosts if host else ledger.accelerators)[0], stage)


def test_each_turn_holds_its_own() -> None:
    asked = case(config(ALL))
    turns = {
        "infer 1": "reference",
        "infer 2": "reward",
        "infer 3": "actor",
        "infer 4": "critic",
        "learn 2": "actor",
    }
    for stage, component in turns.items():
        assert {hold.component for hold in at(asked, stage).holds} == {component}


def test_a_scorer_that_runs_in_rollout_is_counted_there() -> None:
    asked = case(
        config(
            {
                "actor": "0",
                "critic": "0",
                "rollout": "1",
                "env": "1",
                "reference": "2",
                "reward": "3",
            }
        )
    )
    (reference,) = [a for a in asked.ledger().accelerators if 2 in a.numbers]
    loads = {str(load.moment): load for load in reference.loads}
    assert held(loads["rollout"], "reference", Part.ACTIVATIONS) > 0
    assert held(loads["infer 1"], "reference", Part.ACTIVATIONS) == 0


def test_weights_on_the_host_come_layer_by_layer() -> None:
    whole = case(config(ALL, reference=ON | {"sharded": False}))
    hosted = case(config(ALL, reference=ON | {"sharded": False, "on_host": True}))
    size = held(at(whole, "infer 1"), "reference", Part.PARAMETERS)
    assert size > 0
    assert held(at(hosted, "infer 1"), "reference", Part.PARAMETERS) == 0
    assert held(at(hosted, "infer 1"), "reference", Part.GATHERED) > 0
    for stage in ("rollout", "infer 1", "learn 2"):  # 4 ranks, each with all of it
        assert (
            held(at(hosted, stage, host=True), "reference", HostPart.WEIGHTS)
            == 4 * size
        )


def test_a_reward_on_a_node_holds_host_memory_only() -> None:
    asked = case(config(ALL | {"reward": "cpu"}))
    assert all(
        hold.component != "reward"
        for a in asked.ledger().accelerators
        for load in a.loads
        for hold in load.holds
    )
    assert held(at(asked, "rollout", host=True), "reward", HostPart.WEIGHTS) > 0
    scoring = case(
        config(ALL | {"reward": "cpu"}, reward={"url": "http://localhost:1"})
    )
    assert held(at(scoring, "rollout", host=True), "reward", HostPart.WEIGHTS) == 0
    assert not any("reward" in note for note in scoring.ledger().notes)


def test_rewards_have_models_of_their_own() -> None:
    placement = {c: p for c, p in ALL.items() if c != "reward"} | {
        "reward.small": "0-3",
        "reward.large": "0-3",
    }
    large = {k: v for k, v in MODEL.items() if k != "path"} | {"num_hidden_layers": 8}
    asked = case(
        config(placement, reward={"small": ON, "large": ON | {"model": large}})
    )
    ledger = asked.ledger()
    assert ledger.bytes("reward.large", Residency.FULL) > 2 * ledger.bytes(
        "reward.small", Residency.FULL
    )
    assert asked.schedule().active["infer 2"] == ("reward.small",)


def test_an_average_lives_on_the_host_and_a_head_on_the_actor() -> None:
    plain, averaged = (
        case(config(ALL)),
        case(config(ALL, actor=ON | {"ema_decay": 0.99})),
    )
    before, after = (at(of, "rollout", host=True) for of in (plain, averaged))
    average = held(after, "actor", HostPart.AVERAGE)
    copied = held(after, "actor", HostPart.CHECKPOINT) - held(
        before, "actor", HostPart.CHECKPOINT
    )
    assert copied >= average > 0  # it is saved as well
    assert after.total_bytes - before.total_bytes == average + copied
    headed = case(config(WITHOUT_CRITIC, critic={"on_actor": True}))
    assert headed.ledger().bytes("actor", Residency.FULL) > plain.ledger().bytes(
        "actor", Residency.FULL
    )


def test_hosts_keep_copies_for_checkpoints_where_there_is_room_for_them() -> None:
    def asked(host_bytes: int = 0) -> MemoryCase:
        written = config(ALL, reference=ON | {"refresh_every": 2})
        (node,) = Topology.uniform(1, 4, "emulated", GIB).nodes
        topology = Topology((dataclasses.replace(node, host_memory_bytes=host_bytes),))
        return memory_case(make_plan(written, topology), written)

    def copied(case: MemoryCase) -> list[int]:
        load = at(case, "rollout", host=True)
        return [
            held(load, c, HostPart.CHECKPOINT)
            for c in ("actor", "critic", "reference", "reward")
        ]

    behind = asked()
    assert behind.copies_checkpoints
    assert all(copied(behind)[:3])
    assert copied(behind)[3] == 0
    needed = max(load.total_bytes for load in behind.ledger().hosts[0].loads)
    assert copied(asked(needed)) == copied(behind)
    tight = asked(needed - 1)
    files = copied(tight)  # that are being written, twice
    assert all(
        0 < file < whole
        for file, whole in zip(files[:3], copied(behind)[:3], strict=True)
    )
    assert not tight.copies_checkpoints
    assert tight.ledger().fits
    assert any("no room for copies" in note for note in tight.ledger().notes)


def test_shared_memory_counts_what_is_said_of_samples() -> None:
    grpo = {c: p for c, p in ALL.items() if c not in ("critic", "reference", "reward")}
    alone = case(config(grpo, algorithm={"name": "grpo"})).ledger().shared_bytes(0)
    assert case(config(ALL)).ledger().shared_bytes(0) > alone + 6 * 4 * 13 * 40


def test_a_reference_that_is_refreshed_gets_the_whole_of_it_on_each_rank() -> None:
    def received(**reference: Any) -> int:
        written = config(ALL, reference=ON | {"dtype": "fp32"} | reference)
        holds = memory_case(layout(written), written).ledger().hosts[0].loads[0].holds
        return sum(hold.size_bytes for hold in holds if hold.part is HostPart.RECEIVED)

    weights = 2 * 4 * read_model(MODEL).parameters  # bfloat16, on each of 4 ranks
    assert (
        received(refresh_every=2) == received(refresh_every=2, model=MODEL) == weights
    )
    assert received() == 0

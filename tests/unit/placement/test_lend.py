"""Accelerators lent to rollout while their component waits: who is where and resident when, and what cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rlplace.config.compose import with_hydra
from rlplace.config.read import read_config
from rlplace.contract.planning import memory_case
from rlplace.errors import ConfigError, PlacementError, Problem
from rlplace.foresight.space import Space
from rlplace.placement import HybridComponentPlacement, Plan
from rlplace.placement.memory.ledger import Moment
from rlplace.placement.schedule import Residency
from rlplace.placement.show.explain import explain_accelerator, explain_component
from rlplace.placement.show.svg import render_svg
from rlplace.placement.show.text import render_text
from rlplace.placement.show.view import render_json
from rlplace.placement.transfers import count_traffic
from rlplace.runtime.prepare import prepare, prepare_composed
from tests.unit.placement.placing import EIGHT
from tests.unit.placement.reports import shown
from tests.unit.placement.test_llm_channels import MODEL, layout

OFF, WEIGHTS, FULL = Residency
APART = {"actor": "0-1", "env": "cpu", "rollout": "2-3"}
TO_ROLLOUT = {"actor": "rollout"}
LENT = "rollout (lent)"


def lending(
    placement: dict[str, Any],
    lend: Mapping[str, str | None] = TO_ROLLOUT,
    algorithm: dict[str, Any] | None = None,
    **blocks: Any,
) -> Any:
    asked = {
        "name": "grpo",
        "prompts": 6,
        "samples_per_prompt": 4,
        "max_prompt_length": 32,
        "max_new_tokens": 8,
    }
    mapping = {
        "cluster": {"component_placement": placement, "lend": lend},
        "algorithm": asked | (algorithm or {}),
        "env": {"task": "arithmetic", "enable_offload": True},
        "actor": {"model": MODEL, "enable_offload": True} | blocks.pop("actor", {}),
        "rollout": {"enable_offload": True} | blocks.pop("rollout", {}),
        **blocks,
    }
    return read_config(mapping)


def plan_of(*args: Any, **blocks: Any) -> Plan:
    return layout(lending(*args, **blocks))


def problems(*args: Any, **blocks: Any) -> tuple[Problem, ...]:
    with pytest.raises(PlacementError) as caught:
        plan_of(*args, **blocks)
    return caught.value.problems


def residencies(plan: Plan, part: str) -> list[Residency]:
    return [plan.schedule.residency[stage][part] for stage in plan.schedule.stages]


def test_further_ranks_are_behind_those_of_its_own() -> None:
    placement = plan_of(APART).placement
    slots = [slot.accelerators for slot in placement.slots("rollout")]
    assert slots == [(2,), (3,), (0,), (1,)]
    spec = placement.spec("rollout")
    assert (spec.own_ranks, spec.lent_ranks, spec.lenders) == (range(2), 2, ("actor",))
    assert str(spec.own_accelerators) == "2-3"
    assert str(spec.lent_accelerators) == "0-1"
    # The line of the config, since cluster.lend adds the rest
    assert spec.render() == "2-3"


def test_only_the_lent_ranks_leave() -> None:
    plan = plan_of(APART)
    assert plan.schedule.stages == ("sync", "rollout", "learn")
    assert residencies(plan, "actor") == [WEIGHTS, OFF, FULL]
    assert residencies(plan, "rollout") == [FULL, FULL, FULL]
    assert residencies(plan, LENT) == [WEIGHTS, FULL, OFF]
    assert {
        m.component for e in plan.schedule.entries.values() for m in e.releases
    } == {
        "actor",
        LENT,
    }
    # Each component works once, whatever its parts are
    assert plan.schedule.active["rollout"] == ("env", "rollout")


def test_lent_ranks_get_weights_and_requests_as_all_others_do() -> None:
    plan = plan_of(APART)
    assert [delivery.readers for delivery in plan.deliveries] == [(0, 1, 2, 3)]
    requests = next(c for c in plan.channels if c.name == "requests")
    assert requests.capacity_items == 6 + 4


def test_the_proof_counts_lent_ranks_where_and_when_they_are_resident() -> None:
    asked = lending(APART)
    plan = layout(asked)
    ledger = memory_case(plan, asked).ledger()
    lent, own = ledger.accelerators
    assert (str(lent.numbers), str(own.numbers)) == ("0-1", "2-3")

    def held(account: Any, stage: str, component: str) -> int:
        load = next(m for m in account.loads if m.moment == Moment(stage=stage))
        return int(load.of(component))

    assert held(lent, "rollout", "actor") == held(lent, "learn", "rollout") == 0
    assert held(lent, "rollout", "rollout") == held(own, "rollout", "rollout") > 0
    assert held(lent, "learn", "actor") > 0
    assert held(own, "learn", "rollout") > 0


def test_ranks_of_several_accelerators_borrow_as_many_each() -> None:
    plan = plan_of(
        {"actor": "0-1", "env": "cpu", "rollout": {"placement": "2-3:0"}},
        rollout={"engine": "vllm", "dtype": "bf16"},
    )
    assert [s.accelerators for s in plan.placement.slots("rollout")] == [(2, 3), (0, 1)]


def test_two_lenders_of_the_same_accelerators_lend_them_once() -> None:
    placement = HybridComponentPlacement(
        {
            "component_placement": {"actor": "0-3", "critic": "0-5", "rollout": "6-7"},
            "lend": {"actor": "rollout", "critic": "rollout"},
        },
        EIGHT,
    )
    accelerators = [slot.accelerators[0] for slot in placement.slots("rollout")]
    assert accelerators == [6, 7, 0, 1, 2, 3, 4, 5]
    assert placement.spec("rollout").lenders == ("actor", "critic")


def test_the_plan_shows_what_is_lent() -> None:
    plan = plan_of(APART)
    text = render_text(shown(plan))
    assert "2-3, and 0-1 lent by actor" in text
    assert "rollout (lent)  2 3 . ." in text
    assert "rollout (lent) full->off | actor off->full" in text
    assert "rollout (lent)" in render_svg(shown(plan))
    components = render_json(shown(plan))["components"]
    assert components["rollout"]["lent"] == {
        "accelerators": "0-1",
        "ranks": 2,
        "lenders": ["actor"],
    }
    assert "lent" not in components["actor"]
    assert "when, of the 2 ranks on 0-1" in explain_component(shown(plan), "rollout")
    used = explain_accelerator(shown(plan), 0)
    assert "learn" in used
    assert "off, 0 bytes" in used


def test_bytes_of_moves_are_those_of_the_ranks_that_move() -> None:
    asked = lending(APART, rollout={"sleep_level": 1})
    few = prepared_traffic(asked)
    everywhere = lending({**APART, "rollout": "0-3"}, {}, rollout={"sleep_level": 1})
    assert few < prepared_traffic(everywhere)


def prepared_traffic(asked: Any) -> int:
    plan = layout(asked)
    return count_traffic(plan, memory_case(plan, asked).ledger()).to_host_bytes


# ── what cannot be ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("placement", "lend", "said"),
    [
        (APART, {"actor": "env"}, "env cannot work on accelerators of actor"),
        (APART, {"env": "rollout"}, "env works while rollout generates"),
        (
            {**APART, "rollout": "0-3"},
            TO_ROLLOUT,
            "has all accelerators of actor already",
        ),
        (
            {"actor": "0", "env": "cpu", "rollout": "2-3:0"},
            TO_ROLLOUT,
            "accelerators 0 of actor cannot be divided into ranks of rollout",
        ),
    ],
)
def test_an_entry_that_cannot_be_is_left_out_by_its_fix(
    placement: dict[str, Any], lend: dict[str, str], said: str
) -> None:
    vllm = {"engine": "vllm", "dtype": "bf16"}
    (problem,) = problems(placement, lend, rollout=vllm)
    assert (problem.code, problem.key) == ("cannot-lend", "cluster.lend")
    assert said in problem.render()
    (lender,) = lend
    assert problem.fix == f"cluster.lend.{lender}: null"
    plan_of(placement, {lender: None}, rollout=vllm)


def test_names_of_components_are_known() -> None:
    (problem,) = problems(APART, {"actor": "rolout"})
    assert problem.code == "unknown-component"
    assert problem.fix == "cluster.lend: {actor: rollout}"
    (problem,) = problems(APART, {"xyz": "rollout"})
    assert "no component is called 'xyz'" in problem.what


def test_both_have_to_leave_for_each_other() -> None:
    (problem,) = problems(APART, actor={"enable_offload": False})
    assert (problem.code, problem.key) == ("residents-clash", "actor.enable_offload")
    (problem,) = problems(APART, rollout={"enable_offload": False})
    assert (problem.code, problem.key) == ("residents-clash", "rollout.enable_offload")
    assert "in stages sync and learn, actor needs accelerators 0-1" in str(problem.why)


def test_simulators_lend_nothing() -> None:
    (composed,) = with_hydra(
        [
            "--config-name",
            "disaggregated_ppo",
            "cluster=laptop",
            "cluster.lend={actor: rollout}",
        ]
    )
    with pytest.raises(PlacementError) as caught:
        prepare(composed.mapping)
    assert [p.code for p in caught.value.problems] == ["cannot-lend"]


def test_what_does_not_fit_is_refused_with_lines_that_make_it_fit() -> None:
    """The actor stays beside ranks that borrow its accelerators: too much for 2100 MiB, where it fits alone."""
    words = [
        "--config-name",
        "disaggregated_grpo_llm",
        "cluster.accelerator.kind=emulated",
        "cluster.accelerator.memory=2100MiB",
        "cluster.lend={actor: rollout}",
        "rollout.kv_cache_memory=1200MiB",
        "actor.enable_offload=false",
        "cluster.allow_resident=[actor]",
    ]
    (composed,) = with_hydra(words)
    (problem,) = prepare(composed.mapping).view.shortages
    assert problem.code == "does-not-fit"
    assert "accelerators 0-1 are too small" in problem.what
    lines = str(problem.fix).splitlines()
    first = lines[0].partition("  ")[0]
    assert first == "actor.enable_offload: true"
    assert "or: cluster.lend.actor: null" in str(problem.fix)
    for line in (["actor.enable_offload=true"], ["cluster.lend.actor=null"]):
        (mended,) = with_hydra(words + line)
        assert not prepare(mended.mapping).view.shortages


# ── while rollout runs ahead of learning ─────────────────────────────────────────────────────────────────────────────


def test_lent_ranks_leave_though_the_others_go_on() -> None:
    plan = plan_of(APART, algorithm={"max_staleness": 1})
    assert residencies(plan, "actor") == [WEIGHTS, OFF, FULL]
    assert residencies(plan, "rollout") == [FULL, FULL, FULL]
    assert residencies(plan, LENT) == [WEIGHTS, FULL, OFF]


def test_generation_is_at_most_one_version_ahead() -> None:
    (problem,) = problems(APART, algorithm={"max_staleness": 2})
    assert (problem.code, problem.key) == ("lends-ahead", "algorithm.max_staleness")
    assert problem.fix == "algorithm.max_staleness: 1"


# ── a search ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_search_is_refused() -> None:
    asked = lending(APART)
    with pytest.raises(ConfigError) as caught:
        Space(asked, layout(asked))
    (problem,) = caught.value.problems
    assert (problem.code, problem.fix) == ("cannot-lend", "cluster.lend.actor: null")


def test_a_run_that_searches_is_refused() -> None:
    words = ["--config-name", "disaggregated_grpo_llm", "cluster.lend={actor: rollout}"]
    (composed,) = with_hydra(
        [*words, "cluster.elastic=on", "runner.total_iterations=50"]
    )
    with pytest.raises(ConfigError) as caught:
        prepare_composed(composed)
    (problem,) = caught.value.problems
    assert (problem.code, problem.key) == ("bad-elastic", "cluster.elastic.mode")
    assert problem.fix == "mode: off        (or remove cluster.lend)"

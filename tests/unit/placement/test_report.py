"""Everything that is computed from a plan: savings, traffic, what fits; as text and as plain values."""

from __future__ import annotations

import re

import pytest

from rlplace.config.blocks.machines import ClusterConfig
from rlplace.errors import ConfigError, PlacementError, Source
from rlplace.placement import Topology
from rlplace.placement.flow import Transport
from rlplace.placement.memory.solve import Knob, render_solution
from rlplace.placement.plan import plan_components
from rlplace.placement.schedule import Needs, Residency
from rlplace.placement.show.explain import explain_component
from rlplace.placement.show.html import render_html
from rlplace.placement.show.text import render_diff, render_text
from rlplace.placement.show.view import render_json
from rlplace.placement.transfers import transfers
from rlplace.runtime.prepare import prepare
from tests.unit.placement.reports import (
    APART,
    H100,
    LLAMA_8B,
    llm,
    llm_mapping,
    ppo,
    shown,
)

GIB = 1 << 30
MODEL_BYTES = 8_030_261_248 * 2  # Llama-3-8B in bf16
ALL = dict.fromkeys(("actor", "critic", "reference", "reward", "rollout"), "0-7")


def test_where_no_component_shares_nothing_is_saved() -> None:
    text = render_text(ppo(APART, offload=False))
    assert (
        "savings: none, every component has accelerators of its own (actor 4 + env 2 + rollout 2 = 8)"
        in text
    )


def test_traffic_counts_copies_of_weights_and_what_hosts_keep() -> None:
    report = llm(ALL)
    assert report.traffic.weights_bytes == {Transport.SAME_ACCELERATOR: 8 * MODEL_BYTES}
    assert report.traffic.to_host_bytes == report.traffic.from_host_bytes > 100 * GIB
    assert "one sync, same_accelerator" in render_text(report)
    apart = llm(ALL | {"rollout": "8-15"}, cluster={"nodes": [H100 | {"count": 2}]})
    assert apart.traffic.weights_bytes == {Transport.NETWORK: 8 * MODEL_BYTES}
    two_each = llm({"actor": "0-7", "rollout": "0-7:0-3"}).traffic.weights_bytes[
        Transport.SAME_ACCELERATOR
    ]
    assert two_each == pytest.approx(4 * MODEL_BYTES, rel=1e-3), (
        "a copy is cut over the accelerators of its rank"
    )


def test_declared_rates_give_the_least_seconds_and_tensor_parallelism_between_nodes_is_warned_of() -> (
    None
):
    rates = {"nvlink_gb_per_s": 450, "pcie_gb_per_s": 50, "network_gb_per_s": 50}
    cluster = {"nodes": [H100 | {"count": 2} | rates]}
    apart = llm(ALL | {"rollout": "8-15"}, cluster=cluster)
    assert apart.traffic.least_s["network"] == pytest.approx(
        MODEL_BYTES / 50e9
    )  # a whole copy to each of 8
    assert f"at least {MODEL_BYTES / 50e9:.2g} s" in render_text(apart)
    moved = llm(ALL, cluster=cluster).traffic
    assert moved.least_s["to_host"] == pytest.approx(moved.to_host_bytes / 8 / 50e9)
    assert (
        llm(
            ALL | {"rollout": "8-15"}, cluster={"nodes": [H100 | {"count": 2}]}
        ).traffic.least_s
        == {}
    )
    wide = {
        "placement": "0-15",
        "tensor_parallel_size": 16,
        "tensor_parallel_across_nodes": True,
    }
    (warning,) = (
        w
        for w in llm(ALL | {"rollout": wide}, cluster=cluster).plan.warnings
        if "leaves" in w.what
    )
    assert warning.code == "tensor-parallel-leaves-node"
    assert "at 50 GB/s, 9 times slower than NVLink" in str(warning.why)


def test_explain_says_the_seconds_of_moves_and_of_a_sync_where_rates_are_declared() -> (
    None
):
    rates = {"nvlink_gb_per_s": 450, "pcie_gb_per_s": 50, "network_gb_per_s": 50}
    apart = llm(
        ALL | {"rollout": "8-15"}, cluster={"nodes": [H100 | {"count": 2} | rates]}
    )
    assert (
        f"{MODEL_BYTES / 50e9:.2g} s   120 GiB of weights, network"
        in explain_component(apart, "actor")
    )
    moved = llm(ALL, cluster={"nodes": [H100 | {"count": 2} | rates]})
    per_rank = moved.ledger.host_bytes(
        "critic", Residency.OFF
    ) - moved.ledger.host_bytes("critic", Residency.FULL)
    assert (
        f"{per_rank / 50e9:.2g} s   copies between accelerators and hosts"
        in explain_component(moved, "critic")
    )
    assert "takes at least" not in explain_component(llm(ALL), "critic")


def test_what_is_counted_in_part_is_not_known_to_fit() -> None:
    """The critic's model alone is declared: the others are left out."""
    partly = llm(
        {"actor": "0-3", "critic": "4-7", "rollout": "0-3"},
        model=None,
        critic={"model": LLAMA_8B},
    )
    assert partly.fits
    text = render_text(partly)
    assert (
        "memory: not known of actor, rollout, the others fit; tightest accelerators 4-7"
        in text
    )
    record = render_json(partly)["memory"]
    assert (record["known"], record["uncounted"]) == (False, ["actor", "rollout"])
    assert "memory not known" in render_html(partly)
    assert render_json(llm(ALL))["memory"]["known"]


def test_the_reserve_has_a_line_of_its_own() -> None:
    text, record = (
        render_text(llm(ALL)),
        render_json(llm(ALL))["memory"]["accelerators"][0],
    )
    assert "  reserve: 3.2 GiB of each stays free (memory.reserve)" in text
    assert "GiB of 76.8 GiB (80 GiB less 3.2 GiB reserve)" in text
    assert record["reserve_bytes"] == round(record["capacity_bytes"] / 25)
    assert record["margin_bytes"] == round(record["capacity_bytes"] * 24 / 25) - max(
        moment["total_bytes"] for moment in record["moments"]
    )
    assert "reserve:" not in render_text(llm(ALL, memory={"reserve": 0}))
    assert "reserve:" not in render_text(ppo())


def test_transfers_are_named_for_every_kind_of_job() -> None:
    assert [j.name for j in transfers(ppo().plan)] == [
        "observations",
        "trajectories",
        "weights",
    ]
    found = transfers(llm(ALL, algorithm={"name": "ppo", "prompts": 8}).plan)
    samples = [
        ("samples", component, "8 samples")
        for component in ("actor", "critic", "reference", "reward")
    ]
    assert [(j.name, j.target, j.amount) for j in found] == [
        *samples,
        ("weights", "rollout", "8 copies"),
    ]
    assert transfers(llm({"actor": "0", "rollout": "1"}).plan)[0].amount == "1 copy"


def test_what_does_not_fit_is_no_error_but_is_said() -> None:
    report = llm(ALL, actor={"enable_offload": True, "micro_batch": 64})
    assert not report.fits
    assert [p.code for p in report.shortages] == ["does-not-fit"]
    assert render_json(report)["shortages"][0]["code"] == "does-not-fit"
    assert "memory: does not fit" in render_text(report)


def test_a_job_without_accelerators_has_nothing_to_compare() -> None:
    on_nodes = {"node_group": "node", "placement": "0"}
    report = llm({"actor": on_nodes, "rollout": on_nodes, "agent": on_nodes})
    assert report.comparison is None
    text = render_text(report)
    assert re.search(r"actor +1 +no accelerator +cpu", text)
    assert "savings" not in text
    assert render_json(report)["savings"] is None
    assert "0 of 8" in render_diff(report, report)
    assert "memory not known" in render_html(report)
    assert "no accelerator is used" in render_solution(
        report.case, Knob.MICRO_BATCH, None, None
    )
    assert (
        "sync needs only its weights; it stays, on no accelerator"
        in explain_component(report, "actor")
    )


def test_many_kinds_of_node_end_somewhere() -> None:
    sizes = [1 + i % 2 for i in range(12)]
    many = ppo(
        dict.fromkeys(("actor", "env", "rollout"), "all"),
        nodes=[{"accelerators": n} for n in sizes],
        envs=36,
    )
    assert "... and 4 more kinds of node" in render_text(many)


def test_a_node_too_wide_for_the_page_has_no_map() -> None:
    wide = {"actor": "0-63", "env": "0-31", "rollout": "32-63"}
    text = render_text(ppo(wide, nodes=[{"accelerators": 64, "memory": "16GiB"}]))
    assert "each number is a rank" not in text
    assert re.search(r"actor +64 +1 accelerator +0-63", text)
    assert "each number is a rank" in render_text(ppo())


def test_a_component_without_partners_has_no_routes() -> None:
    needs = Needs(stages=("rollout",), residency={"rollout": {"agent": Residency.FULL}})
    alone = plan_components(
        ClusterConfig(component_placement={"agent": "0-1"}),
        Topology.uniform(1, 2),
        needs=needs,
    )
    text = render_text(shown(alone))
    assert re.search(r"agent +2 +1 accelerator +0-1", text)
    assert "routes" not in text


def test_a_long_placement_is_shown_whole() -> None:
    placement = {
        "placement": "0,2,4-7,9,11,13-14,16-18,20-23,25,27-28,30,32-39",
        "tensor_parallel_size": 1,
    }
    long = {
        **placement,
        "ranks_per_accelerator": 2,
        "tensor_parallel_across_nodes": True,
    }
    text = render_text(
        llm(
            {"actor": "0-39", "rollout": long}, cluster={"nodes": [H100 | {"count": 5}]}
        )
    )
    shown = " ".join(
        text.partition("where each component is")[2].partition("\n\n")[0].split()
    )
    assert "tensor_parallel_across_nodes: true}" in shown
    assert "32-39:" in shown


def test_problems_of_models_and_of_memory_name_the_line_that_they_are_about() -> None:
    sources = {
        key: Source(file="job.yaml", line=line)
        for line, key in enumerate(
            (
                "cluster.component_placement",
                "actor.model",
                "rollout.gpu_memory_utilization",
            ),
            1,
        )
    }
    too_small = prepare(
        llm_mapping(cluster={"nodes": [H100 | {"memory": "8GiB"}]}), sources=sources
    ).view
    places = {problem.key: str(problem.source) for problem in too_small.shortages}
    assert places["cluster.component_placement"] == "job.yaml:1"
    assert places["rollout.gpu_memory_utilization"] == "job.yaml:3"
    with pytest.raises(ConfigError) as caught:
        prepare(llm_mapping(model={"model_type": "llama"}), sources=sources)
    assert {str(problem.source) for problem in caught.value.problems} == {"job.yaml:2"}
    asked = {"gpu_memory_utilization": "auto"}
    with pytest.raises(PlacementError) as unknown:
        prepare(
            llm_mapping(rollout=asked, cluster={"nodes": [{"accelerators": 8}]}),
            sources=sources,
        )
    assert str(unknown.value.problems[0].source) == "job.yaml:3"

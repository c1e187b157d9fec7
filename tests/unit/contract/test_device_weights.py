"""Weights of a custom job between GPUs: which way the plan takes, what the plan says, and which memory counts."""

from __future__ import annotations

from typing import Any

import pytest

from rlplace import Job, Stage, Worker, full, run, weights
from rlplace.cli import train
from rlplace.config.open_job import JOB
from rlplace.placement.flow import DeviceDelivery
from rlplace.placement.memory.demands import Part
from rlplace.placement.memory.formulas import communicator, sync_buckets
from rlplace.placement.schedule import Residency
from rlplace.placement.show.explain import explain_component
from rlplace.placement.show.text import render_text
from rlplace.runtime.prepare import Prepared, prepare

GIB = 1 << 30


class Plain(Worker):
    """Works."""

    def work(self) -> None: ...


def job() -> Job:
    return Job(
        components={"learner": Plain, "sampler": Plain},
        stages=[
            Stage("send", weights("learner", to="sampler")),
            Stage("play", full("sampler").calls("work")),
            Stage("learn", full("learner").calls("work")),
        ],
    )


def prepared(
    learner: object = "0-1",
    sampler: object = "1-2",
    *,
    kind: str = "cuda",
    launcher: str = "ray",
    block: dict[str, Any] | None = None,
    sampler_block: dict[str, Any] | None = None,
) -> Prepared:
    """The job at these places. `block`: config block of the learner."""
    cluster = {
        "nodes": [{"accelerators": 4, "memory": "80GiB", "host_memory": "500GiB"}],
        "accelerator": {"kind": kind},
        "launcher": launcher,
        "component_placement": {"learner": learner, "sampler": sampler},
    }
    leaving = {"enable_offload": True}
    blocks = {
        "learner": {**leaving, **(block or {})},
        "sampler": {**leaving, **(sampler_block or {})},
    }
    return prepare({"cluster": cluster, JOB: job(), **blocks})


def is_past_host(found: Prepared) -> bool:
    return any(isinstance(each, DeviceDelivery) for each in found.plan.deliveries)


def test_ranks_with_a_gpu_each_send_from_gpu_to_gpu_and_the_plan_says_so() -> None:
    found = prepared()
    assert found.plan.deliveries == (
        DeviceDelivery(
            readers=(0, 1),
            owners=(1, None),
            actors=2,
            source="learner",
            target="sampler",
        ),
    )
    job_facts = job().facts(found.config, found.plan)
    assert job_facts.syncs[0].deliveries == found.plan.deliveries
    assert job_facts.sends_on_devices("learner")
    assert not job_facts.sends_on_devices("sampler")
    text = render_text(found.view)
    assert "2 copies on accelerators" in text
    assert "CUDA IPC" in text
    assert "NCCL" in text
    told = explain_component(found.view, "learner")
    assert "2 copies on accelerators" in told


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "emulated"},
        {"launcher": "inline"},
        {"block": {"through_host": True}},
        # Ranks that cannot be in one NCCL group, or that have several GPUs
        {"learner": "0:0-1"},
        {"learner": "0-1:0"},
        {"sampler": "2-3:0"},
    ],
    ids=str,
)
def test_all_others_send_through_the_host(options: dict[str, Any]) -> None:
    found = prepared(**options)
    assert not is_past_host(found)
    assert "on accelerators" not in render_text(found.view)


def test_each_source_has_its_own_way() -> None:
    components = {"learner": Plain, "sampler": Plain, "judge": Plain}
    both = Job(
        components=components,
        stages=[
            Stage("send", weights("learner", to="sampler")),
            Stage("again", weights("sampler", to="judge")),
            Stage("play", full("judge").calls("work")),
        ],
    )
    cluster = {
        "nodes": [{"accelerators": 4, "memory": "80GiB"}],
        "accelerator": {"kind": "cuda"},
        "component_placement": {"learner": "0", "sampler": "1", "judge": "2"},
    }
    found = prepare({"cluster": cluster, "learner": {"through_host": True}, JOB: both})
    on_devices = {
        (each.source, each.target): isinstance(each, DeviceDelivery)
        for each in found.plan.deliveries
    }
    assert on_devices == {("learner", "sampler"): False, ("sampler", "judge"): True}
    assert "through_host" not in found.config.settings["learner"]


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def sync_bytes(found: Prepared, component: str) -> dict[str, int]:
    """Stage -> bytes of sync buffers of a rank of `component`, where there are some."""
    (footprint,) = found.case.ledger().footprints[component]
    return {
        stage: parts[Part.SYNC]
        for stage, parts in footprint.working.items()
        if parts.get(Part.SYNC)
    }


def test_buckets_and_the_second_copy_count_in_the_stage_of_the_sync() -> None:
    held = {"memory": {"weights": GIB, "full": 4 * GIB, "working": GIB // 2}}
    found = prepared(block=held, sampler_block=held)
    buckets = sync_buckets(GIB)
    assert sync_bytes(found, "learner") == {}, "its work takes more"
    assert sync_bytes(found, "sampler") == {"send": GIB + buckets}
    idle = {"memory": {"weights": GIB, "full": 4 * GIB}}
    found = prepared(block=idle, sampler_block=idle)
    assert sync_bytes(found, "learner") == {"send": buckets}
    through_host = prepared(block={**idle, "through_host": True}, sampler_block=idle)
    assert sync_bytes(through_host, "learner") == {}
    assert sync_bytes(through_host, "sampler") == {}
    # The group of the broadcast has buffers for as long as the processes live.
    for component in ("learner", "sampler"):
        more, less = (
            job.case.ledger().footprints[component][0].held[Residency.OFF]
            for job in (found, through_host)
        )
        grown = more[Part.COMMUNICATOR] - less[Part.COMMUNICATOR]
        assert grown == communicator(1)


def test_a_copy_counts_whole_where_each_source_rank_holds_a_part() -> None:
    parts = {"memory": {"weights": GIB // 2, "full": GIB}}
    whole = {"memory": {"weights": GIB, "full": GIB}}
    found = prepared(block=parts, sampler_block=whole)
    assert sync_bytes(found, "sampler") == {"send": GIB + sync_buckets(GIB)}


# ── where processes cannot share the memory of a GPU ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("setting", "asked"), [("auto", True), ("false", False), ("true", False)]
)
def test_weights_go_through_the_host_where_memory_cannot_be_shared(
    setting: str,
    asked: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(train, "visible_gpus", lambda: (object(),))
    monkeypatch.setattr(train, "obstacle", lambda: pytest.fail("a dry run tries it"))
    for why in (None, "it is a sandbox"):
        monkeypatch.setattr(train, "known_obstacle", lambda why=why: why)
        code = run(
            job(),
            {
                "cluster": {
                    "accelerators_per_node": 4,
                    "accelerator": {"kind": "cuda"},
                    "component_placement": {"learner": "0-1", "sampler": "2-3"},
                    # GPUs that are not here
                    "ray": {"address": "10.0.0.1:6379"},
                },
            },
            [f"learner.through_host={setting}", "dry_run=true"],
        )
        told, wrong = capsys.readouterr()
        assert code == 0, wrong
        refused = asked and why is not None
        said = "learner.through_host: true, since processes of this machine cannot"
        assert (said in told) == refused
        past_the_host = setting != "true" and not refused
        assert ("2 copies on accelerators" in told) == past_the_host

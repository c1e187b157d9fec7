"""Weights from one component to another of a user's own classes: by one method, on threads and on Ray alike."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from rlplace.config.blocks.machines import AcceleratorConfig
from rlplace.errors import ClusterError, PlacementError, WorkerError
from rlplace.metrics import reduce_metrics
from rlplace.placement import HybridComponentPlacement, PackedPlacementStrategy
from rlplace.workers.facts import JobFacts, facts_of
from rlplace.workers.launch.cluster import Cluster
from rlplace.workers.launch.group import WorkerGroup, wait_all
from tests.contract.own_weights import (
    PATIENCE_S,
    PLACES,
    Dying,
    Learner,
    Model,
    Registered,
    Sampler,
    Sharded,
    Silent,
    Whole,
    started,
    sync,
)


@pytest.fixture(
    scope="module", params=["inline", pytest.param("ray", marks=pytest.mark.ray)]
)
def launcher(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def cluster_of(launcher: str) -> Cluster:
    accelerator = AcceleratorConfig(kind="emulated", memory=1 << 30)
    return Cluster(1, 8, accelerator=accelerator, launcher=launcher, workers=[Sampler])


@pytest.fixture(scope="module")
def kept(launcher: str) -> Iterator[Cluster]:
    """One for this file; for Ray, its workers are forks, and another cluster joins its Ray and leaves it running."""
    with cluster_of(launcher) as cluster:
        cluster.start()
        yield cluster


# Of what is the same by every launcher but costs a start of Ray's workers, which other tests here have paid for.
MOSTLY_INLINE = pytest.mark.parametrize(
    "launcher",
    ["inline", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])],
    indirect=True,
)


@pytest.fixture
def cluster(launcher: str, kept: Cluster) -> Iterator[Cluster]:
    with cluster_of(launcher) as cluster:
        yield cluster


@pytest.fixture
def threads() -> Iterator[Cluster]:
    """For what is the same by every launcher."""
    with cluster_of("inline") as cluster:
        yield cluster


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Synced:
    """Two ranks that send and three that take, after their first sync."""

    learner: WorkerGroup
    sampler: WorkerGroup
    pushed: Mapping[str, float]
    pulled: Mapping[str, float]


@pytest.fixture(scope="module")
def synced(kept: Cluster) -> Synced:
    learner, sampler = pair(kept)
    assert sampler.bits().wait()[0] != learner.bits().wait()[0]
    pushed, pulled = map(reduce_metrics, sync(learner, sampler, 0))
    return Synced(learner=learner, sampler=sampler, pushed=pushed, pulled=pulled)


def pair(
    cluster: Cluster,
    source: Model | None = None,
    target: Model | None = None,
    **options: Any,
) -> tuple[WorkerGroup, WorkerGroup]:
    """Two ranks that send, three that take, whose weights differ at first."""
    groups = started(
        cluster,
        {
            "learner": (Learner, source or Model(seed=1)),
            "sampler": (Sampler, target or Model(seed=2)),
        },
        [("learner", "sampler")],
        **options,
    )
    return groups["learner"], groups["sampler"]


def failed(source: WorkerGroup, target: WorkerGroup, version: int = 0) -> Any:
    """The problem of a sync that fails."""
    with pytest.raises(WorkerError) as error:
        sync(source, target, version)
    cause: Any = error.value.cause
    return cause.problem


@MOSTLY_INLINE
def test_targets_have_the_bits_of_the_source_in_the_tensors_that_they_had(
    synced: Synced,
) -> None:
    learner = synced.learner
    sampler = synced.sampler
    for version in range(1, 5):
        assert sampler.bits().wait() == [learner.bits().wait()[0]] * 3
        assert sampler.same_objects().wait() == [True] * 3
        learner.step(version).wait()
        sync(learner, sampler, version)
    assert sampler.versions().wait() == [[0, 1, 2, 3, 4]] * 3


@MOSTLY_INLINE
def test_a_sync_reports_the_size_of_the_weights_and_what_moved(
    synced: Synced, launcher: str
) -> None:
    tied_once = [17 * 300, 300 * 70, 70, 5 * 8, 9, 9, 9, 9]
    sizes = [*(4 * elements for elements in tied_once), 8]  # num_batches_tracked
    size = sum(sizes)
    pushed = synced.pushed
    lines = sum(-(-size // 64) for size in sizes)  # each tensor begins a cache line
    assert pushed["learner/weights_bytes"] == 64 * lines
    assert synced.pulled["sampler/pull_bytes"] == 3 * size
    copies = 1 if launcher == "ray" else 3
    assert pushed["learner/pushed_bytes"] == copies * size
    assert pushed["learner/push_s"] > 0
    assert synced.pulled["sampler/pull_s"] >= synced.pulled["sampler/load_s"] > 0


def test_a_target_keeps_its_dtype(threads: Cluster) -> None:
    half = Model(seed=2, dtype=torch.bfloat16)
    learner, sampler = pair(threads, target=half)
    sync(learner, sampler, 0)
    exact = learner.as_float().wait()[0]
    for found in sampler.as_float().wait():
        for name, values in found.items():
            whole = torch.tensor(exact[name], dtype=torch.float32)
            assert values == whole.bfloat16().double().tolist(), name


@MOSTLY_INLINE
def test_a_module_can_be_named_once_and_one_source_serves_two_targets(
    cluster: Cluster,
) -> None:
    groups = started(
        cluster,
        {
            "learner": (Registered, Model(seed=1)),
            "sampler": (Registered, Model(seed=2)),
            "evaluator": (Sampler, Model(seed=3)),
        },
        [("learner", "sampler"), ("learner", "evaluator")],
    )
    learner, sampler, evaluator = groups.values()
    wait_all(
        [
            learner.push_weights(0),
            sampler.pull_weights(0),
            evaluator.pull_weights(0),
        ],
        PATIENCE_S,
    )
    first = learner.bits().wait()[0]
    learner.step(1).wait()
    wait_all(
        [learner.push_weights(1, to="sampler"), sampler.pull_weights(1)], PATIENCE_S
    )
    second = learner.bits().wait()[0]
    assert first != second
    assert sampler.bits().wait() == [second] * 3
    assert evaluator.bits().wait() == [first]
    assert evaluator.versions().wait() == [[0]]


# ── what bad weights get ─────────────────────────────────────────────────────────────────────────────────────────────


def test_other_names_are_told_with_the_nearest_and_the_line_of_the_class(
    threads: Cluster,
) -> None:
    learner, sampler = pair(threads, source=Model(names="net."))
    with pytest.raises(WorkerError) as error:
        sync(learner, sampler, 0)
    problem = error.value.cause.problem  # type: ignore[union-attr]
    assert problem.code == "weight-names"
    assert problem.key.startswith("sampler rank")
    assert "embed.weight did not come" in problem.got
    assert "net.embed.weight came, and is not expected" in problem.got
    assert problem.source.file.endswith("own_weights.py")


def test_other_shapes(threads: Cluster) -> None:
    problem = failed(*pair(threads, target=Model(width=32)))
    assert problem.code == "weight-shapes"
    assert "embed.weight came as [17, 300], expected [17, 32]" in problem.got
    assert problem.fix == "build the same model in learner and sampler"


@pytest.mark.parametrize(
    ("returns", "said"),
    [("a list", "returned a list"), ("numbers", "returned a int as steps")],
)
def test_what_is_no_weights(threads: Cluster, returns: str, said: str) -> None:
    problem = failed(*pair(threads, source=Model(returns=returns)))
    assert (problem.code, problem.source.line is not None) == ("bad-weights", True)
    assert said in problem.what


@pytest.mark.parametrize("leaves", ["learner", "sampler"])
def test_offloaded_weights_are_not_synced(threads: Cluster, leaves: str) -> None:
    learner, sampler = pair(threads)
    away = {"learner": learner, "sampler": sampler}[leaves]
    away.offload().wait()
    problem = failed(learner, sampler)
    assert problem.code == "not-resident"
    assert problem.key.startswith(leaves)
    assert problem.fix.startswith(f"{leaves}.onload().wait() before {leaves}.pu")


def test_weights_that_come_back_are_synced(threads: Cluster) -> None:
    learner, sampler = pair(threads)
    wait_all([learner.offload(), sampler.offload()])
    wait_all([learner.onload(), sampler.onload()])
    sync(learner, sampler, 0)
    assert sampler.bits().wait() == [learner.bits().wait()[0]] * 3


def test_another_version_than_the_one_that_was_pushed(threads: Cluster) -> None:
    learner, sampler = pair(threads)
    with pytest.raises(WorkerError) as error:
        wait_all([learner.push_weights(3), sampler.pull_weights(4)], PATIENCE_S)
    assert error.value.component == "sampler"
    problem = error.value.cause.problem  # type: ignore[union-attr]
    assert problem.code == "version-mismatch"
    assert problem.what == "version 3 arrived, version 4 was asked for"


@MOSTLY_INLINE
def test_a_class_without_weights_is_told_at_the_launch(cluster: Cluster) -> None:
    with pytest.raises(WorkerError) as error:
        started(
            cluster,
            {"learner": (Silent, Model()), "sampler": (Sampler, Model())},
            [("learner", "sampler")],
        )
    problem = error.value.cause.problem  # type: ignore[union-attr]
    assert problem.code == "weights-undeclared"
    assert problem.what == (
        "class Silent has no weights, and learner is to send them to sampler"
    )
    assert problem.source.file.endswith("own_weights.py")
    assert "def weights(self)" in problem.fix


def test_a_pair_that_the_job_does_not_name(threads: Cluster) -> None:
    learner, _ = pair(threads)
    with pytest.raises(WorkerError, match="weight-sync-unplanned") as error:
        learner.push_weights(0, to="samplr").wait()
    assert "push_weights(version, to='sampler')" in str(error.value)


def test_without_facts_nothing_is_sent(threads: Cluster) -> None:
    placement = HybridComponentPlacement({"component_placement": PLACES}, threads)
    strategy = placement.get_strategy("learner")
    group = Learner.create_group(Model()).launch(
        threads, name="learner", placement_strategy=strategy
    )
    with pytest.raises(WorkerError, match="weight-sync-unplanned") as error:
        group.pull_weights(0).wait()
    assert "facts_of(placement, weights=[('<source>', 'learner')])" in str(error.value)
    assert 'Stage("sync", weights("<source>", to="learner"))' in str(error.value)


def test_a_group_of_another_size_than_its_facts_say(threads: Cluster) -> None:
    facts = JobFacts(ranks={"learner": 3})
    placement = HybridComponentPlacement({"component_placement": PLACES}, threads)
    strategy = placement.get_strategy("learner")
    with pytest.raises(ClusterError, match="facts-misfit"):
        Learner.create_group(Model(), facts).launch(
            threads, name="learner", placement_strategy=strategy
        )


def test_wrong_pairs_are_told_with_the_names_that_are_placed(
    threads: Cluster,
) -> None:
    placement = HybridComponentPlacement({"component_placement": PLACES}, threads)
    with pytest.raises(PlacementError, match="did you mean 'learner'") as error:
        facts_of(placement, weights=[("lerner", "sampler")])
    assert error.value.codes == ("unknown-component",)
    with pytest.raises(PlacementError, match="weights-to-itself"):
        facts_of(placement, weights=[("learner", "learner")])


# ── what ends a sync early ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_push_that_does_not_come_is_told_after_the_deadline(
    threads: Cluster,
) -> None:
    _, sampler = pair(threads, timeout_s=0.5)
    with pytest.raises(WorkerError, match="channel-timeout") as error:
        sampler.pull_weights(0).wait(PATIENCE_S)
    assert "wait_all([learner.push_weights(0), sampler.pull_weights(0)])" in str(
        error.value
    )


@MOSTLY_INLINE
def test_a_lost_source_frees_its_targets_at_once(
    cluster: Cluster, launcher: str
) -> None:
    how = "raises" if launcher == "inline" else "dies"
    groups = started(
        cluster,
        {
            "learner": (Dying, Model(returns=how)),
            "sampler": (Sampler, Model(seed=2)),
        },
        [("learner", "sampler")],
        timeout_s=600.0,
    )
    learner, sampler = groups.values()
    sync(learner, sampler, 0)
    pulling = sampler.pull_weights(1)
    pushing = learner.push_weights(1)
    began = time.monotonic()
    with pytest.raises(WorkerError) as alone:
        pulling.wait(PATIENCE_S)
    assert time.monotonic() - began < PATIENCE_S / 2
    assert "learner rank 1" in str(alone.value)
    assert alone.value.cause.problem.code == "channel-broken"  # type: ignore[union-attr]
    with pytest.raises(WorkerError, match="learner rank 1"):
        pushing.wait(PATIENCE_S)


def test_what_a_source_raised_is_the_reason_of_both(threads: Cluster) -> None:
    groups = started(
        threads,
        {
            "learner": (Dying, Model(returns="raises")),
            "sampler": (Sampler, Model(seed=2)),
        },
        [("learner", "sampler")],
    )
    with pytest.raises(WorkerError, match="no weights today") as error:
        sync(groups["learner"], groups["sampler"], 1)
    assert error.value.component == "learner"


def test_a_group_outside_of_a_sync_does_not_break_it(threads: Cluster) -> None:
    learner, sampler = pair(threads)
    other = Dying.create_group(Model(returns="raises")).launch(
        threads, name="other", placement_strategy=PackedPlacementStrategy(5, 6)
    )
    assert not any("weights" in name for name in other.channels)
    with pytest.raises(WorkerError, match="other rank"):
        other.push_weights(1).wait()
    sync(learner, sampler, 0)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["ray"], indirect=True)
def test_after_a_rank_was_replaced_a_version_can_be_sent_again(
    cluster: Cluster,
) -> None:
    learner, sampler = pair(cluster)
    for group in (learner, sampler):
        group.outlast = "give up"
    for version in range(3):
        sync(learner, sampler, version)
    victim = learner.pid().wait()[1]
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(WorkerError, match="learner rank 1"):
        sync(learner, sampler, 3)
    for group in (learner, sampler):
        group.wait_wound_down()
    cluster.restart(cluster.with_peers({"learner": {1}}))
    wait_all([learner.begin_again(0), sampler.begin_again(0)], PATIENCE_S)
    sampler.step(0).wait()
    assert sampler.bits().wait()[0] != learner.bits().wait()[0]
    for version in range(2, 5):
        sync(learner, sampler, version)
    assert sampler.bits().wait() == [learner.bits().wait()[0]] * 3


# ── shards ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_fsdp_shards_arrive_whole(cluster: Cluster, launcher: str) -> None:
    if launcher == "inline":
        pytest.skip("a process joins one process group")
    groups = started(
        cluster,
        {"learner": (Sharded, Model(seed=1)), "sampler": (Whole, Model(seed=2))},
        [("learner", "sampler")],
    )
    pushed, _ = sync(groups["learner"], groups["sampler"], 0)
    sent = groups["learner"].whole().wait()[0]
    assert groups["sampler"].whole().wait() == [sent] * 3
    by_rank = [metrics["learner/pushed_bytes"].value for metrics in pushed]
    size = 4 * (33 * 7 + 7 + 7 * 5 + 5)
    assert sum(by_rank) == size, "each byte once"
    assert min(by_rank) > size / 4, "each rank its rows"

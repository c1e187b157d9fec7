"""Weights of a user's own classes from accelerator to accelerator: shared on one, broadcast to others."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from rlplace.config.blocks.machines import AcceleratorConfig
from rlplace.errors import WorkerError
from rlplace.metrics import reduce_metrics
from rlplace.workers.launch.cluster import Cluster
from rlplace.workers.launch.group import WorkerGroup, wait_all
from tests.contract.own_weights import (
    PATIENCE_S,
    Dying,
    Learner,
    Model,
    Registered,
    Sampler,
    Sharded,
    Whole,
    started,
    sync,
)

pytestmark = pytest.mark.ray
PAIR = [("learner", "sampler")]


def cluster_of() -> Cluster:
    accelerator = AcceleratorConfig(kind="emulated", memory=1 << 30)
    return Cluster(1, 8, accelerator=accelerator, launcher="ray", workers=[Sampler])


@pytest.fixture(scope="module")
def kept() -> Iterator[Cluster]:
    """One for this file: other clusters join its Ray and leave it running."""
    with cluster_of() as cluster:
        cluster.start()
        yield cluster


@pytest.fixture
def cluster(kept: Cluster) -> Iterator[Cluster]:
    with cluster_of() as cluster:
        yield cluster


def pair(cluster: Cluster) -> tuple[WorkerGroup, WorkerGroup]:
    """Two ranks that send, three that take: the first of them is on the accelerator of the second sender."""
    groups = started(
        cluster,
        {"learner": (Learner, Model(seed=1)), "sampler": (Sampler, Model(seed=2))},
        PAIR,
        on_devices=True,
    )
    return groups["learner"], groups["sampler"]


@pytest.mark.slow
def test_weights_are_shared_on_an_accelerator_and_broadcast_to_others(
    cluster: Cluster,
) -> None:
    learner, sampler = pair(cluster)
    for version in range(3):
        learner.step(version).wait()
        pushed, pulled = sync(learner, sampler, version)
        assert sampler.bits().wait() == [learner.bits().wait()[0]] * 3
    assert sampler.same_objects().wait() == [True] * 3
    assert sampler.versions().wait() == [[0, 1, 2]] * 3
    size = 4 * (17 * 300 + 300 * 70 + 70 + 5 * 8 + 4 * 9) + 8
    by_rank = [
        {name for name in metrics if name.startswith("sampler/pulled_")}
        for metrics in pulled
    ]
    shared = {"sampler/pulled_shared_tensor_bytes"}
    assert by_rank == [shared, *[{"sampler/pulled_gloo_bytes"}] * 2]
    reduced = reduce_metrics(pushed)
    assert reduced["learner/pushed_gloo_bytes"] == size
    assert reduced["learner/pushed_shared_tensor_bytes"] == size
    assert reduce_metrics(pulled)["sampler/pull_bytes"] == 3 * size


@pytest.mark.slow
def test_one_source_serves_two_targets_at_one_store(cluster: Cluster) -> None:
    groups = started(
        cluster,
        {
            "learner": (Registered, Model(seed=1)),
            "sampler": (Registered, Model(seed=2)),
            "evaluator": (Sampler, Model(seed=3)),
        },
        [("learner", "sampler"), ("learner", "evaluator")],
        on_devices=True,
    )
    learner, sampler, evaluator = groups.values()
    wait_all(
        [learner.push_weights(0), sampler.pull_weights(0), evaluator.pull_weights(0)],
        PATIENCE_S,
    )
    first = learner.bits().wait()[0]
    learner.step(1).wait()
    wait_all(
        [learner.push_weights(1, to="sampler"), sampler.pull_weights(1)], PATIENCE_S
    )
    assert sampler.bits().wait() == [learner.bits().wait()[0]] * 3
    assert evaluator.bits().wait() == [first]


@pytest.mark.slow
def test_a_class_with_a_process_group_of_its_own_sends_its_shards(
    cluster: Cluster,
) -> None:
    groups = started(
        cluster,
        {"learner": (Sharded, Model(seed=1)), "sampler": (Whole, Model(seed=2))},
        PAIR,
        on_devices=True,
    )
    sync(groups["learner"], groups["sampler"], 0)
    sent = groups["learner"].whole().wait()[0]
    assert groups["sampler"].whole().wait() == [sent] * 3


@pytest.mark.slow
def test_other_shapes_are_told_as_through_the_host(cluster: Cluster) -> None:
    groups = started(
        cluster,
        {
            "learner": (Learner, Model(seed=1)),
            "sampler": (Sampler, Model(seed=2, width=32)),
        },
        PAIR,
        on_devices=True,
    )
    with pytest.raises(WorkerError, match="weight-shapes") as error:
        sync(groups["learner"], groups["sampler"], 0)
    assert error.value.component == "sampler"


@pytest.mark.slow
def test_a_lost_source_frees_its_targets(cluster: Cluster) -> None:
    groups = started(
        cluster,
        {
            "learner": (Dying, Model(returns="dies")),
            "sampler": (Sampler, Model(seed=2)),
        },
        PAIR,
        on_devices=True,
        timeout_s=8.0,
    )
    learner, sampler = groups.values()
    sync(learner, sampler, 0)
    pulling = sampler.pull_weights(1)
    pushing = learner.push_weights(1)
    with pytest.raises(WorkerError):
        pulling.wait(PATIENCE_S)
    with pytest.raises(WorkerError, match="learner rank 1"):
        pushing.wait(PATIENCE_S)


@pytest.mark.slow
def test_ranks_that_restart_together_meet_again(cluster: Cluster) -> None:
    learner, sampler = pair(cluster)
    for group in (learner, sampler):
        group.outlast = "give up"
    for version in range(2):
        sync(learner, sampler, version)
    os.kill(sampler.pid().wait()[1], signal.SIGKILL)
    with pytest.raises(WorkerError, match="sampler rank 1"):
        sync(learner, sampler, 2)
    for group in (learner, sampler):
        group.wait_wound_down()
    ranks = {"learner": {0, 1}, "sampler": {0, 1, 2}}
    cluster.restart(cluster.with_peers(ranks))
    assert sampler.bits().wait()[0] != learner.bits().wait()[0]
    for version in range(3):
        sync(learner, sampler, version)
    assert sampler.bits().wait() == [learner.bits().wait()[0]] * 3

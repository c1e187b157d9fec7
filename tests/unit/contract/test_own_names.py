"""Jobs of one's own whose components have no name of ours are planned like others."""

from __future__ import annotations

import pytest

from rlplace import Channel, Job, Stage, Worker, full, weights
from rlplace.cli.own_job import plan
from rlplace.placement.flow import Transport
from rlplace.placement.show.explain import explain_pair
from rlplace.placement.transfers import transfers


class Learner(Worker):
    def learn(self, iteration: int) -> None:
        self.channel("samples").get()


class Sampler(Worker):
    def sample(self, iteration: int) -> None:
        self.channel("samples").put(iteration)


def test_weights_go_between_components_of_any_name() -> None:
    job = Job(
        components={"learner": Learner, "sampler": Sampler, "judge": Sampler},
        stages=[
            Stage("sync", weights("learner", to=["sampler", "judge"])),
            Stage("sample", full("sampler").calls("sample")),
            Stage("learn", full("learner").calls("learn")),
        ],
        channels=[Channel("samples", "sampler", "learner")],
    )
    config = {
        "cluster": {
            "accelerators_per_node": 3,
            "accelerator": {"kind": "emulated", "memory": "1GiB"},
            "component_placement": {"learner": "0", "sampler": "1", "judge": "2"},
        }
    }
    sent = transfers(plan(job, config).plan)
    pairs = [(each.source, each.target) for each in sent if each.name == "weights"]
    assert pairs == [("learner", "sampler"), ("learner", "judge")]


@pytest.mark.parametrize(
    ("through_host", "way"),
    [
        (True, "its part, written into the copy of node 0"),
        ("auto", "its part, broadcast to all"),
    ],
)
def test_components_of_any_name_are_explained_with_their_weights(
    through_host: object, way: str
) -> None:
    job = Job(
        components={"learner": Learner, "sampler": Sampler},
        stages=[
            Stage("sync", weights("learner", to="sampler")),
            Stage("sample", full("sampler").calls("sample")),
            Stage("learn", full("learner").calls("learn")),
        ],
        channels=[Channel("samples", "sampler", "learner")],
    )
    config = {
        "cluster": {
            "nodes": [
                {
                    "accelerators": 2,
                    "product": "A100",
                    "memory": "40GiB",
                    "pcie_gb_per_s": 25,
                    "nvlink_gb_per_s": 300,
                }
            ],
            "component_placement": {"learner": "0", "sampler": "1"},
        },
        "learner": {
            "memory": {"weights": "3GB", "full": "9GB"},
            "through_host": through_host,
        },
        "sampler": {"memory": {"weights": "3GB", "full": "3GB"}},
    }
    view = plan(job, config).view
    assert view.traffic.weights_bytes == {Transport.SAME_NODE: 3 * 10**9}
    passes = explain_pair(view.plan, ("learner", 0), ("sampler", 0))
    assert way in passes

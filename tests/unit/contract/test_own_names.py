"""Jobs of one's own whose components have no name of ours are planned like others."""

from __future__ import annotations

from rlplace import Channel, Job, Stage, Worker, full, weights
from rlplace.cli.own_job import plan
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

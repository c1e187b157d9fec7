"""Components without accelerators: a plan says where they work."""

from __future__ import annotations

from rlplace import Job, Stage, Worker, on_host, weights
from rlplace.config.open_job import JOB
from rlplace.placement.show.svg import render_svg
from rlplace.placement.show.text import render_text
from rlplace.runtime.prepare import Prepared, prepare


class Plain(Worker):
    """Works."""

    def work(self) -> None: ...


def prepared(place: str, **cluster: object) -> Prepared:
    job = Job(
        components={"search": Plain, "rollout": Plain},
        stages=[
            Stage("sync", weights("search", to="rollout")),
            Stage("play", on_host("rollout").calls("work")),
            Stage("improve", on_host("search").calls("work")),
        ],
    )
    block = {"component_placement": {"search": "cpu", "rollout": place}, **cluster}
    return prepare({"cluster": block, JOB: job})


def test_a_component_without_accelerators_works_in_the_stages_that_name_it() -> None:
    found = prepared("cpu", nodes=[{"accelerators": 0}])
    looks = {
        stage.name: (stage.look("search"), stage.look("rollout"))
        for stage in found.view.stages
    }
    assert looks == {
        "sync": ("full", "full"),
        "play": ("waits", "full"),
        "improve": ("full", "waits"),
    }
    text = render_text(found.view)
    assert ["play", "(full)", "full", "nothing", "moves"] in [
        line.split() for line in text.splitlines()
    ]
    assert "rollout on node 0, full in play" in render_svg(found.view)
    # There is no copy of a model that could leave its node.
    assert not found.plan.warnings


def test_a_component_on_its_host_does_not_need_its_accelerators() -> None:
    found = prepared("0", accelerators_per_node=1, accelerator={"kind": "emulated"})
    stages = {stage.name: stage for stage in found.view.stages}
    assert stages["play"].word("rollout") == "(full)"

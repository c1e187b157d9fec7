"""Why a component is where and when it is, and what uses an accelerator."""

from __future__ import annotations

import pytest

from rlplace.placement.show.explain import (
    explain_accelerator,
    explain_component,
    explain_pair,
)
from tests.unit.placement.reports import H100, ON, llm, ppo


def chapter(text: str, title: str) -> list[str]:
    for part in text.split("\n\n"):
        head, *lines = part.splitlines()
        if head == title:
            return [" ".join(line.split()) for line in lines]
    raise AssertionError(f"no chapter {title!r} in\n{text}")


def test_a_component_that_stays_says_why() -> None:
    sharing = {"actor": "0-7", "env": "0-3", "rollout": "4-7"}
    kept = chapter(
        explain_component(
            ppo(sharing, offload=False, allow_resident=["actor", "env", "rollout"]),
            "actor",
        ),
        "when",
    )
    assert "rollout full not needed; it stays, enable_offload is not set" in kept
    assert (
        "sync full sync needs only its weights; it stays, enable_offload is not set"
        in kept
    )
    beside = explain_component(
        llm({"actor": "0-6", "rollout": "7", "env": "7"}, env=ON), "rollout"
    )
    assert (
        "learn full not needed; it stays, no other component needs the room"
        in chapter(beside, "when")
    )


def test_shapes_of_ranks() -> None:
    shared = explain_component(
        ppo({"actor": "0-7", "env": "0-3:0-7", "rollout": "4-7:0-1"}), "env"
    )
    assert "2 ranks share an accelerator" in chapter(shared, "where")
    several = explain_component(
        ppo({"actor": "0-7", "env": "0-3:0-7", "rollout": "4-7:0-1"}), "rollout"
    )
    assert "each rank has 2 accelerators of one node" in chapter(several, "where")
    engines = {
        "actor": "0-7",
        "rollout": {"same_as": "actor", "tensor_parallel_size": 4},
    }
    text = explain_component(llm(engines), "rollout")
    assert "2 copies of the model, each over 4" in chapter(text, "where")
    assert "written '{same_as: actor, tensor_parallel_size: 4}'" in text
    assert "working in rollout" in text


def test_a_component_without_accelerators_and_partners() -> None:
    placement = {
        "actor": "0-7",
        "rollout": "0-7",
        "agent": {"node_group": "node", "placement": "0:0-3"},
    }
    text = explain_component(llm(placement), "agent")
    assert chapter(text, "where") == ["on nodes: it holds no accelerators"]
    assert chapter(text, "talks to") == ["no other component"]
    assert chapter(text, "memory of a rank on each of its accelerators") == [
        "not known"
    ]


def test_accelerators_on_other_nodes_shared_idle_or_of_unknown_size() -> None:
    placement = {"actor": "0-9", "env": "0-3:0-39", "rollout": "4-9"}
    report = ppo(
        placement, nodes=[H100 | {"count": 2}], envs=240, accelerator={"kind": "auto"}
    )
    assert "accelerator 9: number 1 of node 1 (H100, 80 GiB)" in explain_accelerator(
        report, 9
    )
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more" in explain_accelerator(report, 0)
    assert explain_accelerator(report, 12).endswith("no component uses it")
    unknown = ppo(nodes=[{"accelerators": 8}], accelerator={"kind": "auto"})
    assert chapter(explain_accelerator(unknown, 0), "what each holds")[1].endswith(" ?")


SHARED = {"placement": "0-7", "process": "shared"}


def test_two_ranks_in_one_process() -> None:
    plan = ppo({"actor": "0-7", "env": SHARED, "rollout": SHARED}).plan
    text = explain_pair(plan, ("rollout", 3), ("env", 3))  # in either order
    assert (
        chapter(text, "where")[0]
        == "rollout rank 3 node 0, accelerator 3 process env+rollout 3"
    )
    assert chapter(text, "why")[0] == "they are in one process: items go by direct call"
    assert len(chapter(text, "what passes")) == 1


def test_two_ranks_on_gpus() -> None:
    placement = {"actor": "0-9", "env": "0-3", "rollout": "4-9:0-2"}
    plan = ppo(
        placement, nodes=[H100 | {"count": 2}], envs=240, accelerator={"kind": "auto"}
    ).plan
    near = explain_pair(plan, ("actor", 4), ("rollout", 0))
    assert (
        chapter(near, "where")[1]
        == "rollout rank 0 node 0, accelerators 4-5 a process of its own"
    )
    assert (
        chapter(near, "why")[1] == "tensors on accelerators go by shared memory"
    )  # ranks of two GPUs
    assert chapter(near, "what passes") == [
        "weights actor rank 4 -> rollout rank 0 its part, written into the copy of node 0"
    ]
    assert chapter(explain_pair(plan, ("env", 0), ("env", 1)), "what passes") == [
        "nothing: no route joins these two"
    ]
    far = chapter(explain_pair(plan, ("env", 0), ("rollout", 2)), "why")
    assert far[0] == "they are on different nodes: items go by tcp, encrypted"


PAST_THE_HOST = {"actor": "0-7", "env": "0", "rollout": "6-9"}
BY_NODE = {"actor": "0-9", "env": "0", "rollout": "6-9:0-3"}


@pytest.mark.parametrize(
    ("placement", "actor", "rollout", "passes"),
    [
        (PAST_THE_HOST, 6, 0, "all parts, shared on the accelerator"),
        (PAST_THE_HOST, 0, 0, "its part, by way of actor rank 6"),
        (PAST_THE_HOST, 0, 2, "its part, broadcast to all"),
        (BY_NODE, 9, 2, "its part, written into the copy of node 1"),
        (BY_NODE, 0, 2, "its part, sent to be written into the copy of node 1"),
        (BY_NODE, 0, 3, "its part, sent to rollout rank 2 for the copy of node 1"),
    ],
)
def test_how_weights_come_to_a_rank(
    placement: dict[str, str], actor: int, rollout: int, passes: str
) -> None:
    kind = "auto" if placement is PAST_THE_HOST else "emulated"
    plan = ppo(
        placement, nodes=[H100 | {"count": 2}], envs=320, accelerator={"kind": kind}
    ).plan
    text = explain_pair(plan, ("actor", actor), ("rollout", rollout))
    assert chapter(text, "what passes") == [
        f"weights actor rank {actor} -> rollout rank {rollout} {passes}"
    ]
    if placement is PAST_THE_HOST:
        tensors = "CUDA IPC" if "shared" in passes else "NCCL"
        assert chapter(text, "why")[1] == f"tensors on accelerators go by {tensors}"


def test_a_copy_of_the_weights_goes_to_each_rank_of_a_language_model() -> None:
    plan = llm({"actor": "0-3", "rollout": "4-5"}).plan
    assert chapter(explain_pair(plan, ("actor", 0), ("rollout", 0)), "what passes") == [
        "weights actor rank 0 -> rollout rank 0 its copy"
    ]

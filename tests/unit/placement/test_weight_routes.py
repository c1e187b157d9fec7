"""Where copies of the weights are put together: one per node with rollout ranks."""

from __future__ import annotations

from rlplace.placement import HybridComponentPlacement, Topology
from rlplace.placement.flow import Delivery, DeviceDelivery, deliver, deliver_by_node
from tests.unit.placement.placing import EIGHT, place


def test_each_node_with_rollout_ranks_gets_one_copy_and_knows_which_actor_ranks_are_there() -> (
    None
):
    (one,) = deliver_by_node(place({"actor": "0-3", "rollout": "2-7"}, EIGHT))
    assert one == Delivery(readers=(0, 1, 2, 3, 4, 5), near=(0, 1, 2, 3))
    found = deliver_by_node(
        place({"actor": "0-5", "rollout": "2-3,8-11"}, Topology.uniform(3, 4))
    )
    assert found == (
        Delivery(readers=(0, 1), near=(0, 1, 2, 3)),
        Delivery(readers=(2, 3, 4, 5)),
    )
    assert [delivery.lead for delivery in found] == [0, 2]


def placed(
    actor: str, rollout: str | dict[str, object], nodes: int = 1
) -> HybridComponentPlacement:
    return place(
        {"actor": actor, "rollout": rollout}, Topology.uniform(nodes, 8, kind="cuda")
    )


def on_gpus(actor: str, rollout: str, *, nodes: int = 1) -> tuple[Delivery, ...]:
    return deliver(placed(actor, rollout, nodes))


def test_ranks_on_one_gpu_share_memory_and_the_others_are_in_the_group() -> None:
    (device,) = on_gpus("0-5", "4-7")
    assert device == DeviceDelivery(
        readers=(0, 1, 2, 3), owners=(4, 5, None, None), actors=6
    )
    names = [member.name for member in device.group]
    assert names == [
        *(f"actor rank {rank}" for rank in range(6)),
        "rollout rank 2",
        "rollout rank 3",
    ]
    consumers = [[taker.name for taker in device.consumers(rank)] for rank in (0, 4, 5)]
    assert consumers == [[], ["rollout rank 0"], ["rollout rank 1"]]
    assert [device.owner(taker) for taker in device.takers] == [4, 5, None, None]


def test_each_process_of_an_engine_that_cuts_its_weights_takes_them_on_its_own_gpu() -> (
    None
):
    (device,) = deliver(
        placed("0-3", {"accelerators": "2-5", "accelerators_per_rank": 2}), cut=True
    )
    assert device == DeviceDelivery(
        readers=(0, 1), owners=(2, 3, None, None), actors=4, parts=(2, 2)
    )
    assert isinstance(device, DeviceDelivery)
    assert device.in_windows
    assert device.takes_windows(0)
    assert [taker.name for taker in device.takers_of(1)] == [
        "rollout rank 1 part 0",
        "rollout rank 1 part 1",
    ]
    assert [member.name for member in device.group][4:] == [
        "rollout rank 1 part 0",
        "rollout rank 1 part 1",
    ]
    assert [[taker.name for taker in device.consumers(rank)] for rank in (1, 3)] == [
        [],
        ["rollout rank 0 part 1"],
    ]


def test_engines_of_one_gpu_take_windows_where_the_plan_says_so() -> None:
    for whole in (True, False):
        (device,) = deliver(placed("0-1", "1-2"), whole=whole)
        assert isinstance(device, DeviceDelivery)
        assert device.in_windows is not whole
        assert device.takes_windows(1) is not whole
    one_and_two = placed("0-3", "0:0,1-2:1")
    (device,) = deliver(one_and_two, cut=True)
    assert isinstance(device, DeviceDelivery)
    assert device.in_windows
    assert [device.takes_windows(reader) for reader in (0, 1)] == [False, True]


def test_ranks_of_several_gpus_that_do_not_cut_and_second_ranks_of_one_go_through_the_host() -> (
    None
):
    mixed = on_gpus("0-3", "0-1:0,2-3:1-2", nodes=2)
    assert mixed == (
        DeviceDelivery(readers=(1, 2), owners=(2, 3), actors=4),
        Delivery(readers=(0,), near=(0, 1, 2, 3)),
    )
    assert on_gpus("0-3", "4:0-1") == (
        DeviceDelivery(readers=(0,), owners=(None,), actors=4),
        Delivery(readers=(1,), near=(0, 1, 2, 3)),
    )


def test_actor_ranks_that_cannot_form_a_group_go_through_the_host() -> None:
    for actor in ("0-3:0-1", "0:0-1"):
        assert not any(isinstance(d, DeviceDelivery) for d in on_gpus(actor, "4-7"))


def test_components_with_names_of_their_own_send_from_gpu_to_gpu() -> None:
    placement = place(
        {"learner": "0-1", "sampler": "1-2"}, Topology.uniform(1, 8, kind="cuda")
    )
    (device,) = deliver(placement, "learner", "sampler")
    assert device == DeviceDelivery(
        readers=(0, 1),
        owners=(1, None),
        actors=2,
        source="learner",
        target="sampler",
    )
    assert isinstance(device, DeviceDelivery)
    names = [member.name for member in device.group]
    assert names == ["learner rank 0", "learner rank 1", "sampler rank 1"]


def test_a_source_that_shares_its_processes_sends_through_the_host() -> None:
    shared = {"accelerators": "0-1", "process": "shared"}
    placement = place(
        {"learner": shared, "sampler": shared}, Topology.uniform(1, 8, kind="cuda")
    )
    assert deliver(placement, "learner", "sampler") == (
        Delivery(readers=(0, 1), near=(0, 1), source="learner", target="sampler"),
    )

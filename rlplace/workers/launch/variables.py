"""The variables that every launcher of torch.distributed sets, and a port for MASTER_PORT."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlplace.placement.language.slots import Slot
from rlplace.workers.launch.devices import Device

if TYPE_CHECKING:
    from rlplace.workers.worker import Rendezvous


def reserve_port(host: str) -> socket.socket:
    """Return a socket that is bound to a free port of `host` and does not listen.

    While the socket is open, Linux gives the port to no other program. Another socket that asks for exactly this port
    with SO_REUSEADDR, as torch's store does, can listen on the port, also several times in succession.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    return reserved


def torch_variables(
    slots: Sequence[Slot], slot: Slot, device: Device, rendezvous: Rendezvous
) -> dict[str, str]:
    """Return the environment variables of torch.distributed, such as RANK and WORLD_SIZE, for the rank at `slot`.

    `slots`: all slots of the rank's group. `device`: the rank's device. `rendezvous`: the source of MASTER_ADDR and
    MASTER_PORT. LOCAL_RANK is the argument of `torch.cuda.set_device`: the number of the rank's GPU among the GPUs that
    the process sees. Without a GPU, LOCAL_RANK counts the group's ranks on the node.
    """
    _, _, index = device.torch_name.partition(":")
    local = [other for other in slots if other.node == slot.node]
    return {
        "RANK": str(slot.rank),
        "WORLD_SIZE": str(len(slots)),
        "LOCAL_RANK": index or str(slot.local_rank),
        "LOCAL_WORLD_SIZE": str(len(local)),
        "MASTER_ADDR": rendezvous.host,
        "MASTER_PORT": str(rendezvous.master_port),
    }

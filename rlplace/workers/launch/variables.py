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

    As long as the socket is open, Linux gives this port to no program that asks for any free port. A socket with
    SO_REUSEADDR that asks for exactly this port, as torch's store does, can still listen there, also repeatedly.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    return reserved


def torch_variables(
    slots: Sequence[Slot], slot: Slot, device: Device, rendezvous: Rendezvous
) -> dict[str, str]:
    """Return the environment variables of torch.distributed, such as RANK and WORLD_SIZE, for the rank at `slot`.

    `slots`: all slots of the rank's group. `device`: the rank's device. `rendezvous`: has the values of MASTER_ADDR and
    MASTER_PORT. LOCAL_RANK is the number of the rank's GPU among the GPUs that the process sees, for
    `torch.cuda.set_device`. Without a GPU, LOCAL_RANK is the rank's number among the group's ranks on its node.
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

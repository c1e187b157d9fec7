"""How the sockets between nodes are set up: unlimited queues, and a kernel that gives up a dead connection in seconds.

A dead peer is left to TCP (keepalive probes, a limit on unacknowledged data) rather than to heartbeats of ZeroMQ: these
wait behind a large message in the same stream and would cut the connection in the middle of it.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
from collections.abc import Sequence

import zmq

from rlplace.errors import ClusterError, Problem

PROBE_S = 1.0  # a channel server looks this often for clients that are gone
LOST_S = 3.0  # how long either side waits for a lost connection to come back
SILENT_S = 4.0  # after this long without a sign of the other machine, TCP gives up the connection


def endure(socket: zmq.Socket) -> None:
    """For both ends, before they bind or connect."""
    socket.set_hwm(0)  # credit bounds what is under way, not the socket
    socket.linger = 0
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = 1  # s
    socket.tcp_keepalive_intvl = 1
    socket.tcp_keepalive_cnt = int(SILENT_S) - 1
    socket.tcp_maxrt = int(SILENT_S * 1000)  # ms


def listen(socket: zmq.Socket, host: str) -> str:
    """Binds to a free port of this one address; the endpoint for clients. Never all addresses of a machine."""
    with contextlib.suppress(ValueError):  # a name is no address
        if ipaddress.ip_address(host).is_unspecified:
            raise _refused(host, "this means every interface of the machine, and is no address to connect to")
    try:
        socket.ipv6 = ":" in host
        socket.bind(f"tcp://{f'[{host}]' if ':' in host else host}:*")
    except zmq.ZMQError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV, errno.EINVAL):
            raise
        raise _refused(host, f"no interface of this machine has it: {error}") from error
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.rstrip(b"\0").decode()


def fd_of(socket: zmq.Socket) -> int:
    """File descriptor for an event loop. Edge-triggered: drain the socket before waiting again."""
    fd = socket.fd
    assert isinstance(fd, int)
    return fd


def has_message(socket: zmq.Socket) -> bool:
    """Whether a message is there. Also resets the signal of `fd_of`."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def receive(socket: zmq.Socket) -> tuple[bytes, Sequence[zmq.Frame]]:
    """The envelope and the frames behind it, without waiting: zmq.Again when nothing is there."""
    envelope = socket.recv(zmq.NOBLOCK)
    return envelope, socket.recv_multipart(copy=False) if socket.getsockopt(zmq.RCVMORE) else ()


def _refused(host: str, why: str) -> ClusterError:
    return ClusterError(
        Problem(
            code="server-address",
            key="channel server",
            what="cannot listen on this address",
            got=repr(host),
            why=why,
            fix="the address by which the other nodes reach this one, such as 10.0.0.1",
        )
    )

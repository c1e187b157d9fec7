"""The transport between nodes: the channel server of a node performs requests of ends on other nodes.

::

    process on node 1                                   node 0
    RemoteChannel ─┐                                    ┌─▶ Channel "observations"
    RemoteChannel ─┴─ Connection ══ tcp, CURVE ══▶ ChannelServer ┴─▶ Channel "answers"
    StreamSource ◀══════════════════ tcp, CURVE ══ StreamTaker       weights, which pass no server
"""

from rlplace.comm.network.connection import Connection, RemoteChannel
from rlplace.comm.network.server import ChannelServer
from rlplace.comm.network.stream import StreamAddress, StreamSource, StreamTaker
from rlplace.comm.network.wire import JobKeys, JobPassword, Keys

__all__ = [
    "ChannelServer",
    "Connection",
    "JobKeys",
    "JobPassword",
    "Keys",
    "RemoteChannel",
    "StreamAddress",
    "StreamSource",
    "StreamTaker",
]

"""The way between nodes: a gate on each channel's node performs what the ends of other nodes ask of it over ZeroMQ.

::

    process on node 1                                   node 0
    RemoteChannel ─┐                                    ┌─▶ Channel "observations"
    RemoteChannel ─┴─ Connection ══ tcp, CURVE ══▶ Gate ┴─▶ Channel "answers"
"""

from rlplace.comm.network.connection import Connection
from rlplace.comm.network.gate import Gate
from rlplace.comm.network.keys import JobKeys, JobPassword, Keys
from rlplace.comm.network.remote import RemoteChannel

__all__ = ["Connection", "Gate", "JobKeys", "JobPassword", "Keys", "RemoteChannel"]

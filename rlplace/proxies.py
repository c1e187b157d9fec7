"""Keep calls to this machine and its cluster away from the proxies of the environment, such as `http_proxy`."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable

LOCAL = ("localhost", "127.0.0.1", "::1")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
_EXCEPT = ("no_proxy", "NO_PROXY")  # some libraries read the first, others the second
DIRECT = (
    ("grpc.enable_http_proxy", 0),
)  # options of a channel of gRPC to a machine of the cluster


def keep_local(nodes: Iterable[str] = ()) -> None:
    """Set `no_proxy` so that network calls to this machine and to `nodes` do not use the proxies.

    This holds for this process and for processes that it starts. `nodes`: addresses of machines. Addresses that are in
    `no_proxy` already stay in it. If the environment does not set a proxy, nothing is changed.
    """
    if not any(
        os.environ.get(name) or os.environ.get(name.upper()) for name in _PROXIES
    ):
        return
    written = [text for name in _EXCEPT for text in os.environ.get(name, "").split(",")]
    given = [text.strip() for text in written if text.strip()]
    if "*" in given:  # no call uses a proxy
        return
    wanted = dict.fromkeys([*given, *LOCAL, socket.gethostname(), *nodes])
    os.environ.update(dict.fromkeys(_EXCEPT, ",".join(wanted)))

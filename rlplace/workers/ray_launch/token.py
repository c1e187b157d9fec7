"""The authentication token of a Ray cluster, which a client sends with each call.

A Ray asks for a token if it finds one when it is started: in RAY_AUTH_TOKEN, in the file of RAY_AUTH_TOKEN_PATH, else
in ~/.ray/auth_token. Ray looks for the token itself when it joins `auto`, but not when it joins an address.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from rlplace.codes import problem
from rlplace.errors import ClusterError
from rlplace.proxies import DIRECT
from rlplace.workers.ray_launch import private

_MODE = "RAY_AUTH_MODE"
_TOKEN = "RAY_AUTH_TOKEN"
_ASK_S = 5.0
# the first request of each Ray client
_CLUSTER_ID = "/ray.rpc.NodeInfoGcsService/GetClusterId"


def make_token() -> Callable[[], None] | None:
    """Create a token for a Ray that will be started here. Return a function that removes the token.

    Without this token, Ray would write one into HOME. The token must be removed before another cluster is joined, or
    other subprocesses are started. If a token exists already or Ray uses no tokens, create nothing and return None.
    """
    loader = private.token_loader()
    mode = os.environ.get(_MODE)
    if (
        loader is None
        or mode not in (None, "token")
        or loader.has_token(ignore_auth_mode=True)
    ):
        return None
    # The variable reaches all processes of the Ray that will be started
    os.environ[_TOKEN] = made = secrets.token_hex(32)
    loader.reset_cache()

    def forget() -> None:
        if os.environ.get(_TOKEN) == made:
            del os.environ[_TOKEN]
            # Ray has set the mode because of the token.
            if mode is None:
                os.environ.pop(_MODE, None)
            private.read_mode_again()

    return forget


def use_token(address: str) -> Callable[[], None] | None:
    """Make Ray send its token to the cluster at `address`; if this cluster asks for no token, switch tokens off in this
    process.

    `address`: "host:port". Return a function that switches tokens on again, or None if they were not switched off.
    Raise ClusterError if the cluster asks for a token, and this process has no token or a wrong token.
    """
    loader = private.token_loader()
    if loader is None:
        return None
    if not _refuses(address, {}):
        return _ask_for_none(loader)
    error = "mode"
    if os.environ.get(_MODE, "token") == "token":
        error = "none"
        if loader.has_token(ignore_auth_mode=True):
            private.send_token()
            if not _refuses(address, loader.get_token_for_http_header()):
                return None
            error = "another"
    refused = problem(
        "cluster-token",
        "cluster.ray.address",
        address,
        error=error,
        variable=_MODE,
        mode=os.environ.get(_MODE),
        token=_TOKEN,
        host=address.rpartition(":")[0],
    )
    raise ClusterError(refused)


def _ask_for_none(loader: Any) -> Callable[[], None] | None:
    """Switch tokens off in this process if Ray would find a token here.

    Return a function that switches tokens on again; None if they were not switched off. With tokens on, Ray would
    reject calls to this process without a token. A cluster without tokens makes such calls: it would take this process
    for dead, and end its actors.

    `loader`: result of `private.token_loader`.
    """
    if _MODE in os.environ or not loader.has_token(ignore_auth_mode=True):
        return None
    os.environ[_MODE] = "disabled"
    private.read_mode_again()

    def undo() -> None:
        os.environ.pop(_MODE, None)
        private.read_mode_again()

    return undo


def _refuses(address: str, headers: Mapping[str, str]) -> bool:
    """Return whether the cluster at `address` rejects a request with `headers` because the token is missing or wrong.

    Ray's own connection would try for 20 s, and its error would say less about the reason.
    """
    import grpc

    with grpc.insecure_channel(address, options=DIRECT) as channel:
        ask = channel.unary_unary(
            _CLUSTER_ID, request_serializer=None, response_deserializer=None
        )
        try:
            ask(
                b"",
                timeout=_ASK_S,
                metadata=[(name.lower(), value) for name, value in headers.items()],
            )
        except grpc.RpcError as error:
            return bool(error.code() == grpc.StatusCode.UNAUTHENTICATED)
    return False

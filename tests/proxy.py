"""A proxy that counts who comes, a server beside it, and a simulator that asks the server."""

from __future__ import annotations

import contextlib
import os
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.envs.registration import register

from tests.served import in_a_thread

ADDRESS = "TESTS_SERVER"  # variable with the server's URL


class _Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.asked: list[str] = []


class _Answers(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"here")

    do_CONNECT = do_GET

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def answering() -> Iterator[tuple[str, list[str]]]:
    """Serve on this machine; give the URL, and a list of the paths that are asked for."""
    with in_a_thread(_Server()) as server:
        yield f"http://127.0.0.1:{server.server_address[1]}", server.asked


class Asking(CartPoleEnv):
    """CartPole that asks a server before it begins, as a simulator that runs elsewhere on the machine would."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        urllib.request.build_opener().open(
            os.environ[ADDRESS], timeout=20
        ).read()  # not the one of an earlier test


register("Asking-v0", entry_point=Asking, max_episode_steps=100)

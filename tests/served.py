"""Serves HTTP in a thread of a test."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import TypeVar

Server = TypeVar("Server", bound=ThreadingHTTPServer)


@contextlib.contextmanager
def in_a_thread(made: Server) -> Iterator[Server]:
    """Serve until the end of the block, also of a block that raises."""
    with made as server:
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}
        )
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()

"""`python -m rlplace.workers.roles.reward_server <folder>`: serve a reward model with the protocol of `reward`.

One model in one process; requests are answered one after the other, each packed without padding.
"""

from __future__ import annotations

import argparse
import contextlib
import hmac
import json
import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlplace.algo.packing import fit
from rlplace.commands import begin
from rlplace.config.model_folder import model_folder, no_folder
from rlplace.json_text import parsed, read_object
from rlplace.models.causal_lm import FrozenLm, reward_lm
from rlplace.models.packed import Packed
from rlplace.models.tokenizer import Tokenizer

# Most bytes of a request, and of one without the key, which is read only to be answered
_MOST_BYTES = 64 << 20
_MOST_UNKNOWN = 1 << 20
_MOST_CONNECTIONS = 256
_SILENT_S = 60.0  # without data, after which a connection is closed
_BODY_S = 120.0  # longest time in which the body of a request has to arrive
_PIECE = 1 << 16  # bytes of a body that are read at once
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class RewardServer(ThreadingHTTPServer):
    """An HTTP server that answers POST requests with the scores of a reward model.

    `serve_forever` answers requests. `server_close` closes the server. `api_key`: bearer token that each request must
    have; None: requests need no token. Bytes, seconds and connections of requests are limited.
    """

    daemon_threads = True

    def __init__(
        self,
        folder: Path,
        *,
        address: tuple[str, int],
        dtype: Any,
        head: str,
        token_budget: int,
        api_key: str | None,
    ) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._lm = FrozenLm(reward_lm(head), folder, dtype, None, device)
        self._tokenizer = Tokenizer.load(folder)
        self._token_budget = token_budget
        self._lock = threading.Lock()
        # None for a model without such a limit
        self.most_tokens = most_tokens(folder)
        self.api_key = api_key
        self._connections = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        super().__init__(address, _Post)

    def rewards(self, queries: Sequence[str]) -> list[float]:
        """Return the model's score of each text in `queries`; the texts may contain special tokens.

        Raises ValueError if a text is longer than the model reads.
        """
        texts = [self._tokenizer.encode(query) for query in queries]
        longest = max(map(len, texts), default=0)
        if self.most_tokens is not None and longest > self.most_tokens:
            raise ValueError(
                f"a text has {longest} tokens, and the model reads {self.most_tokens}"
            )
        found = [0.0] * len(texts)
        for picks in fit([len(text) for text in texts], self._token_budget):
            nowhere = [np.zeros(len(texts[i]), np.bool_) for i in picks]
            # Requests take turns between two passes.
            with self._lock, torch.no_grad():
                scores = self._lm.module(
                    Packed.of([texts[i] for i in picks], nowhere, self._lm.device)
                )
            for i, score in zip(picks, scores.tolist(), strict=True):
                found[i] = score
        return found

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer the requests of a connection in a thread of its own; refuse a connection beyond the most."""
        if not self._connections.acquire(blocking=False):
            with contextlib.suppress(OSError):
                request.sendall(_BUSY)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # the thread was not started
            self._connections.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the error of a request, unless the client has closed its connection or is silent."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def most_tokens(folder: Path) -> int | None:
    """Return the most tokens of a text that a model reads, by its config.json; None if that names no limit."""
    config = read_object(folder / "config.json", "folder")
    longest = config.get("max_position_embeddings")
    return longest if isinstance(longest, int) else None


class _Post(BaseHTTPRequestHandler):
    server: RewardServer
    protocol_version = "HTTP/1.1"
    timeout = _SILENT_S

    def do_POST(self) -> None:
        # The key comes before the body, which may be large.
        known = self._has_key()
        most = _MOST_UNKNOWN
        if known:
            most = _MOST_BYTES
        given = self.headers.get("Content-Length", "")
        size = int(given) if re.fullmatch(r"[0-9]{1,18}", given) else None
        if not known:
            # A short body is read and dropped: a client that still sends would not see the answer.
            if size is None or size > most:
                self.close_connection = True
            else:
                self._read(size, keep=False)
            return self._refuse(HTTPStatus.UNAUTHORIZED, "a bearer token is needed")
        if size is None:
            self.close_connection = True
            why = "a request has a Content-Length: bodies in chunks are not read"
            return self._refuse(HTTPStatus.LENGTH_REQUIRED, why)
        if size > most:
            self.close_connection = True
            why = f"a request has at most {most} bytes, this one {size}"
            return self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, why)
        body = self._read(size)
        try:
            queries = parsed(body)["query"]
            if not all(isinstance(query, str) and query for query in queries):
                raise TypeError
            # Half a character has no bytes, and so no tokens.
            for query in queries:
                query.encode()
        except (ValueError, KeyError, TypeError):
            why = 'expected {"query": [text, ...]}, no text empty'
            return self._refuse(HTTPStatus.BAD_REQUEST, why)
        try:
            rewards = self.server.rewards(queries)
        except ValueError as error:
            return self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        return self._answer(HTTPStatus.OK, {"rewards": rewards})

    def _has_key(self) -> bool:
        """Return whether a request has the key; the time of the comparison says nothing about the key."""
        key = self.server.api_key
        if key is None:
            return True
        given = self.headers.get("Authorization", "").encode(errors="surrogateescape")
        return hmac.compare_digest(given, f"Bearer {key}".encode())

    def _read(self, size: int, *, keep: bool = True) -> bytes:
        """Read the body of a request, of `size` bytes, and return it; without `keep`, drop it and return no bytes.

        Raises TimeoutError if it does not arrive in time, and ConnectionError if the client ends before.
        """
        until_s = time.monotonic() + _BODY_S
        pieces: list[bytes] = []
        while size:
            piece = self.rfile.read1(min(size, _PIECE))
            if not piece:
                raise ConnectionAbortedError("the body ends before its length")
            if time.monotonic() > until_s:
                raise TimeoutError
            size -= len(piece)
            if keep:
                pieces.append(piece)
        return b"".join(pieces)

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._answer(status, {"error": why})

    def _answer(self, status: HTTPStatus, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Do nothing, so that requests are not logged."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="serve_reward", description="Serves a reward model over HTTP."
    )
    parser.add_argument(
        "folder",
        type=Path,
        help="a Hugging Face folder or hub id: sequence classification with one label",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=5000, help="0: any free one")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="bf16")
    parser.add_argument(
        "--head", default="score", help="name of the head's weight, before .weight"
    )
    parser.add_argument(
        "--token-budget", type=int, default=8192, help="tokens of one pass"
    )
    parser.add_argument(
        "--api-key-env", help="environment variable with the bearer token to ask for"
    )
    options = parser.parse_args(arguments)
    key = None if options.api_key_env is None else os.environ.get(options.api_key_env)
    if options.api_key_env is not None and not key:
        parser.error(
            f"--api-key-env: there is no environment variable {options.api_key_env}, or it is empty"
        )
    folder = model_folder(str(options.folder))
    if not folder.is_dir():
        parser.exit(2, f"{no_folder(str(options.folder), 'folder').render()}\n")
    with RewardServer(
        folder,
        address=(options.host, options.port),
        dtype=options.dtype,
        head=options.head,
        token_budget=options.token_budget,
        api_key=key,
    ) as server:
        host, port = server.server_address[:2]
        sys.stdout.write(f"{options.folder} answers at http://{host!s}:{port}\n")
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


if __name__ == "__main__":
    begin()
    main()

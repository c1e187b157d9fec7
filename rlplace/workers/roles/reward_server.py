"""`python -m rlplace.workers.roles.reward_server <folder>`: serve a reward model with the protocol of `reward`.

One model in one process; requests are answered one after the other, each packed without padding.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import threading
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
from rlplace.models.causal_lm import FrozenLm, reward_lm
from rlplace.models.packed import Packed
from rlplace.models.tokenizer import Tokenizer


class RewardServer(ThreadingHTTPServer):
    """An HTTP server that answers POST requests with the scores of a reward model.

    `serve_forever` answers requests. `server_close` closes the server. `api_key`: bearer token that each request must
    have; None: requests need no token.
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
        self.api_key = api_key
        super().__init__(address, _Post)

    def rewards(self, queries: Sequence[str]) -> list[float]:
        """Return the model's score of each text in `queries`; the texts may contain special tokens."""
        with self._lock, torch.no_grad():
            texts = [self._tokenizer.encode(query) for query in queries]
            found = [0.0] * len(texts)
            for picks in fit([len(text) for text in texts], self._token_budget):
                nowhere = [np.zeros(len(texts[i]), np.bool_) for i in picks]
                scores = self._lm.module(
                    Packed.of([texts[i] for i in picks], nowhere, self._lm.device)
                )
                for i, score in zip(picks, scores.tolist(), strict=True):
                    found[i] = score
        return found


class _Post(BaseHTTPRequestHandler):
    server: RewardServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        key = self.server.api_key
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if key is not None and self.headers.get("Authorization") != f"Bearer {key}":
            return self._answer(
                HTTPStatus.UNAUTHORIZED, {"error": "a bearer token is needed"}
            )
        try:
            queries = json.loads(body)["query"]
            if not all(isinstance(query, str) and query for query in queries):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            return self._answer(
                HTTPStatus.BAD_REQUEST,
                {"error": 'expected {"query": [text, ...]}, no text empty'},
            )
        return self._answer(HTTPStatus.OK, {"rewards": self.server.rewards(queries)})

    def _answer(self, status: HTTPStatus, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
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

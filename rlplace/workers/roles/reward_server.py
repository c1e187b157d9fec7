"""`python -m rlplace.workers.roles.reward_server <folder>`: serve a reward model with the protocol of `reward`.

One model in one process; requests are answered one after the other, each packed without padding.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlplace.algo.packing import fit
from rlplace.commands import begin
from rlplace.config.model_folder import model_folder, no_folder
from rlplace.errors import ConfigError
from rlplace.http_server import JsonServer, Limits, Refused
from rlplace.json_text import parsed, read_object
from rlplace.models.causal_lm import FrozenLm, reward_lm
from rlplace.models.packed import Packed
from rlplace.models.tokenizer import Tokenizer

# Limits for clients
_LIMITS = Limits()
_WRONG = 'expected {"query": [text, ...]}, no text empty'


class RewardServer(JsonServer):
    """An HTTP server that answers POST requests with the scores of a reward model.

    `serve_forever` answers requests. `server_close` closes the server. `api_key`: bearer token that each request must
    have; None: requests need no token. `limits`: what clients may take.
    """

    def __init__(
        self,
        folder: Path,
        *,
        address: tuple[str, int],
        dtype: Any,
        head: str,
        token_budget: int,
        api_key: str | None,
        limits: Limits = _LIMITS,
    ) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._lm = FrozenLm(reward_lm(head), folder, dtype, None, device)
        self._tokenizer = Tokenizer.load(folder)
        self._token_budget = token_budget
        self._lock = threading.Lock()
        # None for a model without such a limit
        self.most_tokens = most_tokens(folder)
        owners = None if api_key is None else {api_key: None}
        super().__init__(address, owners=owners, limits=limits)

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

    def post(self, path: str, owner: None, body: bytes) -> object:
        """Return the scores of the texts in a request. Raises Refused."""
        try:
            queries = parsed(body)["query"]
            if not all(isinstance(query, str) and query for query in queries):
                raise TypeError
            # Half a character has no bytes, and so no tokens.
            for query in queries:
                query.encode()
        except (ValueError, KeyError, TypeError) as error:
            raise Refused(HTTPStatus.BAD_REQUEST, _WRONG) from error
        try:
            return {"rewards": self.rewards(queries)}
        except ValueError as error:
            raise Refused(HTTPStatus.BAD_REQUEST, str(error)) from error


def most_tokens(folder: Path) -> int | None:
    """Return the largest number of tokens that a model can read; None if its config.json has no limit."""
    config = read_object(folder / "config.json", "folder")
    longest = config.get("max_position_embeddings")
    return longest if isinstance(longest, int) else None


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
    try:
        made = RewardServer(
            folder,
            address=(options.host, options.port),
            dtype=options.dtype,
            head=options.head,
            token_budget=options.token_budget,
            api_key=key,
        )
    except ConfigError as error:
        parser.exit(2, f"{error}\n")
    with made as server:
        host, port = server.server_address[:2]
        sys.stdout.write(f"{options.folder} answers at http://{host!s}:{port}\n")
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


if __name__ == "__main__":
    begin()
    main()

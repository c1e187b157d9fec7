"""The HTTP server of the training API, in the protocol of the client `tinker` 0.38.

::

    POST /api/v1/<request>  ──▶ checked, entered in the book ──▶ {"request_id": ...}
    POST /api/v1/retrieve_future ──▶ waits ──▶ the result; after some seconds 408: ask again

The key of a request is in its header X-API-Key. An error of a request is its result; a request that cannot be read is
answered with 400.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from email.message import Message
from http import HTTPStatus
from typing import Any

from rlplace.http_server import Bytes, JsonServer, Limits, Refused
from rlplace.workers.serving.book import (
    Book,
    Sampled,
    Snapshot,
    TooMany,
    Training,
    Wrong,
)
from rlplace.workers.serving.given import (
    MOST_SAMPLES,
    Given,
    Stops,
    pass_of,
    prompt_of,
    sampling_of,
    step_of,
)
from rlplace.workers.serving.messages import Command, LoadState, SaveModel, SaveState
from rlplace.workers.serving.wire import NotReadable, PassMessage, read_pass

_ROOT = "/api/v1/"
# The longest wait for a result before the client has to ask again
_PATIENCE_S = 20.0
# What this server does not do -> why, or what to do
_ABSENT: Mapping[str, str] = {
    "create_custom_loss": "the server runs no code of clients; forward_backward_custom without a LossHandle works",
    "copy_weights": "copy the folder of the weights",
    "save_weights_external": "python -m rlplace.export writes models for other programs",
    "retrieve_futures": "ask for each result by retrieve_future",
    "join_sampling_session": "make a sampling client in each process",
    "auth/token": "the key is sent with each request",
}
_SENT = "application/x-protobuf"


class ApiServer(JsonServer):
    """Answers the requests of clients: it checks them, enters them in the book, and waits for results.

    `key`: that requests have to bring. `stops`: from stop texts to what engines take.
    """

    gets_need_key = True

    def __init__(
        self,
        address: tuple[str, int],
        book: Book,
        *,
        key: str,
        stops: Stops,
        limits: Limits,
    ) -> None:
        self._book = book
        self._stops = stops
        self._posts: Mapping[str, Callable[[Given], object]] = {
            "client/config": self._client_config,
            "client/dynamic_config": lambda given: {},
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "telemetry": lambda given: {"status": "accepted"},
            "create_model": self._create_model,
            "unload_model": self._unload_model,
            "get_info": self._get_info,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "load_weights": self._load_weights,
            "weights_info": self._weights_info,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
            "cancel_future": self._cancel,
        }
        super().__init__(address, owners={key: None}, limits=limits)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def authorization(self, headers: Message) -> str:
        return f"Bearer {headers.get('X-API-Key', '')}"

    def refusal(self, status: int, why: str) -> object:
        return {"error": why, "message": why}

    def post(self, path: str, owner: Any, body: bytes) -> object:
        name = path.partition("?")[0].removeprefix(_ROOT)
        finished = re.fullmatch(r"sessions/([\w-]+)/finish", name)
        try:
            message = None
            if name == "forward_backward":
                # Read before the lock: it may be large
                message = _message_in(body)
            with self._book.changed:
                if finished is not None:
                    self._book.finish_session(finished[1])
                    return {}
                if message is not None:
                    return self._forward_backward(message)
                if name in self._posts:
                    return self._posts[name](Given.of(body))
        except TooMany as error:
            raise Refused(HTTPStatus.TOO_MANY_REQUESTS, str(error)) from error
        except (Wrong, NotReadable) as error:
            raise Refused(HTTPStatus.BAD_REQUEST, str(error)) from error
        raise _absent(name)

    def get(self, path: str) -> object:
        name = path.partition("?")[0].removeprefix(_ROOT)
        served = self._book.served
        if name == "healthz":
            return {"status": "ok"}
        if name == "get_server_capabilities":
            model = {
                "model_name": served.name,
                "max_context_length": served.longest,
                "trainable": True,
                "sampleable": True,
            }
            return {"supported_models": [model]}
        asked = re.fullmatch(r"samplers/([\w:-]+)", name)
        if asked is None:
            raise _absent(name)
        try:
            with self._book.changed:
                snapshot = self._book.sampler(asked[1])
        except Wrong as error:
            raise Refused(HTTPStatus.NOT_FOUND, str(error)) from error
        return {
            "sampler_id": asked[1],
            "base_model": served.name,
            "model_path": snapshot.path or None,
        }

    # ── clients and models ───────────────────────────────────────────────────────────────────────────────────────────

    def _client_config(self, given: Given) -> object:
        return {
            "pjwt_auth_enabled": False,
            "proto_compress_fwdbwd": False,
            "use_pyqwest_transport": False,
            "sample_use_retrieve_futures": False,
            "custom_loss_server_side": False,
            "sample_join_sampling_session": False,
            # Each waits at a connection of its own
            "sample_max_concurrent_requests": self.limits.connections // 2,
            "fwdbwd_max_chunk_bytes_count": min(5_000_000, self.limits.body_bytes // 2),
        }

    def _create_session(self, given: Given) -> object:
        return {"type": "create_session", "session_id": self._book.open_session()}

    def _heartbeat(self, given: Given) -> object:
        self._book.session(given.text("session_id"))
        return {"type": "session_heartbeat"}

    def _check_base(self, name: str | None) -> None:
        served = self._book.served
        if name is not None and name not in served.names:
            known = " or ".join(map(repr, served.names))
            raise Wrong(f"the server has the model {known}, not {name!r}")

    def _create_model(self, given: Given) -> object:
        session = given.text("session_id")
        number = given.whole("model_seq_id")
        name = f"{session}:train:{number}:create"
        if self._book.futures.get(name) is not None:
            return _promised(name)
        future = self._book.futures.promise(name)
        try:
            self._check_base(given.text("base_model"))
            self._check_lora(given)
            kind = given.value("optimizer_config") or {}
            if not isinstance(kind, dict) or kind.get("type", "adamw") != "adamw":
                raise Wrong("the server steps by AdamW only")
            model = self._book.new_model(session, number)
        except Wrong as error:
            self._book.futures.fail(future, str(error))
        else:
            made = {"model_id": model.name, "type": "create_model"}
            self._book.futures.finish(future, made)
        return _promised(name)

    def _check_lora(self, given: Given) -> None:
        """Raise Wrong if a client asks for other LoRA factors than the server's."""
        rank = self._book.served.lora_rank
        if given.value("lora_config") is None or rank is None:
            # A server that trains all weights trains more than any factors can
            return
        asked = given.part("lora_config").whole("rank")
        if asked != rank:
            raise Wrong(
                f"the server trains factors of rank {rank}, and rank {asked} is asked: rank={rank} in the client, "
                f"or actor.lora_rank={asked} for the server"
            )

    def _unload_model(self, given: Given) -> object:
        model = given.text("model_id")
        name = f"{model}:unload"
        future = self._book.futures.promise(name)
        self._book.drop(model)
        content = {"model_id": model, "type": "unload_model"}
        self._book.futures.finish(future, content)
        return _promised(name)

    def _get_info(self, given: Given) -> object:
        model = self._book.model(given.text("model_id"))
        served = self._book.served
        data = {
            "model_name": served.name,
            # The client loads the tokenizer from there
            "tokenizer_id": str(served.folder),
        }
        return {
            "type": "get_info",
            "model_data": data,
            "model_id": model.name,
            "model_name": served.name,
            "is_lora": served.lora_rank is not None,
            "lora_rank": served.lora_rank,
        }

    def _weights_info(self, given: Given) -> object:
        path = given.text("tinker_path")
        kind = "sampler_weights" if "/sampler_weights/" in path else "weights"
        self._book.find(
            path, "sampler_weights" if kind == "sampler_weights" else "weights"
        )
        served = self._book.served
        return {
            "base_model": served.name,
            "is_lora": served.lora_rank is not None,
            "lora_rank": served.lora_rank,
        }

    # ── training ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _enter(self, model: str, number: int, make: Callable[[], Training]) -> object:
        """Enter a training request, and return its promise. If `make` raises Wrong, the error is its result.

        An error is told in the turn of the request, so that later requests do not wait for its number.
        """
        self._book.model(model)
        name = f"{model}:{number}"
        if self._book.futures.get(name) is not None:
            return _promised(name, model)
        try:
            work = make()
        except TooMany:
            raise
        except Wrong as error:
            future = self._book.futures.promise(name)
            work = Training(
                future=future, model=model, command=None, result={}, refused=str(error)
            )
        self._book.enter(work, number)
        return _promised(name, model)

    def _training(
        self, model: str, number: int, command: Command, result: Mapping[str, Any]
    ) -> Training:
        future = self._book.futures.promise(f"{model}:{number}")
        return Training(future=future, model=model, command=command, result=result)

    def _forward_backward(self, message: PassMessage) -> object:
        model = message.model_id
        number = message.number

        def make() -> Training:
            command = pass_of(message, self._book.served)
            return self._training(model, number, command, {})

        return self._enter(model, number, make)

    def _optim_step(self, given: Given) -> object:
        model = given.text("model_id")
        number = given.whole("seq_id")
        return self._enter(
            model,
            number,
            lambda: self._training(model, number, step_of(given), {}),
        )

    def _save_weights(self, given: Given) -> object:
        model = given.text("model_id")
        number = given.whole("seq_id")

        def make() -> Training:
            name = given.text_or_none("path") or f"{number:06d}"
            path, folder = self._book.new_place(
                model, "weights", name, overwrite=given.flag("overwrite")
            )
            result = {"path": path, "type": "save_weights"}
            return self._training(model, number, SaveState(folder=folder), result)

        return self._enter(model, number, make)

    def _save_for_sampler(self, given: Given) -> object:
        model = given.text("model_id")
        number = given.whole("seq_id")

        def make() -> Training:
            if given.text_or_none("kind") == "inflight":
                raise Wrong(
                    "a sampler has the weights of one moment: kind is snapshot, not inflight"
                )
            result = {"type": "save_weights_for_sampler"}
            name = given.text_or_none("path")
            if name is None:
                folder = self._book.unnamed_place(self._book.model(model))
                sampler = f"{model}:sample:{number}"
                result["sampling_session_id"] = sampler
                path = ""
            else:
                path, folder = self._book.new_place(
                    model, "sampler_weights", name, overwrite=True
                )
                sampler = ""
                result["path"] = path
            work = self._training(model, number, SaveModel(folder=folder), result)
            work.sampler = (sampler, folder, path)
            return work

        return self._enter(model, number, make)

    def _load_weights(self, given: Given) -> object:
        model = given.text_or_none("model_id")
        number = given.whole("seq_id", 0)
        if model is None:
            session = given.text("session_id")
            made = given.whole("model_seq_id")
            model = f"{session}:train:{made}"
            name = f"{model}:0"
            if self._book.futures.get(name) is not None:
                return _promised(name, model)
            try:
                self._check_base(given.text_or_none("base_model"))
                self._book.find(given.text("path"), "weights")
                self._book.new_model(session, made)
            except Wrong as error:
                future = self._book.futures.promise(name)
                self._book.futures.fail(future, str(error))
                return _promised(name, model)
        of = model

        def make() -> Training:
            path = given.text("path")
            folder = self._book.find(path, "weights")
            command = LoadState(folder=folder, optimizer=given.flag("optimizer"))
            result = {"path": path, "model_id": of, "type": "load_weights"}
            return self._training(of, number, command, result)

        return self._enter(of, number, make)

    # ── sampling ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _create_sampler(self, given: Given) -> object:
        self._book.session(given.text("session_id"))
        snapshot = self._asked_snapshot(given)
        return {
            "type": "create_sampling_session",
            "sampling_session_id": self._book.add_sampler(snapshot),
        }

    def _asked_snapshot(self, given: Given) -> Snapshot:
        self._check_base(given.text_or_none("base_model"))
        return self._book.snapshot(given.text_or_none("model_path"))

    def _sample(self, given: Given) -> object:
        sampler = given.text_or_none("sampling_session_id")
        number = given.whole("seq_id", 0)
        samples = given.whole("num_samples", 1)
        if not 1 <= samples <= MOST_SAMPLES:
            raise Wrong(f"num_samples is from 1 to {MOST_SAMPLES}, not {samples}")
        if sampler is None:
            name = self._book.add_sampler(self._asked_snapshot(given)) + ":0"
        else:
            name = f"{sampler}:{number}"
        promised = _promised(name)
        promised["sample_sequence_ids"] = [f"{name}:{i}" for i in range(samples)]
        if self._book.futures.get(name) is not None:
            return promised
        snapshot = self._book.sampler(name.rpartition(":")[0])
        try:
            work = self._sampled(given, name, snapshot, samples)
        except Wrong as error:
            self._book.futures.fail(self._book.futures.promise(name), str(error))
            return promised
        self._book.enter_sampling(work)
        return promised

    def _sampled(
        self, given: Given, name: str, snapshot: Snapshot, samples: int
    ) -> Sampled:
        for unread in (
            "topk_prompt_logprobs",
            "topk_sample_logprobs",
            "prompt_alt_tokens_k",
        ):
            if given.whole(unread, 0):
                raise Wrong(
                    f"{unread} is not computed here: log-probabilities are those of the tokens themselves"
                )
        for unread in ("target_prompt_logprobs", "prompt_logprobs_last_n"):
            if given.value(unread) is not None:
                raise Wrong(
                    f"{unread} is not computed here; prompt_logprobs are, of the whole prompt"
                )
        tokens = prompt_of(given, self._book.served)
        parameters = given.part("sampling_params")
        room = self._book.served.longest - len(tokens)
        most = parameters.whole_or_none("max_tokens")
        if most is not None and most < 1:
            raise Wrong(f"max_tokens is at least 1, not {most}")
        return Sampled(
            future=self._book.futures.promise(name),
            snapshot=snapshot,
            tokens=tokens,
            samples=samples,
            max_new_tokens=room if most is None else min(most, room),
            sampling=sampling_of(parameters, self._stops),
            scores=given.flag("prompt_logprobs"),
        )

    # ── results ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _retrieve(self, given: Given) -> object:
        name = given.text("request_id")
        future = self._book.futures.wait(name, _PATIENCE_S)
        if future is None:
            why = f"there is no request {name!r}: the server was started anew, or its result was fetched long ago"
            raise Refused(HTTPStatus.NOT_FOUND, why)
        if future.content is None:
            again = {"type": "try_again", "request_id": name, "queue_state": "active"}
            raise Refused(HTTPStatus.REQUEST_TIMEOUT, "it is not done yet", again)
        if isinstance(future.content, bytes):
            return Bytes(future.content, _SENT)
        return future.content

    def _cancel(self, given: Given) -> object:
        """Cancel a request for samples that has not begun. One that has begun goes on."""
        name = given.text("request_id")
        for work in list(self._book.sampling):
            if work.future.name == name:
                self._book.sampling.remove(work)
                self._book.futures.fail(work.future, "it was cancelled")
        return {}


def _message_in(body: bytes) -> PassMessage:
    """Return the request for a pass in `body`. Raises Wrong for JSON, NotReadable for anything else."""
    if body[:1] == b"{":
        raise Wrong(
            "forward_backward is sent as protobuf, as clients of version 0.38 do; this body is JSON"
        )
    return read_pass(body)


def _promised(name: str, model: str | None = None) -> dict[str, Any]:
    return {"request_id": name, "model_id": model}


def _absent(name: str) -> Refused:
    hint = _ABSENT.get(name)
    why = f"this server does not answer {_ROOT}{name}"
    if hint is not None:
        why = f"{why}: {hint}"
    return Refused(HTTPStatus.NOT_FOUND, why)

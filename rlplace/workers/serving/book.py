"""What a server of the training API knows: sessions, models, saved weights, and the requests that wait.

HTTP threads enter requests; the worker takes them, one training request or several requests for samples at a time.
All methods are called with the lock `changed` held. Nothing here uses a network, a model or a channel.

::

    tinker://<model>/weights/<name>            folder/<model>/weights/<name>/           state: to train on
    tinker://<model>/sampler_weights/<name>    folder/<model>/sampler_weights/<name>/   model: a Hugging Face folder
    a sampler without a name                   folder/<model>/unnamed/<number>/         the newest few are kept
    a model that others have displaced         folder/<model>/parked/
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import re
import shutil
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rlplace.json_text import parsed_object
from rlplace.tokens import Completion, Sampling, Tokens
from rlplace.workers.serving.futures import Future, Futures
from rlplace.workers.serving.messages import Command

_PATH = re.compile(
    r"tinker://([0-9a-f]{32}:train:\d{1,9})/(weights|sampler_weights)/([\w.-]{1,128})"
)
_NAME = re.compile(r"(?!\.+$)[\w.-]{1,128}", re.ASCII)
# A request whose number is missing is awaited for so long
_GAP_S = 60.0
Kind = Literal["weights", "sampler_weights"]
# Name of the Hugging Face folder in the folder of a sampler; factors are beside it
MODEL = "model"


class Wrong(Exception):  # the answer to a request is made of it
    """Raised for a request that cannot be fulfilled. The text tells the client why."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model that is served. `names`: by which clients may ask for it; the first is shown. `folder`: its Hugging
    Face folder. `longest`: most tokens of a sequence. `vocabulary`: number of token ids. `lora_rank`: None: all
    weights are trained.
    """

    names: Sequence[str]
    folder: Path
    longest: int
    vocabulary: int
    lora_rank: int | None

    @property
    def name(self) -> str:
        return self.names[0]


@dataclasses.dataclass(slots=True)
class Session:
    """A client. `seen_s`: monotonic seconds of its last request."""

    name: str
    seen_s: float
    finished: bool = False


@dataclasses.dataclass(slots=True, kw_only=True)
class Training:
    """A training request that waits. `command`: for the actor; None: it only makes a model. `path`: of saved weights,
    which the result names. `made`: JSON object of the result, to which the command adds.
    """

    future: Future
    model: str
    command: Command | None
    result: Mapping[str, Any]
    # The sampler that this request makes: (name of its session or "", folder, path or "")
    sampler: tuple[str, str, str] | None = None
    # Why the request is refused in its turn; "": it is not
    refused: str = ""


@dataclasses.dataclass(slots=True, kw_only=True)
class Model:
    """A model of a client. `weights`: number of its present weights, by which equal ones are known. `parked`: folder
    of its state while another one is in the actor; None: it has its first weights. `unnamed`: folders of samplers
    without names.
    """

    name: str
    session: str
    weights: int = 0
    parked: str | None = None
    changed: bool = False
    next_number: int = 1
    waiting: dict[int, tuple[Training, float]] = dataclasses.field(default_factory=dict)
    unnamed: collections.deque[str] = dataclasses.field(
        default_factory=collections.deque
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Weights to sample by. `weights`: their number; None: it is not known, as after a restart. `folder`: "": those of
    the model as it was given. `path`: as clients write it; "" without a name.
    """

    weights: int | None
    folder: str
    path: str = ""


@dataclasses.dataclass(slots=True, kw_only=True)
class Sampled:
    """A request for samples, waiting or under way. `scores`: whether log-probabilities of the prompt are asked."""

    future: Future
    snapshot: Snapshot
    tokens: Tokens
    samples: int
    max_new_tokens: int
    sampling: Sampling
    scores: bool
    answers: dict[int, Completion] = dataclasses.field(default_factory=dict)
    prompt_logprobs: Sequence[float] | None = None

    @property
    def whole(self) -> bool:
        scored = self.prompt_logprobs is not None or not self.scores
        return scored and len(self.answers) == self.samples


class Book:
    """The state of a server. `changed`: guards it, and is notified of each change.

    `folder`: where weights are saved. `models`: most models at a time. `requests`: most waiting requests.
    `silent_s`: seconds without a request after which a client has gone. `kept`: unnamed samplers of each model.
    """

    def __init__(
        self,
        served: ServedModel,
        folder: Path,
        *,
        models: int,
        requests: int,
        silent_s: float,
        kept: int,
    ) -> None:
        self.changed = threading.Condition()
        self.futures = Futures(self.changed)
        self.served = served
        self.folder = folder
        # The model whose state is in the actor; None: the first weights, which no client has changed
        self.resident: Model | None = None
        # Number of the weights that the engines have from the last sync
        self.synced = 0
        self._most_models = models
        self._most_requests = requests
        self._silent_s = silent_s
        self._kept = kept
        self._sessions: dict[str, Session] = {}
        self._models: dict[str, Model] = {}
        self._samplers: dict[str, Snapshot] = {}
        # Path of saved sampler weights -> their number
        self.named: dict[str, int] = {}
        self._numbers = itertools.count(1)
        self.sampling: collections.deque[Sampled] = collections.deque()
        # Models that were dropped since the actor was told
        self.dropped: list[str] = []

    # ── sessions and models ──────────────────────────────────────────────────────────────────────────────────────────

    def open_session(self) -> str:
        name = uuid.uuid4().hex
        self._sessions[name] = Session(name, time.monotonic())
        return name

    def session(self, name: str) -> Session:
        """Return a session, which has made a request now. Raises Wrong."""
        found = self._sessions.get(name)
        if found is None:
            raise Wrong(
                f"there is no session {name!r}: the server may have been started anew; make a new client"
            )
        found.seen_s = time.monotonic()
        return found

    def finish_session(self, name: str) -> None:
        self.session(name).finished = True

    def new_model(self, session: str, number: int) -> Model:
        """Return a new model with the first weights. Raises Wrong if there are too many models.

        `number`: of the model within its session. A model that exists is returned, for requests that were sent twice.
        """
        self.session(session)
        name = f"{session}:train:{number}"
        if name in self._models:
            return self._models[name]
        if len(self._models) >= self._most_models:
            self._drop_left_models()
        if len(self._models) >= self._most_models:
            raise Wrong(
                f"the server has {self._most_models} models of clients, as many as serve.models allows; "
                "end a client, or unload a model"
            )
        model = Model(name=name, session=session)
        self._models[name] = model
        return model

    def _drop_left_models(self) -> None:
        """Drop the models of clients that have ended or are silent."""
        now = time.monotonic()
        for model in list(self._models.values()):
            session = self._sessions[model.session]
            silent = now - session.seen_s > self._silent_s
            if (session.finished or silent) and not model.waiting:
                self.drop(model.name)

    def drop(self, name: str) -> None:
        """Forget a model, and remove its state and its samplers without names. What it saved by name stays."""
        model = self.model(name)
        del self._models[name]
        self.dropped.append(name)
        for work, _ in model.waiting.values():
            self.futures.fail(work.future, "the model was unloaded")
        for folder in (*model.unnamed, str(self._place(name) / "parked")):
            shutil.rmtree(folder, ignore_errors=True)
        if self.resident is model:
            self.resident = dataclasses.replace(model, changed=False)

    def model(self, name: str) -> Model:
        """Return a model, whose client has made a request now. Raises Wrong."""
        found = self._models.get(name)
        if found is None:
            raise Wrong(
                f"there is no model {name!r}: it was unloaded, or the server was started anew or has lost a worker; "
                "make a new client from saved weights"
            )
        self._sessions[found.session].seen_s = time.monotonic()
        return found

    def lose_models(self, why: str) -> None:
        """Forget all models, because the actor has lost their states. `why`: what waiting clients are told."""
        self.futures.fail_all(why)
        self.sampling.clear()
        self._models.clear()
        self.resident = None

    # ── training ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def enter(self, work: Training, number: int) -> None:
        """Enter a training request. `number`: of the request within its model; requests begin in this order."""
        self._check_room()
        model = self._models[work.model]
        model.waiting[number] = (work, time.monotonic())
        self.changed.notify_all()

    def _check_room(self) -> None:
        training = sum(len(model.waiting) for model in self._models.values())
        if training + len(self.sampling) >= self._most_requests:
            raise TooMany(f"{self._most_requests} requests wait, and no more may")

    def has_training(self) -> bool:
        """Whether a training request can begin."""
        return any(self._due(model) is not None for model in self._models.values())

    def take_training(self) -> Training | None:
        """Return the next training request, first one of the model in the actor; None: none can begin."""
        models = sorted(self._models.values(), key=lambda m: m is not self.resident)
        for model in models:
            number = self._due(model)
            if number is not None:
                model.next_number = number + 1
                work, _ = model.waiting.pop(number)
                return work
        return None

    @staticmethod
    def _due(model: Model) -> int | None:
        """Return the number of the request of a model that may begin; None: none may.

        Parts of one request may arrive in any order. A number that never arrives is skipped after some time.
        """
        if not model.waiting:
            return None
        first = min(model.waiting)
        _, since_s = model.waiting[first]
        if first <= model.next_number or time.monotonic() - since_s > _GAP_S:
            return first
        return None

    def new_weights(self) -> int:
        """Return the number of weights that were not there before."""
        return next(self._numbers)

    @property
    def actor_weights(self) -> int:
        """The number of the weights in the actor."""
        if self.resident is None:
            return 0
        return self.resident.weights

    # ── saved weights ────────────────────────────────────────────────────────────────────────────────────────────────

    def _place(self, model: str) -> Path:
        return self.folder / model.replace(":", "-")

    def parking(self, model: Model) -> str:
        return str(self._place(model.name) / "parked")

    def new_place(
        self, model: str, kind: Kind, name: str, *, overwrite: bool
    ) -> tuple[str, str]:
        """Return (path as clients write it, folder) of weights to be saved. Raises Wrong."""
        if not _NAME.fullmatch(name):
            raise Wrong(
                f"weights have a name of at most 128 letters, digits, '_', '-' and '.', this is {name!r}"
            )
        folder = self._place(model) / kind / name
        if folder.exists() and not overwrite:
            raise Wrong(
                f"there are weights {name!r} of this model; overwrite=True replaces them"
            )
        return f"tinker://{model}/{kind}/{name}", str(folder)

    def find(self, path: str, kind: Kind) -> str:
        """Return the folder of saved weights. Raises Wrong. `path`: as clients write it."""
        match = _PATH.fullmatch(path)
        if match is None or not _NAME.fullmatch(match[3]):
            raise Wrong(
                f"{path!r} is no path of weights, such as tinker://<model>/{kind}/<name>"
            )
        if match[2] != kind:
            wanted = {
                "weights": "to train on: save_state saves them",
                "sampler_weights": "to sample by: save_weights_for_sampler saves them",
            }
            raise Wrong(f"{path} has no weights {wanted[kind]}")
        folder = self._place(match[1]) / kind / match[3]
        if not self.facts(folder):
            raise Wrong(f"there are no weights {path} in {self.folder}")
        return str(folder)

    def facts(self, folder: Path) -> Mapping[str, Any]:
        """Return what is known of saved weights; empty if they are not whole."""
        try:
            return parsed_object((folder / "served.json").read_bytes())
        except (OSError, ValueError):
            return {}

    def complete(self, folder: str) -> None:
        """Note that weights are whole, and of which model."""
        served = self.served
        facts = {"base_model": served.name, "lora_rank": served.lora_rank}
        text = json.dumps(facts)
        (Path(folder) / "served.json").write_text(text, encoding="utf-8")

    # ── sampling ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def add_sampler(self, snapshot: Snapshot, name: str = "") -> str:
        """Return the name of a new sampler. `name`: its name; "": a new one."""
        found = name or f"{uuid.uuid4().hex}:sample"
        self._samplers[found] = snapshot
        return found

    def sampler(self, name: str) -> Snapshot:
        """Return the weights of a sampler. Raises Wrong."""
        found = self._samplers.get(name)
        if found is None:
            raise Wrong(
                f"there is no sampler {name!r}: the server may have been started anew; make a new sampling client"
            )
        return found

    def snapshot(self, path: str | None) -> Snapshot:
        """Return the weights at a path; None: those of the base model. Raises Wrong."""
        if path is None:
            return Snapshot(weights=0, folder="")
        folder = self.find(path, "sampler_weights")
        return Snapshot(weights=self.named.get(path), folder=folder, path=path)

    def unnamed_place(self, model: Model) -> str:
        """Return the folder of a sampler without a name."""
        number = self.new_weights()
        return str(self._place(model.name) / "unnamed" / f"{number}")

    def keep_unnamed(self, model: Model, folder: str) -> None:
        """Note a sampler without a name, and remove the oldest ones beyond those that are kept."""
        model.unnamed.append(folder)
        while len(model.unnamed) > self._kept:
            shutil.rmtree(model.unnamed.popleft(), ignore_errors=True)

    def enter_sampling(self, work: Sampled) -> None:
        self._check_room()
        self.sampling.append(work)
        self.changed.notify_all()

    def folder_of(self, snapshot: Snapshot) -> str:
        """Return the folder from which an engine loads weights. Raises Wrong."""
        if not snapshot.folder:
            return str(self.served.folder)
        folder = Path(snapshot.folder) / MODEL
        if not folder.is_dir():
            raise Wrong(
                "the weights of this sampler are gone: of samplers without a name, the server keeps "
                f"{self._kept} of each model (serve.kept_samplers); save_weights_for_sampler(name) keeps them"
            )
        return str(folder)


class TooMany(Wrong):
    """Raised for a request that finds no room."""

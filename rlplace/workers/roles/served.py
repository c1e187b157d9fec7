"""The workers of a training API: env answers HTTP requests, the actor learns and rollout samples what clients ask.

::

    clients ◀── HTTP, at any time ──▶ env: requests wait in the book
    rollout     env ── requests ──▶ rollout ── completions ──▶ env        until a training request waits
    learn       env ── commands ──▶ actor rank 0 ──▶ all ranks ── results ──▶ env       until only samples are asked

Each stage ends after `serve.turn_s` seconds at the latest, so that the run can save or end, and the other kind of
requests begins.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rlplace.codes import config_error
from rlplace.config.blocks.language_model import LanguageModelJobConfig
from rlplace.config.model_folder import text_keys
from rlplace.errors import ChannelEmpty, ConfigError, RlplaceError
from rlplace.http_server import Limits
from rlplace.metrics import Metric, Metrics
from rlplace.models.tokenizer import Tokenizer
from rlplace.placement.schedule import Residency
from rlplace.tokens import Completion, Request, Sample
from rlplace.workers.arguments import (
    COMMANDS,
    COMPLETIONS,
    REQUESTS,
    RESULTS,
    EndOfIteration,
    TextArguments,
)
from rlplace.workers.engines.contract import EngineSettings
from rlplace.workers.roles.actor import Actor
from rlplace.workers.roles.env import EnvWorker
from rlplace.workers.roles.rollout import Counts, TextRolloutWorker
from rlplace.workers.serving.book import (
    MODEL,
    Book,
    Model,
    Sampled,
    ServedModel,
    Snapshot,
    Training,
    Wrong,
)
from rlplace.workers.serving.messages import (
    Command,
    Datum,
    EndOfTurn,
    Exchange,
    LoadState,
    NotSampled,
    OptimizerStep,
    Pass,
    PromptScores,
    Result,
    SaveModel,
    SaveState,
    ServedRequest,
)

if TYPE_CHECKING:  # the driver imports this module too; torch is imported only in setup
    from torch import Tensor

    from rlplace.workers.training.samples import BySample, SampleShard, Target
    from rlplace.workers.training.trained_model import TrainedLm

# Between two looks at what has arrived
_PAUSE_S = 0.005
# Samples wait so long for a step that follows a pass, and for a request that follows another one
_STEP_FOLLOWS_S = 1.0
_REQUEST_FOLLOWS_S = 0.02


def served_model(config: LanguageModelJobConfig, folder: Path) -> ServedModel:
    """Return what clients are told of the model in `folder`, with the names by which they may ask for it."""
    given = config.serve.model_name
    names = dict.fromkeys((given or folder.name, folder.name, str(folder)))
    vocabulary = text_keys(config.model or {}).get("vocab_size")
    assert isinstance(vocabulary, int), "checked before a run"
    return ServedModel(
        names=tuple(names),
        folder=folder,
        longest=config.algorithm.longest,
        vocabulary=vocabulary,
        lora_rank=config.actor.lora_rank,
    )


def weights_folder(config: LanguageModelJobConfig) -> Path:
    """Return the folder in which weights are saved for clients."""
    given = config.serve.folder
    if given is not None:
        return Path(given).absolute()
    return Path(config.runner.output_dir).absolute() / "served"


# ── the server ───────────────────────────────────────────────────────────────────────────────────────────────────────


class ApiWorker(EnvWorker):
    """Answers the HTTP requests of clients, in threads, and passes them on to actor and rollout in their stages."""

    uses_accelerators: ClassVar[bool] = False
    holds: ClassVar[str] = "requests of clients"
    most_ranks: ClassVar[int | None] = 1

    config: TextArguments

    def setup(self) -> None:
        # Imported here: the driver imports this module too
        from rlplace.workers.serving.server import ApiServer

        config = self.config.config
        serve = config.serve
        folder = weights_folder(config)
        self._book = Book(
            served_model(config, self.config.model),
            folder,
            models=serve.models,
            requests=serve.requests,
            silent_s=serve.session_timeout_s,
            kept=serve.kept_samplers,
        )
        self._first = folder / "first" / _digest(self.config)
        tokenizer = Tokenizer.load(self.config.model)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            server = ApiServer(
                (serve.host, serve.port),
                self._book,
                key=os.environ[serve.api_key_env],
                stops=lambda texts: _own_stops(tokenizer, texts),
                limits=Limits(body_bytes=serve.body, connections=512),
            )
        except OSError as error:
            raise config_error(
                "not-served",
                "serve.port",
                f"{serve.host}:{serve.port}",
                reason=error,
                folder=folder,
            ) from error
        self._opened.callback(server.server_close)
        self._opened.callback(server.shutdown)
        threading.Thread(
            target=server.serve_forever, name="training API", daemon=True
        ).start()
        # Requests for samples under way, by group
        self._under_way: dict[int, Sampled] = {}
        self._groups = 0
        # Whether the actor has gradients that no step has used
        self._has_gradients = False
        # Iterations whose training is done
        self._trained = -1

    def begin_again(self, iteration: int) -> Metrics:
        """Ask the samples that were under way once more; if the actor went back, forget the models of clients."""
        with self._book.changed:
            if iteration <= self._trained:
                self._book.lose_models(
                    "the server has lost a worker and went back to its checkpoint: the models of clients are gone; "
                    "make a new client from saved weights"
                )
            for work in self._under_way.values():
                work.answers.clear()
                work.prompt_logprobs = None
                self._book.sampling.appendleft(work)
            self._under_way.clear()
        return super().begin_again(iteration)

    # ── samples ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def sample(self, iteration: int) -> Metrics:
        """Pass on requests for samples, and return metrics.

        Returns once a training request waits or the turn is over, and all samples that have begun are there.
        """
        self._require(Residency.FULL, "sample")
        book = self._book
        until_s = time.monotonic() + self.config.config.serve.turn_s
        with book.changed:
            # These have waited for the training before, and begin now
            due = len(book.sampling)
        asked = 0
        answers = 0
        while True:
            self.context.check_cancelled("sample")
            answers += self._take_answers()
            over = time.monotonic() > until_s
            with book.changed:
                ends = over or book.has_training()
                while book.sampling and (due > 0 or not ends) and self._room():
                    self._ask(book.sampling.popleft(), iteration)
                    due -= 1
                    asked += 1
                if not self._under_way:
                    if ends and (due <= 0 or not book.sampling):
                        break
                    book.changed.wait(_PAUSE_S)
            if self._under_way:
                time.sleep(_PAUSE_S)
        for _ in range(self.config.ranks["rollout"]):
            self.context.channels[REQUESTS].put(EndOfIteration(iteration=iteration))
        return {
            "env/sample_requests": Metric(asked, "sum"),
            "env/answers": Metric(answers, "sum"),
        }

    def _room(self) -> bool:
        """Whether a further request finds room in the channel to the engines."""
        return len(self._under_way) < self.config.prompts

    def _ask(self, work: Sampled, iteration: int) -> None:
        """Send a request to the engines."""
        book = self._book
        try:
            folder = book.folder_of(work.snapshot)
        except Wrong as error:
            book.futures.fail(work.future, str(error))
            return
        self._groups += 1
        request = Request(
            env_rank=self.context.rank,
            iteration=iteration,
            group=self._groups,
            first_sample=0,
            samples=work.samples,
            turn=0,
            tokens=work.tokens,
            max_new_tokens=work.max_new_tokens,
            greedy=work.sampling.temperature == 0,
            sampling=work.sampling,
        )
        self._under_way[self._groups] = work
        asked = ServedRequest(
            request=request,
            folder=folder,
            synced=work.snapshot.weights == book.synced,
            scores=work.scores,
        )
        self.context.channels[REQUESTS].put(asked, weight=request.weight)

    def _take_answers(self) -> int:
        """Take all answers that have arrived, set the results of whole requests, and return the number of answers."""
        channel = self.context.channels[COMPLETIONS]
        taken = 0
        while self._under_way:
            try:
                item = channel.get_nowait(key=str(self.context.rank))
            except ChannelEmpty:
                break
            work = self._under_way.get(item.group)
            if work is None:
                continue
            with self._book.changed:
                self._add(work, item)
            if work.future.done:
                del self._under_way[item.group]
            taken += isinstance(item, Completion)
        return taken

    def _add(self, work: Sampled, item: Completion | PromptScores | NotSampled) -> None:
        """Add what an engine has sent to the request; set its result if it is whole."""
        from rlplace.workers.serving.wire import write_samples

        match item:
            case NotSampled():
                self._book.futures.fail(work.future, item.why)
            case PromptScores():
                work.prompt_logprobs = item.logprobs
            case Completion() if not np.isfinite(item.logprobs).all():
                why = (
                    "the weights of this sampler give probabilities that are not finite"
                )
                self._book.futures.fail(work.future, why)
            case Completion():
                work.answers[item.sample] = item
        if work.whole:
            answers = [work.answers[number] for number in sorted(work.answers)]
            content = write_samples(answers, work.prompt_logprobs)
            self._book.futures.finish(work.future, content)

    # ── training ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def train(self, iteration: int) -> Metrics:
        """Pass on training requests, one after the other, and return metrics.

        Returns once no training request waits and samples are asked, or the turn is over.
        """
        self._require(Residency.FULL, "train")
        book = self._book
        until_s = time.monotonic() + self.config.config.serve.turn_s
        done = 0
        failed = 0
        last_s = -math.inf
        while True:
            self.context.check_cancelled("train")
            now = time.monotonic()
            with book.changed:
                work = None
                if now < until_s:
                    work = book.take_training()
                if work is None:
                    follows_s = _REQUEST_FOLLOWS_S
                    if self._has_gradients:
                        follows_s = _STEP_FOLLOWS_S
                    asked = bool(book.sampling) and now - last_s > follows_s
                    if not done or asked or now > until_s:
                        break
                    book.changed.wait(_PAUSE_S)
                    continue
            failed += not self._carry_out(work)
            done += 1
            last_s = time.monotonic()
        self.context.channels[COMMANDS].put(EndOfTurn())
        with book.changed:
            book.synced = book.actor_weights
        self._trained = iteration
        return {
            "env/training_requests": Metric(done, "sum"),
            "env/training_requests_failed": Metric(failed, "sum"),
        }

    def _carry_out(self, work: Training) -> bool:
        """Carry out a training request, and set its result. Return whether it succeeded."""
        book = self._book
        with book.changed:
            if work.refused:
                book.futures.fail(work.future, work.refused)
                return False
            try:
                model = book.model(work.model)
            except Wrong as error:
                book.futures.fail(work.future, str(error))
                return False
        command = work.command
        assert command is not None, "only a refused request has none"
        failure = self._make_resident(model)
        if not failure and isinstance(command, OptimizerStep | LoadState):
            failure = self._keep_first()
        if not failure and isinstance(command, SaveState | SaveModel):
            failure = _made_empty(Path(command.folder))
        result = Result(failure=failure)
        if not failure:
            result = self._told(command)
        with book.changed:
            if result.failure:
                book.futures.fail(work.future, result.failure)
                return False
            self._note(work, model, command, result)
        return True

    def _note(
        self, work: Training, model: Model, command: Command, result: Result
    ) -> None:
        """Note what a command has changed, and set the result of its request."""
        from rlplace.workers.serving.wire import write_pass

        book = self._book
        content: dict[str, Any] = dict(work.result)
        match command:
            case Pass():
                self._has_gradients |= command.backward
                told = write_pass(result.logprobs, result.metrics)
                book.futures.finish(work.future, told)
                return
            case OptimizerStep():
                content["metrics"] = dict(result.metrics)
            case SaveState() | SaveModel():
                book.complete(command.folder)
        if isinstance(command, OptimizerStep | LoadState):
            self._has_gradients = False
            model.weights = book.new_weights()
            model.changed = True
        if work.sampler is not None:
            name, folder, path = work.sampler
            snapshot = Snapshot(weights=model.weights, folder=folder, path=path)
            if name:
                book.add_sampler(snapshot, name)
                book.keep_unnamed(model, folder)
            else:
                book.named[path] = model.weights
        book.futures.finish(work.future, content)

    def _told(self, command: Command) -> Result:
        """Send a command to the actor, wait for its result, and return it."""
        self.context.channels[COMMANDS].put(command)
        while True:
            self.context.check_cancelled("train")
            try:
                result: Result = self.context.channels[RESULTS].get_nowait()
                return result
            except ChannelEmpty:
                time.sleep(_PAUSE_S / 5)

    def _make_resident(self, model: Model) -> str:
        """Bring the state of a model into the actor; return why that failed, or "".

        The state of the model that was there is parked in a folder, unless it has not changed since it was there.
        """
        book = self._book
        before = book.resident
        if before is model:
            return ""
        if before is not None and before.changed:
            place = book.parking(before)
            failure = (
                _made_empty(Path(place)) or self._told(SaveState(folder=place)).failure
            )
            if failure:
                return failure
            before.parked = place
            before.changed = False
        with book.changed:
            exchange = Exchange(
                before="" if before is None else before.name,
                after=model.name,
                dropped=tuple(book.dropped),
            )
            book.dropped.clear()
        self._told(exchange)
        self._has_gradients = False
        if model.parked is not None or book.actor_weights != model.weights:
            folder = model.parked or str(self._first)
            failure = self._told(LoadState(folder=folder, optimizer=True)).failure
            if failure:
                return failure
        book.resident = model
        return ""

    def _keep_first(self) -> str:
        """Save the first weights before anything changes them, for later models; return why that failed, or ""."""
        book = self._book
        if book.facts(self._first):
            return ""
        if book.actor_weights:
            return f"the first weights in {self._first} are gone; start the server anew without resume"
        failure = _made_empty(self._first)
        if failure:
            return failure
        result = self._told(SaveState(folder=str(self._first)))
        if result.steps_made:
            return f"the first weights in {self._first} are gone; start the server anew without resume"
        if not result.failure:
            book.complete(str(self._first))
        return result.failure


def _made_empty(folder: Path) -> str:
    """Make an empty folder in place of what is there; return why that failed, or ""."""
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        return f"cannot write {folder}: {error}"
    return ""


def _own_stops(
    tokenizer: Tokenizer, texts: Sequence[str]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the token ids and the texts by which `texts` end an answer. Special tokens become their ids."""
    ids, others = tokenizer.stops(texts)
    own = set(tokenizer.stop_token_ids)
    return tuple(each for each in ids if each not in own), others


def _digest(arguments: TextArguments) -> str:
    """Return a text that is equal for servers whose models begin with the same trained weights."""
    actor = arguments.config.actor
    facts: dict[str, object] = {
        "lora": (actor.lora_rank, actor.lora_alpha, actor.lora_targets),
        "dtype": (actor.weights, actor.optimizer.kind, actor.ema_decay),
        "seed": arguments.config.runner.seed,
    }
    for file in sorted(arguments.model.glob("*.safetensors")):
        status = file.stat()
        facts[str(file.absolute())] = (status.st_size, status.st_mtime_ns)
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ── learning ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class ServedActor(Actor):
    """One rank of an actor that learns at the command of clients. Rank 0 receives the commands."""

    imports: ClassVar[tuple[str, ...]] = (
        "rlplace.models.causal_lm",
        "peft",
        "rlplace.workers.training.served_learner",
        "rlplace.workers.training.state",
        "rlplace.workers.weights",
    )

    config: TextArguments
    _model: TrainedLm

    def setup(self) -> None:
        from rlplace.models.vision import policy_of
        from rlplace.workers.training.served_learner import ServedLearner
        from rlplace.workers.training.trained_model import TrainedLm

        config, actor = self.config.config, self.config.config.actor
        ranks = self._join()
        folder = self.config.model
        lm = TrainedLm(self._spec(actor, folder), ranks, policy_of(config, folder))
        trainer = self._train(lm, actor.optimizer, ema_decay=actor.ema_decay)
        self._learner = ServedLearner(
            config, lm, trainer, ranks, None, actor.token_budget
        )
        # Gradients that no step has used, by model; of the present model at ""
        self._gradients: dict[str, list[Tensor]] = {}
        self._enter_plan()
        self.move(Residency.OFF)

    def learn(self, iteration: int) -> Metrics:
        """Carry out commands until the turn ends, and return metrics."""
        counts = _TurnCounts()
        with self._computing("learn", Residency.FULL):
            self._restore("")
            while True:
                command, shard = self._next()
                if isinstance(command, EndOfTurn):
                    break
                result = self._carry_out(command, shard)
                counts.add(command, shard, result)
                if self.context.rank == 0:
                    self.context.channels[RESULTS].put(result)
            # The end of the block drops them
            self._put_aside("")
        return counts.metrics()

    def _next(self) -> tuple[Command, SampleShard | None]:
        """Return the next command, and this rank's part of the data of a pass. A collective."""
        parts: list[tuple[Command, SampleShard | None]] | None = None
        if self.context.rank == 0:
            command: Command = self.context.channels[COMMANDS].get()
            if isinstance(command, Pass):
                bare = dataclasses.replace(command, data=())
                parts = [(bare, shard) for shard in self._shards(command.data)]
            else:
                parts = [(command, None)] * self._ranks.world_size
        return self._ranks.scatter(parts, "a command")

    def _shards(self, data: Sequence[Datum]) -> list[SampleShard]:
        """Return for each rank what it needs of the data of a pass."""
        groups = []
        for number, datum in enumerate(data):
            size = len(datum.tokens)
            mask = np.ones(size, np.bool_)
            # Nothing comes before the first token
            mask[0] = False
            sample = Sample(
                group=number,
                sample=0,
                tokens=datum.tokens,
                mask=mask,
                logprobs=np.zeros(size, np.float32),
                versions=np.full(size, -1, np.int32),
                reward=0.0,
                rewards={},
                turns=1,
                truncated=False,
            )
            groups.append([sample])
        targets: dict[Target, BySample] = {}
        for name in data[0].inputs:
            targets[name] = [datum.inputs[name] for datum in data]
        return self._learner.shards(groups, infer=True, targets=targets)

    def _carry_out(self, command: Command, shard: SampleShard | None) -> Result:
        """Carry out a command, and return its result. An error of saving or loading is the result. A collective."""
        try:
            match command:
                case Pass():
                    assert shard is not None, "a pass has data"
                    return self._pass(command, shard)
                case OptimizerStep():
                    return self._step(command)
                case SaveState():
                    return self._save_state(command)
                case LoadState():
                    self._load_state(command)
                case SaveModel():
                    folder = Path(command.folder) / MODEL
                    self._model.save(folder, self.context.rank)
                case Exchange():
                    self._exchange(command)
        except (ConfigError, RlplaceError) as error:
            return Result(failure=str(error))
        return Result(steps_made=self._trainer.steps_made)

    def _pass(self, command: Pass, shard: SampleShard) -> Result:
        found = self._learner.accumulate(shard, command.loss, backward=command.backward)
        return Result(logprobs=found.logprobs, metrics={"loss:sum": found.loss})

    def _step(self, command: OptimizerStep) -> Result:
        if not self._model.has_gradients:
            return Result(
                failure="there are no gradients: optim_step follows a forward_backward"
            )
        config = command.over(self.config.config.actor.optimizer)
        norm = self._learner.step(config)
        if norm is None:
            return Result(
                failure="the gradient is not finite: no step was made, and the gradients were dropped"
            )
        return Result(steps_made=self._trainer.steps_made, metrics={"grad_norm": norm})

    def _save_state(self, command: SaveState) -> Result:
        import torch

        from rlplace.checkpoints import failed

        folder = Path(command.folder)
        self.write_state(command.folder)
        self._state_files().wait()
        # All ranks have written
        self._ranks.sum(torch.zeros(1, device=self._model.device))
        wrong = failed(folder)
        if wrong is not None:
            return Result(failure=f"{folder}: {wrong[1]}")
        return Result(steps_made=self._trainer.steps_made)

    def _load_state(self, command: LoadState) -> None:
        """Load a state; without `optimizer`, the moments start anew. Gradients are dropped."""
        self._model.drop_gathered()
        self.read_state(command.folder)
        if command.optimizer:
            return
        moments = self._trainer.optimizer.moments
        values = moments.read(self._where)
        for tensors in values.values():
            for tensor in tensors:
                tensor.zero_()
        moments.take_over(values, 0, self._where)
        self._trainer.steps_made = 0

    def _exchange(self, command: Exchange) -> None:
        """Put the gradients of one model aside, and continue with those of another one."""
        self._put_aside(command.before)
        self._model.drop_gathered()
        for name in command.dropped:
            self._gradients.pop(name, None)
        self._restore(command.after)

    def _put_aside(self, name: str) -> None:
        """Copy the gradients to the host, under `name`, if there are any."""
        if self._model.has_gradients:
            self._gradients[name] = self._model.copy_gradients()

    def _restore(self, name: str) -> None:
        """Continue with the gradients that were put aside under `name`, if there are any."""
        kept = self._gradients.pop(name, None)
        if kept is not None:
            self._model.restore_gradients(kept)


@dataclasses.dataclass(slots=True)
class _TurnCounts:
    """What a rank has done in a turn."""

    passes: int = 0
    steps: int = 0
    tokens: int = 0
    loss: float = 0.0
    norm: float = 0.0

    def add(self, command: Command, shard: SampleShard | None, result: Result) -> None:
        if isinstance(command, Pass) and shard is not None:
            self.passes += 1
            self.tokens += sum(shard.lengths.tokens)
            self.loss = result.metrics["loss:sum"]
        if isinstance(command, OptimizerStep) and not result.failure:
            self.steps += 1
            self.norm = result.metrics["grad_norm"]

    def metrics(self) -> Metrics:
        found: dict[str, Metric] = {
            "actor/passes": Metric(self.passes),
            "actor/optimizer_steps": Metric(self.steps),
            "actor/tokens": Metric(self.tokens),
        }
        if self.passes and math.isfinite(self.loss):
            found["actor/loss_sum"] = Metric(self.loss)
        if self.steps:
            found["actor/grad_norm"] = Metric(self.norm)
        return found


# ── sampling ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class ServedRollout(TextRolloutWorker):
    """Generates answers for clients, by the weights of the last sync or by saved ones.

    Before other weights are loaded, all answers in flight are finished.
    """

    # Folder of the loaded weights; "": those of the last sync
    _folder = ""
    # A request that waits until its weights are loaded
    _held: ServedRequest | None = None

    def _settings(self) -> EngineSettings:
        return dataclasses.replace(super()._settings(), takes_texts=True)

    def begin_again(self, iteration: int) -> Metrics:
        self._held = None
        return super().begin_again(iteration)

    def generate(self, iteration: int) -> Metrics:
        """Answer requests until the message EndOfIteration arrives, and return metrics."""
        self._synced = self.engine.version
        self._folder = ""
        return super().generate(iteration)

    def _take(self, iteration: int, counts: Counts) -> bool:
        """Take requests as long as the engine has room. Return False after the message EndOfIteration, else True."""
        self.context.check_cancelled("generate")
        requests = self.context.channels[REQUESTS]
        while self.engine.room and self.engine.in_flight < self._share:
            item = self._held
            self._held = None
            if item is None:
                try:
                    item = (
                        requests.get_nowait()
                        if self.engine.in_flight
                        else requests.get()
                    )
                except ChannelEmpty:
                    break
            if isinstance(item, EndOfIteration):
                return False
            if not self._has(item) and self.engine.in_flight:
                self._held = item
                break
            self._submit(item)
            counts.prompt_tokens += item.request.samples * len(item.request.tokens)
        return True

    def _submit(self, item: ServedRequest) -> None:
        """Load the weights of a request if needed, and begin its answers. An error is told instead."""
        request = item.request
        told = self.context.channels[COMPLETIONS]
        key = str(request.env_rank)
        try:
            if not self._has(item):
                self._load(item.folder)
            if item.scores:
                tokens = request.tokens.tolist()
                scores = self.engine.logprobs(tokens) if len(tokens) > 1 else ()
                told.put(PromptScores(group=request.group, logprobs=scores), key=key)
            self.engine.submit(request)
        except ConfigError as error:
            told.put(NotSampled(group=request.group, why=str(error)), key=key)

    def _note_not_finite(self, completion: Completion) -> None:
        """Do nothing: env tells the client, whose weights these are."""

    def _has(self, item: ServedRequest) -> bool:
        """Whether the engine has the weights of a request."""
        if item.synced and not self._folder:
            return True
        return item.folder == self._folder

    def _load(self, folder: str) -> None:
        """Load saved weights in place of the present ones. Raises ConfigError."""
        from rlplace.workers.engines.weights import weights_of_folder

        assert self._synced is not None, "a sync comes first"
        path = Path(folder)
        try:
            weights: Mapping[str, Any] = weights_of_folder(
                self.engine, path, "model_path"
            )
        except OSError as error:
            raise config_error(
                "not-served", "model_path", folder, error="weights", reason=error
            ) from error
        self.engine.load(weights, self._synced)
        self._folder = folder

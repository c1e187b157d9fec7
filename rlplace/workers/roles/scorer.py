"""Scorers: workers that read whole groups of samples as they arrive, score each sample and do not learn.

This module has the base of all scorers, and those that are models: reference, teacher and reward models. The module
`reward` has the scorers without a model.

::

    samples.<component> ── all groups that have arrived ──▶ score ──▶ scores.<component>, as soon as they are computed

A scorer whose accelerators no other component needs during rollout scores while rollout still generates: it waits for
the next group like any reader of a channel, and ends after the last group of the iteration. A model scores in passes:

    whole      every rank reads groups by itself; no rank waits for another
    sharded    rank 0 reads the arrived groups, packs and scatters them ──▶ equally many passes on each rank;
               also for a model that is split over ranks with the same samples, which run the same passes
"""

from __future__ import annotations

import abc
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.config.blocks.language_model import FrozenConfig, RewardConfig
from rlplace.envs.text import Message, Transcript
from rlplace.errors import ChannelEmpty
from rlplace.metrics import Metric, Metrics
from rlplace.models.folders import TRIED_CHAT, folder_of, reads_tokens
from rlplace.models.tokenizer import Tokenizer
from rlplace.placement.flow import block_edges
from rlplace.placement.language.spec import role_of
from rlplace.placement.schedule import Residency
from rlplace.stopwatch import Stopwatch
from rlplace.tokens import Files, Sample, Scores, Tokens
from rlplace.workers.arguments import (
    REFERENCE_WEIGHTS,
    TextArguments,
    samples_for,
    scores_of,
)
from rlplace.workers.training.worker import JoinedWorker
from rlplace.workers.worker import (
    RoleWorker,
    WorkerContext,
    out_of_step,
    score_not_finite,
)

if TYPE_CHECKING:  # the driver imports this module too; torch is imported only in setup
    from torch import Tensor

    from rlplace.comm.weights.host_sync import CopyReceiver
    from rlplace.models.causal_lm import FrozenLm

Samples = tuple[Sample, ...]
Values = NDArray[np.float32]


class Scoring:
    """The work of one scorer rank in one iteration: receives samples, sends their scores to the actor, and counts both.

    `due`: number of groups that this rank still has to receive.
    """

    def __init__(
        self, context: WorkerContext, *, groups: int, due: int, skip: bool = False
    ) -> None:
        """Start with nothing received.

        `context`: context of the scorer's rank. `groups`: number of groups of the iteration. `due`: number of groups
        that this rank has to receive. `skip`: whether to send non-finite scores instead of raising an error; the actor
        then leaves these samples out.
        """
        self._skip = skip
        self._context = context
        self._component = context.slot.component
        self._groups = groups
        self._seen: set[int] = set()
        self.due = due
        # Samples and tokens scored so far
        self._samples = self._tokens = 0
        self.watch = Stopwatch("infer", "wait")

    def take(self, *, wait: bool = True) -> Samples:
        """Return the samples of all groups that have arrived, in the order of arrival.

        Return an empty tuple if this rank has received all its groups.

        `wait`: block until at least one group has arrived. Raises ChannelTimeout, ChannelBroken, and ChannelMisuse for
        a group that arrives twice or whose number is outside the iteration.
        """
        self._context.check_cancelled("infer")
        channel = self._context.channels[samples_for(self._component)]
        taken = list[Sample]()
        while self.due:
            try:
                group = channel.get() if wait and not taken else channel.get_nowait()
            except ChannelEmpty:
                break
            number = group[0].group
            if number in self._seen or not 0 <= number < self._groups:
                got = f"group {number}"
                expected = f"each of the groups 0-{self._groups - 1} once"
                owner = self._context.owner
                raise out_of_step(
                    owner,
                    "samples",
                    got=got,
                    expected=expected,
                )
            self._seen.add(number)
            self.due -= 1
            taken += group
        self.watch.lap("wait")
        return tuple(taken)

    def put(
        self,
        samples: Sequence[Sample | ModelInput],
        values: Iterable[Values],
        *,
        size: int | None = None,
    ) -> None:
        """Send the scores of `samples` to the actor.

        `values`: scores of each sample. `size`: number of tokens that the model computed, for the measured speed; it is
        less than the sum of the samples' tokens if samples share a prefix; None: this sum. Raises RewardError for a
        non-finite score, unless non-finite scores are skipped.
        """
        tokens = sum(len(sample.tokens) for sample in samples)
        self.watch.lap("infer", tokens if size is None else size)
        self._context.check_cancelled("infer")
        scores = [
            Scores(
                group=sample.group,
                sample=sample.sample,
                values=np.asarray(value, np.float32),
            )
            for sample, value in zip(samples, values, strict=True)
        ]
        for score in scores:
            if not np.isfinite(score.values).all():
                error = score_not_finite(self._component, score)
                if not self._skip:
                    raise error
                self._context.log.warning("skipped: %s", error.problem.what)
        self._samples += len(scores)
        self._tokens += tokens
        if scores:
            self._context.channels[scores_of(self._component)].put(
                tuple(scores), weight=len(scores)
            )
            self.watch.lap("wait")

    def metrics(self) -> Metrics:
        busy_s = self.watch.seconds["infer"]
        return {
            f"{self._component}/samples": Metric(self._samples, "sum"),
            f"{self._component}/tokens_per_s": Metric(
                self._tokens / busy_s if busy_s else 0.0, "sum"
            ),
            **self.watch.metrics(self._component),
        }


class ModelInput(NamedTuple):
    """One sample as the input of a scoring model.

    `group`, `sample`: numbers of the group and of the sample in it. `tokens`: L tokens in the model's own vocabulary.
    `mask`: true at the tokens to score, [L]. `images`: image files of the prompt. `parts`: lengths of conversations
    that are read alone; empty: there is one.
    """

    group: int
    sample: int
    tokens: Tokens  # [L'], in the model's own vocabulary
    mask: NDArray[np.bool_]  # [L'], true at the tokens to score
    images: Files = ()
    parts: tuple[int, ...] = ()
    # A scorer's routers choose by themselves
    routes: None = None


class Scorer(RoleWorker, abc.ABC):
    """Base class of all scorers, which give scores to samples and are not trained.

    Each rank receives an even share of an iteration's groups, unless rank 0 receives the groups for all ranks.
    """

    config: TextArguments
    _sharded = False  # True if rank 0 reads for all ranks

    @property
    def component(self) -> str:
        return self.context.slot.component

    def infer(self, iteration: int, version: int) -> Metrics:
        """Score this rank's groups of `iteration`, and return metrics once the last scores have been sent."""
        context = self.context
        groups = self.config.prompts
        self._require(Residency.FULL, "infer")
        first, stop = block_edges(groups, context.world_size)[context.rank :][:2]
        due = groups if self._sharded else stop - first
        config = self.config.config
        skip = (
            config.leaves_out
            if role_of(self.component) == "reward"
            else config.skips_poison
        )
        scoring = Scoring(context, groups=groups, due=due, skip=skip)
        self._score(scoring)
        return scoring.metrics()

    @abc.abstractmethod
    def _score(self, scoring: Scoring) -> None:
        """Receive groups, score their samples and send the scores, until this rank has received all its groups.

        `scoring`: receives and counts the samples of the iteration, and sends their scores.
        """


class ModelScorer(Scorer, JoinedWorker):
    """Base class of scorers that are models.

    The weights move between accelerator and host with the residency, unless the config keeps them on the host.
    """

    imports: ClassVar[tuple[str, ...]] = (
        "rlplace.models.causal_lm",
        "rlplace.workers.training.ranks",
        "rlplace.workers.offload",
        "rlplace.algo.packing",
    )

    _lm: FrozenLm[Any]

    def __init__(self, config: TextArguments, context: WorkerContext) -> None:
        super().__init__(config, context)
        block = config.config.block_of(self.component)
        assert isinstance(block, FrozenConfig), (
            "scorers that are models are not trained"
        )
        self._block, self._own_folder = block, folder_of(block.model)
        joint = block.sharded or config.parallel_of(self.component).ranks > 1
        # A single rank has the whole model.
        self._sharded = joint and context.world_size > 1
        self.folder = self._own_folder or config.model
        self._again = config.read_again.get(self.component)

    @abc.abstractmethod
    def _input(self, sample: Sample) -> ModelInput: ...

    @abc.abstractmethod
    def _values(self, batch: Sequence[ModelInput]) -> Sequence[Values]:
        """Return the scores of each sample of the micro-batch `batch`, from one forward pass."""

    def setup(self) -> None:
        import torch

        from rlplace.models.causal_lm import FrozenLm, PackedLm, reward_lm
        from rlplace.models.sharding import TENSOR
        from rlplace.models.vision import causal_lm_of
        from rlplace.workers.offload import Offloadable

        config = self.config.config
        context = self.context
        block = self._block
        ranks = self._join()
        cut = ranks.tensor_parallel > 1
        mesh = None
        if (block.sharded and self._sharded) or (block.on_host and cut):
            mesh = ranks.mesh
        elif block.on_host:
            mesh = ranks.alone()
        elif cut:
            # Each model replica scores by itself.
            mesh = ranks.mesh[TENSOR]
        key = f"{config.key_of(self.component) if self._own_folder else 'actor'}.model.path"
        device = torch.device(context.device.torch_name)
        kind: type[PackedLm] = (
            reward_lm(block.head)
            if isinstance(block, RewardConfig)
            else causal_lm_of(config, self.folder)
        )
        self._lm = FrozenLm(
            kind,
            self.folder,
            block.computed_in,
            mesh,
            device,
            on_host=block.on_host,
            context=ranks.context,
            key=key,
        )
        for module in self._lm.fsdp_modules:
            ranks.carry(module)
        self._parts = {}
        if not block.on_host:
            weights = Offloadable(
                f"{self.component} weights", context.device, self._lm.weight_tensors
            )
            self._parts = {weights: Residency.WEIGHTS}
        self.move(Residency.OFF)

    def _host_bytes(self) -> int:
        if self._block.on_host:
            return sum(tensor.nbytes for tensor in self._lm.weight_tensors())
        return 0

    def _score(self, scoring: Scoring) -> None:
        """Score micro-batches until this rank has received all its groups, then free the weights that FSDP has
        gathered.

        During the work, the working memory of the forward passes counts in the accelerator's memory account.
        """
        from rlplace.workers.training.samples import sizes_of

        with self._working("infer"):
            try:
                for batch in self._micro_batches(scoring):
                    values = self._values(batch)
                    size = sizes_of(batch, shared_prefix_cost=self._again).size(
                        range(len(batch))
                    )
                    scoring.put(
                        *((batch, values) if self._ranks.is_primary else ((), ())),
                        size=size,
                    )
            finally:
                self._lm.drop_gathered()

    def _micro_batches(self, scoring: Scoring) -> Iterator[Sequence[ModelInput]]:
        """Receive samples, and yield them as micro-batches within the token budget.

        If the model is sharded, each rank yields equally many micro-batches, some of them empty, because a forward pass
        is then a collective. In this case only rank 0 receives samples from the channel, and scatters them to all
        ranks.

        `scoring`: receives and counts the samples.
        """
        from rlplace.algo.packing import pack
        from rlplace.workers.training.samples import sizes_of

        due = scoring.due
        copies = self._ranks.replicas if self._sharded else 1
        together = self._ranks.replica_size
        ranks = copies * together
        while due:
            parts: list[tuple[int, list[list[ModelInput]]]] | None = None
            if ranks == 1 or self.context.rank == 0:
                inputs = [self._input(sample) for sample in scoring.take()]
                packing = pack(
                    sizes_of(inputs, shared_prefix_cost=self._again),
                    copies,
                    self._block.token_budget,
                )
                passes = (
                    (scoring.due, [[inputs[i] for i in picks] for picks in copy])
                    for copy in packing.ranks
                )
                parts = [one for one in passes for _ in range(together)]
            due, batches = (
                self._ranks.scatter(parts, "samples")
                if ranks > 1 or parts is None
                else parts[0]
            )
            scoring.watch.lap("wait")
            yield from batches

    def _forward(self, batch: Sequence[ModelInput], *others: object) -> Any:
        """Return the model's output for the micro-batch `batch`. This is a collective if the model is sharded.

        `others`: further positional arguments of the model, after the tokens.
        """
        import torch

        from rlplace.models.packed import Packed
        from rlplace.workers.training.samples import sizes_of

        alike = sizes_of(batch, shared_prefix_cost=self._again).alike(range(len(batch)))
        tokens, masks, images = (
            [getattr(each, name) for each in batch]
            for name in ("tokens", "mask", "images")
        )
        parts = [each.parts for each in batch]
        packed = Packed.of(tokens, masks, self._lm.device, alike, images, parts)
        with torch.no_grad():
            return self._lm.module(packed, *others)


class TeacherWorker(ModelScorer):
    """Scores each sample with the log-probabilities of its response tokens under a language model that is not trained.

    The log-probabilities are at the sampling temperature.
    """

    follows_plans: ClassVar[bool] = True

    def _input(self, sample: Sample) -> ModelInput:
        return ModelInput(
            sample.group,
            sample.sample,
            sample.tokens,
            sample.mask,
            sample.images,
            sample.parts,
        )

    def _values(self, batch: Sequence[ModelInput]) -> Sequence[Values]:
        # Greedy answers have temperature 0; their log-probabilities are taken at 1.
        temperature = self.config.config.rollout.temperature or 1.0
        logprobs = self._forward(batch, temperature).logprobs.float().cpu().numpy()
        if batch:
            return np.split(
                logprobs, np.cumsum([each.mask.sum() for each in batch])[:-1]
            )
        return []


class ReferenceWorker(TeacherWorker):
    """Scores each sample like a teacher, and may take over the actor's weights every few iterations."""

    follows_plans: ClassVar[bool] = True

    # Receives the actor's weights, if the reference is refreshed.
    _receiver: CopyReceiver | None = None

    def setup(self) -> None:
        super().setup()
        self._enter_plan()

    def _enter_plan(self) -> None:
        if REFERENCE_WEIGHTS in self.context.channels:
            from rlplace.comm.weights.host_sync import CopyReceiver

            channel = self.context.channels[REFERENCE_WEIGHTS]
            # Each rank gets a copy through the channel.
            self._receiver = CopyReceiver(
                channel, self.context.rank, component="reference"
            )
            self._of_plan.callback(self._receiver.close)

    def write_state(self, folder: str) -> Metrics:
        """Copy the weights, start to write the copy into `folder` in the background, and return metrics.

        A checkpoint needs these weights, because a refreshed reference has the weights of an earlier version of the
        actor.
        """
        return self._save(folder, self._state())

    def read_state(self, folder: str) -> Metrics:
        """Load the weights from the checkpoint in `folder`, and return the duration as a metric.

        The number of ranks that saved the weights does not matter. Raises ConfigError if the weights are those of
        another model.
        """
        began = time.perf_counter()
        self._state_files().load(Path(folder), self._state())
        return {"reference/load_s": Metric(time.perf_counter() - began, "max")}

    def _state(self) -> dict[str, Tensor]:
        from rlplace.models.sharding import like, own

        weights = self._lm.module.lm.named_parameters()
        return {
            f"model.{name}": like(weight, self._where(own(weight)))
            for name, weight in weights
        }

    def begin_again(self, iteration: int) -> Metrics:
        if self._receiver is not None:
            self._receiver.begin_again()
        return super().begin_again(iteration)

    def refresh(self, iteration: int, version: int) -> Metrics:
        """Receive and load the actor's weights of `version`, and return the duration as a metric.

        Do nothing if the reference is not refreshed before `iteration`. The actor sends the weights in its method
        `refresh`, which is called at the same time.
        """
        if not self.config.refreshes(iteration):
            return {}
        self._require(Residency.WEIGHTS, "refresh")
        assert self._receiver is not None, "a reference that is refreshed has a channel"
        began = time.perf_counter()
        with self._working("refresh"), self._receiver.pull(version) as received:
            self._lm.load(received.tensors)
        return {"reference/refresh_s": Metric(time.perf_counter() - began, "max")}


class RewardModelWorker(ModelScorer):
    """Scores each sample with a sequence-classification model: one score for the whole episode.

    The model may have another tokenizer than the policy.
    """

    follows_plans: ClassVar[bool] = True

    def setup(self) -> None:
        self._tokens_of = retokenized(self.config, self.folder)
        super().setup()

    def _input(self, sample: Sample) -> ModelInput:
        tokens = self._tokens_of(sample)
        # The score is for the whole episode, so no single token is marked.
        return ModelInput(
            sample.group, sample.sample, tokens, np.zeros(len(tokens), np.bool_)
        )

    def _values(self, batch: Sequence[ModelInput]) -> Sequence[Values]:
        return list(self._forward(batch).cpu().numpy()[:, None])


# ── what is read of a sample ─────────────────────────────────────────────────────────────────────────────────────────
#
#   tokens of the policy ──▶ a reward model with the same tokenizer and chat template
#   transcript           ──▶ a reward model with others: its chat template, its tokens      the only text that becomes
#   transcript, tokens   ──▶ a function: prompts, answers   an endpoint: query, prompts     tokens again; nothing of it
#                                                                                           is ever trained on


def reads_text(job: TextArguments, component: str) -> bool:
    """Return whether `component` needs the transcripts of samples. If so, env ranks send it samples with their
    transcripts.

    `job`: arguments of the run's workers.
    """
    if role_of(component) != "reward":
        return False
    block = job.config.reward_of(component)
    own = folder_of(block.model)
    if block.kind != "model":
        return True
    if own is None:
        return False
    return not reads_tokens(job.model, own, chat=job.config.env.chat)


def retokenized(job: TextArguments, folder: Path) -> Callable[[Sample], Tokens]:
    """Return a function that converts a sample into tokens of the model in `folder`.

    `job`: arguments of the run's workers. If the policy has the same tokenizer, and for chats the same template, the
    function returns the sample's own tokens: those of the last conversation, if an agent had several. Raises
    ConfigError if the prompts are chats and the tokenizer in `folder` has no chat template.
    """
    if reads_tokens(job.model, folder, chat=job.config.env.chat):
        return _last_conversation
    tokenizer = Tokenizer.load(folder)
    env = job.config.env
    if not env.chat:
        return lambda sample: tokenizer.encode(
            "\n".join(
                message.text for message in conversation(sample.transcript, env.system)
            ),
            special=True,
        )
    # Raises here if the template refuses such a chat.
    tokenizer.render(TRIED_CHAT, answered=True)
    return lambda sample: tokenizer.chat(
        conversation(sample.transcript, env.system), answered=True
    )


def _last_conversation(sample: Sample) -> Tokens:
    """Return the tokens of the last conversation of a sample; of a sample with one conversation, all tokens."""
    if sample.parts:
        return sample.tokens[-sample.parts[-1] :]
    return sample.tokens


def conversation(transcript: Transcript, system: str | None = None) -> list[Message]:
    """Return the messages of a finished episode: system text, prompt, answers and replies.

    If the prompt ends with a message of the assistant, the first answer continues this message.
    """
    prompt = transcript.prompt
    messages = [] if system is None else [Message("system", system)]
    messages += [Message("user", prompt)] if isinstance(prompt, str) else prompt
    for answer, reply in itertools.zip_longest(transcript.answers, transcript.replies):
        if messages and messages[-1].role == "assistant":
            answer = f"{messages.pop().text}{answer}"
        messages.append(Message("assistant", answer))
        messages += [] if reply is None else [Message("user", reply)]
    return messages


def queries(
    samples: Sequence[Sample], tokenizer: Tokenizer
) -> tuple[list[str], list[str]]:
    """Return the text of each sample's whole episode, and the text of each sample's prompt, both with special tokens.

    `tokenizer`: tokenizer of the policy.
    """
    whole = [tokenizer.decode(sample.tokens, special=True) for sample in samples]
    prompts = [
        tokenizer.decode(sample.tokens[: sample.prompt_tokens], special=True)
        for sample in samples
    ]
    return whole, prompts

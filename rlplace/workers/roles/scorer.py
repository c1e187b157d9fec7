"""Scorers: workers that read whole groups of samples as they arrive, score each sample and do not learn.

This module has what all share, and those that are models: the reference and reward models. `reward` has the others.

::

    samples.<component> ── all groups that are there ──▶ score ──▶ scores.<component>, as soon as there are some

A scorer whose accelerators no other component needs during rollout scores while rollout still generates: it waits for
the next group like any reader of a channel, and ends after the last group of the iteration. A model scores in passes:

    whole      every rank reads groups by itself; no rank waits for another
    sharded    rank 0 reads what is there, packs it for all ranks, announces it ──▶ equally many passes on each rank
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.comm.channel import Channel
from rlplace.config.schema import FrozenConfig
from rlplace.envs.text import Message, Transcript
from rlplace.errors import ChannelEmpty
from rlplace.metrics import Metric, Metrics
from rlplace.models.tokenizer import Tokenizer
from rlplace.placement.flow import block_edges
from rlplace.placement.language.spec import role_of
from rlplace.placement.schedule import Residency
from rlplace.tokens import Sample, Scores, Tokens
from rlplace.workers.arguments import REFERENCE_WEIGHTS, WorkerArguments, samples_for, scores_of
from rlplace.workers.roles.checks import TRIED_CHAT, same_tokens
from rlplace.workers.worker import MoveReport, Worker, cancelled, not_resident, out_of_step, score_not_finite

if TYPE_CHECKING:  # the driver imports this module too: torch waits for setup
    from rlplace.comm.weights.version import WeightReceiver
    from rlplace.models.causal_lm import FrozenLm, PackedLm
    from rlplace.workers.offload import Offloadable
    from rlplace.workers.training.ranks import FromRank0, Ranks

Samples = tuple[Sample, ...]
Values = NDArray[np.float32]

_WORKSPACE = "gathered weights"


class Scoring:
    """One iteration of a scorer rank: reads its `due` of all `groups` in order of arrival, measures the work."""

    def __init__(self, channel: Channel, due: int, groups: int, owner: str) -> None:
        self._channel, self._groups, self._owner = channel, groups, owner
        self._seen: set[int] = set()
        self.due = due
        self.samples = self.tokens = 0  # scored
        self.wait_s = self.busy_s = 0.0

    def take(self, *, wait: bool = True) -> Samples:
        """Return the samples of all groups that are there; with `wait`, of one group at least.

        Raises ChannelTimeout, ChannelBroken; ChannelMisuse for a group that is not of this iteration.
        """
        taken: list[Sample] = []
        began = time.perf_counter()
        while self.due:
            try:
                group = self._channel.get() if wait and not taken else self._channel.get_nowait()
            except ChannelEmpty:
                break
            number = group[0].group
            if number in self._seen or not 0 <= number < self._groups:
                got, expected = f"group {number}", f"each of the groups 0-{self._groups - 1} once"
                raise out_of_step(self._owner, "samples are not of this iteration", got=got, expected=expected)
            self._seen.add(number)
            self.due -= 1
            taken += group
        self.wait_s += time.perf_counter() - began
        return tuple(taken)

    def metrics(self, component: str) -> Metrics:
        return {
            f"{component}/samples": Metric(self.samples, "sum"),
            f"{component}/tokens_per_s": Metric(self.tokens / self.busy_s if self.busy_s else 0.0, "sum"),
            f"{component}/infer_s": Metric(self.busy_s, "max"),
            f"{component}/wait_s": Metric(self.wait_s, "max"),
        }


class ModelInput(NamedTuple):
    """One sample as a model reads it."""

    group: int
    sample: int
    tokens: Tokens  # [L'], in the model's own vocabulary
    mask: NDArray[np.bool_]  # [L'], true at the tokens to score


class Scorer(Worker):
    """Base of all scorers. Ranks share one channel: each reads its even share of whole groups."""

    config: WorkerArguments

    _residency = Residency.OFF

    @property
    def component(self) -> str:
        return self.context.slot.component

    def move(self, to: Residency) -> MoveReport:
        self._residency = to
        return super().move(to)

    def infer(self, iteration: int, version: int) -> Metrics:
        """Score every sample of this rank's groups of an iteration; return when the last scores are put."""
        context, groups = self.context, self.config.prompts
        if self._residency < Residency.FULL:
            raise not_resident(context.owner, "infer", has=self._residency, needs=Residency.FULL)
        scoring = Scoring(context.channels[samples_for(self.component)], self._groups_due(), groups, context.owner)
        self._score(scoring)
        return scoring.metrics(self.component)

    def _groups_due(self) -> int:
        """Count the groups of an iteration that this rank reads."""
        first, stop = block_edges(self.config.prompts, self.context.world_size)[self.context.rank :][:2]
        return stop - first

    def _score(self, scoring: Scoring) -> None:
        """Read, score and put until nothing is due."""
        raise NotImplementedError

    def _check_cancelled(self) -> None:
        if self.context.cancelled.is_set():
            raise cancelled(self.context.owner, "infer")

    def _put(self, samples: Sequence[Sample | ModelInput], values: Iterable[Values], scoring: Scoring) -> None:
        """Put one Scores per sample. Raises RewardError for a value that is not finite, before it can be learned."""
        scores = [
            Scores(group=sample.group, sample=sample.sample, values=np.asarray(value, np.float32))
            for sample, value in zip(samples, values, strict=True)
        ]
        for score in scores:
            if not np.isfinite(score.values).all():
                raise score_not_finite(self.component, score)
        scoring.samples += len(scores)
        scoring.tokens += sum(len(sample.tokens) for sample in samples)
        if scores:
            self.context.channels[scores_of(self.component)].put(tuple(scores), weight=len(scores))


class ModelScorer(Scorer):
    """Base of scorers that are models. Owns this rank's part of the weights."""

    needs_own_process: ClassVar[bool] = True  # torch has one default process group per process

    _ranks: Ranks | None = None
    _from_rank_0: FromRank0
    _lm: FrozenLm[Any]
    _weights: Offloadable | None = None  # None: they live on the host

    def _kind(self) -> type[PackedLm]:
        raise NotImplementedError

    def _input(self, sample: Sample) -> ModelInput:
        return ModelInput(sample.group, sample.sample, sample.tokens, sample.mask)

    def _values(self, batch: Sequence[ModelInput]) -> Sequence[Values]:
        """Score each sample of a micro-batch by one pass."""
        raise NotImplementedError

    @property
    def _block(self) -> FrozenConfig:
        block = self.config.config.block_of(self.component)
        assert isinstance(block, FrozenConfig), "scorers that are models are not trained"
        return block

    @property
    def folder(self) -> Path:
        """Folder of the component's own model, or of the job's."""
        own = (self._block.model or {}).get("path")
        return self.config.model if own is None else Path(str(own))

    @property
    def _sharded(self) -> bool:
        """A single rank has the whole model: nothing is to be gathered."""
        return self._block.sharded and self.context.world_size > 1

    def setup(self) -> None:
        import torch

        from rlplace.models.causal_lm import FrozenLm
        from rlplace.workers.offload import Offloadable
        from rlplace.workers.training.ranks import FromRank0, join_group

        context, block = self.context, self._block
        self._ranks = ranks = join_group(context)
        self._from_rank_0 = FromRank0(ranks, context, self.config.config.runner.stage_timeout_s)
        mesh = ranks.mesh if self._sharded else ranks.alone() if block.on_host else None
        own_folder = "path" in (block.model or {})
        key = f"{self.config.config.key_of(self.component)}.model.path" if own_folder else "actor.model.path"
        device = torch.device(context.device.torch_name)
        self._lm = FrozenLm(self._kind(), self.folder, block.dtype, mesh, device, on_host=block.on_host, key=key)
        for module in self._lm.fsdp_modules:
            ranks.carry(module)
        if not block.on_host:
            self._weights = Offloadable(f"{self.component} weights", context.device, self._lm.weight_tensors)
        self.move(Residency.OFF)

    def move(self, to: Residency) -> MoveReport:
        """Bring the weights on or off; those that live on the host stay there."""
        began = time.perf_counter()
        weights = self._weights
        if weights is not None:
            weights.offload() if to is Residency.OFF else weights.onload()
        self._residency = to
        on_host = sum(tensor.nbytes for tensor in self._lm.weight_tensors()) if weights is None else weights.host_bytes
        return MoveReport(
            residency=to,
            accelerator_bytes=0 if weights is None else weights.accelerator_bytes,
            host_bytes=on_host,
            seconds=time.perf_counter() - began,
        )

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def _groups_due(self) -> int:
        return self.config.prompts if self._sharded else super()._groups_due()

    def _score(self, scoring: Scoring) -> None:
        """Score in passes. What a pass holds beside the resident state is accounted for, and freed at the end."""
        self.context.device.acquire(self._lm.gathered_bytes, _WORKSPACE)
        try:
            for batch in self._micro_batches(scoring):
                self._check_cancelled()
                began = time.perf_counter()
                values = self._values(batch)
                scoring.busy_s += time.perf_counter() - began
                self._put(batch, values, scoring)
        finally:
            self._lm.drop_gathered()
            self.context.device.release(_WORKSPACE)

    def _micro_batches(self, scoring: Scoring) -> Iterator[Sequence[ModelInput]]:
        """Give micro-batches within the token budget; of a sharded model equally many on each rank, also empty ones.

        The passes of a sharded model are collectives; waiting for samples is not. Rank 0 alone waits for them, the
        others wait for its announcement.
        """
        from rlplace.algo.packing import pack

        sharded = self._sharded
        due = scoring.due
        while due:
            parts: list[tuple[int, list[list[ModelInput]]]] | None = None
            if not sharded or self.context.rank == 0:
                inputs = [self._input(sample) for sample in scoring.take()]
                ranks, budget = self.context.world_size if sharded else 1, self._block.token_budget
                packing = pack([len(each.tokens) for each in inputs], ranks, budget)
                parts = [(scoring.due, [[inputs[i] for i in picks] for picks in rank]) for rank in packing.ranks]
            due, batches = self._from_rank_0.scatter(parts, "samples") if sharded or parts is None else parts[0]
            yield from batches

    def _forward(self, batch: Sequence[ModelInput], *others: object) -> Any:
        """Run one pass of the model; with a sharded one, a collective."""
        import torch

        from rlplace.models.packed_attention import Packed

        packed = Packed.of([each.tokens for each in batch], [each.mask for each in batch], self._lm.device)
        with torch.no_grad():
            return self._lm.module(packed, *others)


class ReferenceWorker(ModelScorer):
    """Scores the response tokens by their log-probabilities at the temperature they were drawn at."""

    _receiver: WeightReceiver | None = None

    def _kind(self) -> type[PackedLm]:
        from rlplace.models.causal_lm import CausalLm

        return CausalLm

    def setup(self) -> None:
        super().setup()
        if REFERENCE_WEIGHTS in self.context.channels:
            from rlplace.comm.weights.receiver import CopyReceiver

            channel = self.context.channels[REFERENCE_WEIGHTS]
            self._receiver = CopyReceiver(channel, self.context.rank)  # each rank has a copy through the channel

    def _values(self, batch: Sequence[ModelInput]) -> Sequence[Values]:
        temperature = self.config.config.text_rollout.temperature or 1.0  # greedy answers come with the model's own
        logprobs = self._forward(batch, temperature).logprobs.float().cpu().numpy()
        return np.split(logprobs, np.cumsum([each.mask.sum() for each in batch])[:-1]) if batch else []

    def refresh(self, iteration: int, version: int) -> Metrics:
        """Load the actor's weights of `version` into the reference if this iteration is due.

        The actor sends in the same call.
        """
        if not self.config.refreshes(iteration):
            return {}
        if self._residency < Residency.WEIGHTS:
            raise not_resident(self.context.owner, "refresh", has=self._residency, needs=Residency.WEIGHTS)
        assert self._receiver is not None, "a reference that is refreshed has a channel"
        began = time.perf_counter()
        with self._receiver.pull(version) as received:
            self._lm.load(received.tensors)
        return {"reference/refresh_s": Metric(time.perf_counter() - began, "max")}

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        super().close()


class RewardModelWorker(ModelScorer):
    """Scores episodes by a model of sequence classification, in its own tokens where the policy has others."""

    def _kind(self) -> type[PackedLm]:
        from rlplace.models.causal_lm import reward_lm

        return reward_lm(self.config.config.reward_of(self.component).head)

    def setup(self) -> None:
        self._tokens_of = retokenized(self.config, self.folder)
        super().setup()

    def _input(self, sample: Sample) -> ModelInput:
        tokens = self._tokens_of(sample)
        # No token is scored by itself: the score is of the whole episode.
        return ModelInput(sample.group, sample.sample, tokens, np.zeros(len(tokens), np.bool_))

    def _values(self, batch: Sequence[ModelInput]) -> Sequence[Values]:
        return list(self._forward(batch).cpu().numpy()[:, None])


# ── what is read of a sample ─────────────────────────────────────────────────────────────────────────────────────────
#
#   tokens of the policy ──▶ a reward model with the same tokenizer
#   transcript           ──▶ a reward model with another: its chat template, its tokens     the only text that becomes
#   transcript, tokens   ──▶ a function: prompts, answers   an endpoint: query, prompts     tokens again; nothing of it
#                                                                                           is ever trained on


def reads_text(job: WorkerArguments, component: str) -> bool:
    """Return whether a component's samples need their transcripts, which an env rank then adds."""
    if role_of(component) != "reward":
        return False
    block = job.config.reward_of(component)
    own = (block.model or {}).get("path")
    return block.kind != "model" or (own is not None and not same_tokens(job.model, Path(str(own))))


def retokenized(job: WorkerArguments, folder: Path) -> Callable[[Sample], Tokens]:
    """Return the function that turns a sample into tokens of the reward model in `folder`.

    Raises ConfigError when the model has no chat template for a chat.
    """
    if same_tokens(job.model, folder):
        return lambda sample: sample.tokens
    tokenizer, env = Tokenizer.load(folder), job.config.text_env
    if not env.chat:
        return lambda sample: tokenizer.encode(
            "\n".join(message.content for message in conversation(transcript_of(sample), env.system)), special=True
        )
    tokenizer.render(TRIED_CHAT, answered=True)  # a template that refuses is found here
    return lambda sample: tokenizer.chat(conversation(transcript_of(sample), env.system), answered=True)


def transcript_of(sample: Sample) -> Transcript:
    transcript = sample.transcript
    assert isinstance(transcript, Transcript), "env ranks add it for scorers that read text"
    return transcript


def conversation(transcript: Transcript, system: str | None = None) -> list[Message]:
    """Return all messages of an episode, in order."""
    prompt = transcript.prompt
    messages = [] if system is None else [Message("system", system)]
    messages += [Message("user", prompt)] if isinstance(prompt, str) else prompt
    for answer, reply in itertools.zip_longest(transcript.answers, transcript.replies):
        messages.append(Message("assistant", answer))
        messages += [] if reply is None else [Message("user", reply)]
    return messages


def queries(samples: Sequence[Sample], tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    """Return the texts of whole episodes and of their prompts, as the policy saw them: with special tokens."""
    whole = [tokenizer.decode(sample.tokens, special=True) for sample in samples]
    firsts = [int(sample.mask.argmax()) if sample.response_tokens else len(sample.tokens) for sample in samples]
    prompts = [tokenizer.decode(s.tokens[:first], special=True) for s, first in zip(samples, firsts, strict=True)]
    return whole, prompts

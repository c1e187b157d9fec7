"""Samples of a language model on their way from channels to learners: rank 0 takes and scatters them, each rank makes
tensors of them.

::

    samples         ──▶ rank 0: all groups ──┬─▶ rank 0: lengths of all, tokens and targets of samples 0 3 5
    scores, returns ──▶                      └─▶ rank 1: lengths of all, tokens and targets of samples 1 2 4

Letters: S learned samples of the iteration, M their response tokens, N response tokens of a sample or micro-batch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlplace.algo.packing import MicroBatch, SampleSizes
from rlplace.codes import problem
from rlplace.comm.channel import Channel
from rlplace.errors import ChannelTimeout, DivergedError
from rlplace.models.packed import Packed
from rlplace.placement.language.spec import role_of
from rlplace.tokens import Files, Sample, Scores, by_group
from rlplace.workers.worker import out_of_step, score_not_finite

Groups = Sequence[Sequence[Sample]]
TokenArray = NDArray[np.float32]
BySample = Sequence[TokenArray]  # [N] of each sample, in the order of the groups
# Arrays over response tokens. `old`: log-probabilities by the actor's weights before the first step. `values`: by the
# value head on its trunk, or by a critic. `reference`: log-probabilities by the reference. `returns`: regression
# targets of the values.
Target = Literal["advantages", "old", "reference", "values", "returns"]

# All components have computed their scores before the loop asks for them, so only the network takes time.
SCORES_TIMEOUT_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The lengths of all samples of an iteration, [S] each; every rank knows them."""

    sizes: SampleSizes
    responses: tuple[int, ...]  # tokens of each sample that the policy sampled

    @classmethod
    def of(cls, groups: Groups, *, shared_prefix_cost: float | None) -> Lengths:
        """Return the lengths of all samples in `groups`.

        `shared_prefix_cost`: as in `sizes_of`.
        """
        samples = [sample for group in groups for sample in group]
        return cls(
            sizes=sizes_of(samples, shared_prefix_cost=shared_prefix_cost),
            responses=tuple(s.response_tokens for s in samples),
        )

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.sizes.tokens


class Masked(Protocol):
    """The fields of a sample that a forward pass reads."""

    @property
    def group(self) -> int: ...
    @property
    def tokens(self) -> NDArray[np.int32]: ...
    @property
    def mask(self) -> NDArray[np.bool_]: ...
    @property
    def images(self) -> Files: ...


def sizes_of(
    samples: Sequence[Masked],
    *,
    shared_prefix_cost: float | None,
) -> SampleSizes:
    """Return the sizes of samples for packing, with the length of the prefix that the samples of each group share.

    `samples`: the samples of a group must be neighbours. `shared_prefix_cost`: cost of a prefix token for each sample
    that shares it, relative to a token of its own (`SampleSizes.again`); None: nothing is shared.

    A shared prefix ends before the first scored token of any sample. With images, either the whole unscored prefix is
    shared, or nothing.
    """
    tokens = tuple(len(sample.tokens) for sample in samples)
    groups = tuple(sample.group for sample in samples)
    if shared_prefix_cost is None:
        return SampleSizes(tokens, groups=groups)
    prefixes = list[int]()
    for _, members in itertools.groupby(samples, key=lambda sample: sample.group):
        group = list(members)
        first = group[0]
        # Tokens before the first scored one, in every sample of the group
        unscored = [
            int(s.mask.argmax()) if s.mask.any() else len(s.tokens) for s in group
        ]
        whole = min(unscored)
        # Shorten to the tokens that are equal in all samples
        shared = whole
        for other in group[1:]:
            differ = np.flatnonzero(first.tokens[:shared] != other.tokens[:shared])
            if len(differ):
                shared = int(differ[0])
        # Image tokens are placeholders, so equal tokens do not mean equal images
        if any(s.images for s in group):
            equal_images = all(s.images == first.images for s in group)
            if shared < whole or not equal_images:
                shared = 0
        prefixes += [shared] * len(group)
    return SampleSizes(tokens, tuple(prefixes), groups, shared_prefix_cost)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampleShard:
    """The data of an iteration for one rank: lengths of all samples, and the samples and targets of the rank's own
    passes.
    """

    lengths: Lengths
    samples: Mapping[int, Sample]  # by number
    # Targets that have been computed, each by sample number
    targets: Mapping[Target, Mapping[int, TokenArray]]
    kl_coef: float  # weight of the KL from the reference


# ── from channels, by rank 0 ─────────────────────────────────────────────────────────────────────────────────────────


def take_groups(
    channel: Channel,
    groups: int,
    owner: str,
    *,
    part: int | None = None,
) -> list[list[Sample]]:
    """Block until groups have arrived, in any order; return them, with their samples, in ascending order.

    `groups`: number of groups of the iteration. `part`: number of groups to wait for; None: all. `owner`: this rank,
    for errors. Raises ChannelTimeout, and ChannelMisuse if a group came twice or has a number outside the iteration.
    """
    arriving = arriving_groups(channel, groups, owner)
    taken = itertools.islice(arriving, groups if part is None else part)
    return list(by_group([sample for group in taken for sample in group]).values())


def arriving_groups(
    channel: Channel,
    groups: int,
    owner: str,
) -> Iterator[Sequence[Sample]]:
    """Yield the groups of an iteration in the order of arrival.

    `groups`: number of groups. `owner`: this rank, for errors. Raises the errors of `take_groups`.
    """
    taken = set[int]()
    while len(taken) < groups:
        group: Sequence[Sample] = channel.get()
        number = group[0].group
        if number in taken or not 0 <= number < groups:
            expected = f"each of the groups 0-{groups - 1} once"
            raise out_of_step(
                owner,
                "samples",
                got=f"group {number}",
                expected=expected,
            )
        taken.add(number)
        yield group


def streamed_batches(
    arriving: Iterable[Sequence[Sample]],
    tokens: int,
    *,
    shared_prefix_cost: float | None,
) -> Generator[Groups, None, Groups]:
    """Yield batches of the arriving groups, and return the last batch, which is incomplete.

    A batch has one group of any size, or several groups of at most `tokens` tokens together. A batch is yielded when
    the next group has arrived and does not fit into the batch.

    `shared_prefix_cost`: as in `sizes_of`.
    """
    batch = list[Sequence[Sample]]()
    held = 0
    for group in arriving:
        sizes = sizes_of(group, shared_prefix_cost=shared_prefix_cost)
        size = sizes.size(range(len(group)))
        if batch and held + size > tokens:
            yield batch
            batch = []
            held = 0
        batch.append(group)
        held += size
    return batch


def take_scores(
    channel: Channel,
    scorer: str,
    samples: Sequence[Sample],
    owner: str,
    timeout_s: float = SCORES_TIMEOUT_S,
    *,
    skip: bool = False,
) -> list[TokenArray]:
    """Return the scores of each of `samples`, in their order; block until all have arrived from the channel.

    `scorer`: component that computes them. `owner`: this rank, for errors. `timeout_s`: longest wait for one item.
    `skip`: replace all scores of a sample with non-finite scores by NaN, instead of raising RewardError.

    Raises ChannelTimeout, which names the samples without scores, and ChannelMisuse for scores of other samples.
    """
    # Scores by group and number of the sample within the group
    found: dict[tuple[int, int], TokenArray] = {}
    try:
        for scores in _arriving(channel, scorer, samples, owner, timeout_s):
            values = scores.values
            if not np.isfinite(values).all():
                if not skip:
                    raise score_not_finite(scorer, scores)
                values = np.full_like(values, np.nan)
            found[scores.group, scores.sample] = values
    except ChannelTimeout as error:
        missing = [
            f"{s.group}/{s.sample}" for s in samples if (s.group, s.sample) not in found
        ]
        shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        raise ChannelTimeout(
            problem(
                "scores-missing",
                channel.spec.name,
                f"no scores of {shown}   (group/sample)",
                owner=owner,
                timeout_s=timeout_s,
                scorer=scorer,
                missing=len(missing),
                all=len(samples),
            )
        ) from error
    return [found[sample.group, sample.sample] for sample in samples]


def take_returns(
    channel: Channel,
    samples: Sequence[Sample],
    owner: str,
    *,
    skip: bool = False,
) -> list[TokenArray]:
    """Return the returns of each of `samples`, in their order; block until all have arrived from the actor.

    `owner`: this rank, for errors. `skip`: replace all returns of a sample with non-finite returns by NaN, instead of
    raising DivergedError.

    Raises ChannelTimeout, and ChannelMisuse for returns of other samples.
    """
    found: dict[tuple[int, int], TokenArray] = {}
    for returns in _arriving(channel, "actor", samples, owner):
        values = returns.values
        if not np.isfinite(values).all():
            if not skip:
                raise _return_not_finite(owner, returns)
            values = np.full_like(values, np.nan)
        found[returns.group, returns.sample] = values
    return [found[sample.group, sample.sample] for sample in samples]


def _return_not_finite(owner: str, returns: Scores) -> DivergedError:
    shown = str(returns.values[:8].tolist())
    if len(returns.values) > 8:
        shown += " ..."
    return DivergedError(
        problem(
            "returns-not-finite",
            owner,
            shown,
            sample=returns.sample,
            group=returns.group,
        )
    )


def _arriving(
    channel: Channel,
    giver: str,
    samples: Sequence[Sample],
    owner: str,
    timeout_s: float | None = None,
) -> Iterator[Scores]:
    """Yield the scores of each of `samples`, in the order in which the scores arrive.

    `giver`: component that puts the scores. `owner`: this rank, for errors. `timeout_s`: longest wait for one item;
    None: the limit of the channel. Raises ChannelMisuse for scores of another sample, for a sample that is scored
    twice, and for a wrong number of scores.
    """
    # Samples without scores, by group and number
    due = {(sample.group, sample.sample): sample for sample in samples}
    while due:
        item: Sequence[Scores] = channel.get(timeout_s=timeout_s)
        for scores in item:
            place = f"{scores.group}/{scores.sample}"
            sample = due.pop((scores.group, scores.sample), None)
            if sample is None:
                got = f"scores of sample {place}"
                expected = "each sample of this iteration once"
                raise out_of_step(
                    owner,
                    "unasked",
                    got=got,
                    expected=expected,
                    giver=giver,
                )
            # A reward scores the sample, other components each of its response tokens
            number = 1 if role_of(giver) == "reward" else sample.response_tokens
            if scores.values.shape != (number,):
                got = f"an array of shape {scores.values.shape}"
                expected = f"{number} for sample {place}"
                raise out_of_step(
                    owner,
                    "another-number",
                    got=got,
                    expected=expected,
                    giver=giver,
                )
            yield scores


# ── into tensors, on every rank ──────────────────────────────────────────────────────────────────────────────────────


def joined(parts: BySample) -> TokenArray:
    """Return the arrays of all samples as one array [M]; empty without samples."""
    return np.concatenate([np.zeros(0, np.float32), *parts])


class Batch:
    """The samples of one rank, from which it makes the tensors of each micro-batch.

    The response tokens of all ranks' samples are numbered 0 to M - 1, sample after sample. `places` returns these
    numbers.
    """

    def __init__(self, shard: SampleShard, device: torch.device) -> None:
        self._shard = shard
        self._device = device
        self.kl_coef = shard.kl_coef
        self._first = np.cumsum([0, *shard.lengths.responses]).tolist()

    @property
    def tokens(self) -> int:
        """M, the number of response tokens of all samples of all ranks."""
        return int(self._first[-1])

    def packed(self, picks: MicroBatch) -> Packed:
        """Return the input of a forward pass over the picked samples."""
        chosen = [self._shard.samples[i] for i in picks]
        # Neighbours with a common prefix, which is computed once
        alike = self._shard.lengths.sizes.alike(picks)
        images = [s.images for s in chosen]
        return Packed.of(
            [s.tokens for s in chosen],
            [s.mask for s in chosen],
            self._device,
            alike,
            images,
        )

    def size(self, picks: MicroBatch) -> int:
        """Return the cost of a forward pass over the picked samples, in tokens."""
        return self._shard.lengths.sizes.size(picks)

    def lengths(self, picks: MicroBatch) -> Tensor:
        """Return the number of response tokens of each picked sample, [samples] int64."""
        return torch.tensor(
            [self._shard.lengths.responses[i] for i in picks],
            dtype=torch.int64,
            device=self._device,
        )

    def engine_logprobs(self, picks: MicroBatch) -> Tensor:
        """Return the engine's log-probabilities of the picked samples' response tokens, [N], under which it sampled
        them.
        """
        chosen = [self._shard.samples[i] for i in picks]
        return torch.tensor(
            joined([s.logprobs[s.mask] for s in chosen]), device=self._device
        )

    def versions(self, picks: MicroBatch) -> Tensor:
        """Return the policy version under which each response token of the picked samples was sampled, [N] int32."""
        chosen = [self._shard.samples[i] for i in picks]
        versions = np.concatenate(
            [np.zeros(0, np.int32), *(s.versions[s.mask] for s in chosen)]
        )
        return torch.tensor(versions, device=self._device)

    def target(self, name: Target, picks: MicroBatch) -> Tensor:
        """Return the target `name` of the picked samples' response tokens, [N]; it must have been computed."""
        return torch.tensor(
            joined([self._shard.targets[name][i] for i in picks]), device=self._device
        )

    def places(self, picks: MicroBatch) -> Tensor:
        """Return the numbers of the picked samples' response tokens among all M, [N] int64."""
        pieces = [
            torch.arange(self._first[i], self._first[i + 1], device=self._device)
            for i in picks
        ]
        return torch.cat(
            [torch.empty(0, dtype=torch.int64, device=self._device), *pieces]
        )

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
from rlplace.tokens import Files, Routes, Sample, Scores, by_group
from rlplace.workers.worker import out_of_step, score_not_finite

Groups = Sequence[Sequence[Sample]]
TokenArray = NDArray[np.float32]
BySample = Sequence[TokenArray]  # [N] of each sample, in the order of the groups
# Arrays over response tokens. `old`: log-probabilities by the actor's weights before the first step. `values`: by the
# value head on its trunk, or by a critic. `reference`: log-probabilities by the reference. `returns`: regression
# targets of the values. `weights`, `logprobs`: of the tokens of a pass that a client of the training API commands.
Target = Literal[
    "advantages", "old", "reference", "values", "returns", "weights", "logprobs"
]

# All components have computed their scores before the loop asks for them, so only the network takes time.
SCORES_TIMEOUT_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The lengths of all S samples of an iteration, which every rank knows.

    `sizes`: tokens of each sample, and the prefixes that samples share. `responses`: number of tokens of each sample
    that the policy has sampled.
    """

    sizes: SampleSizes
    responses: tuple[int, ...]  # tokens of each sample that the policy sampled

    @classmethod
    def of(cls, groups: Groups, *, shared_prefix_cost: float | None) -> Lengths:
        """Return the lengths of all samples in `groups`.

        `shared_prefix_cost`: cost for each sample of a prompt token that is computed once for the whole group, relative
        to a token of the sample itself; None: each sample computes its own prompt.
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
    """The attributes of a sample that a forward pass needs.

    `mask`: true at the tokens that are scored. `parts`, `routes`: as those of a sample.
    """

    @property
    def group(self) -> int: ...
    @property
    def tokens(self) -> NDArray[np.int32]: ...
    @property
    def mask(self) -> NDArray[np.bool_]: ...
    @property
    def images(self) -> Files: ...
    @property
    def parts(self) -> tuple[int, ...]: ...
    @property
    def routes(self) -> Routes | None: ...


def sizes_of(
    samples: Sequence[Masked],
    *,
    shared_prefix_cost: float | None,
) -> SampleSizes:
    """Return the sizes of samples for packing: their lengths, and the length of the prefix that the samples of a group
    share.

    `samples`: samples of the same group must be neighbours. `shared_prefix_cost`: the cost that a token
    of the shared prefix has for each sample, divided by the cost of a token of the sample itself; None: samples share
    no prefix.

    A shared prefix ends before the first scored token of any sample of the group, and before the first token for which
    samples have other experts to be replayed. If samples have images, they share the whole prefix before the first
    scored token, or no prefix.
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
        # All of them in the first conversation
        unscored += [s.parts[0] for s in group if s.parts]
        whole = min(unscored)
        # Shorten to the tokens that are equal in all samples
        shared = whole
        for other in group[1:]:
            differ = np.flatnonzero(first.tokens[:shared] != other.tokens[:shared])
            if len(differ):
                shared = int(differ[0])
            shared = _equal_routes(first.routes, other.routes, shared)
        # Image tokens are placeholders, so equal tokens do not mean equal images
        if any(s.images for s in group):
            equal_images = all(s.images == first.images for s in group)
            if shared < whole or not equal_images:
                shared = 0
        prefixes += [shared] * len(group)
    return SampleSizes(tokens, tuple(prefixes), groups, shared_prefix_cost)


def _equal_routes(one: Routes | None, other: Routes | None, tokens: int) -> int:
    """Return how many of the first `tokens` tokens of two samples have the same experts to be replayed."""
    if one is None or other is None:
        return tokens if one is other else 0
    differ = np.flatnonzero((one[:tokens] != other[:tokens]).any(axis=(1, 2)))
    return int(differ[0]) if len(differ) else tokens


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampleShard:
    """What one rank needs of an iteration: the lengths of all samples, and the samples and targets that the rank
    computes with.

    `samples`: index of a sample -> sample. `targets`: name of the target -> index of a sample -> one value per response
    token. `kl_coef`: weight of the KL from the reference in the loss.
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
    """Wait until groups have arrived, in any order, and return their samples, in ascending order of group numbers.

    `groups`: number of groups of the iteration. `part`: number of groups to wait for; None: all. `owner`: name of this
    rank in errors. Raises ChannelTimeout, and ChannelMisuse if a group arrives twice or its number is outside the
    iteration.
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

    `groups`: number of groups of the iteration. `owner`: name of this rank in errors. Raises ChannelTimeout, and
    ChannelMisuse if a group arrives twice or its number is outside the iteration.
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
    """Yield the arriving groups in batches of at most `tokens` tokens; return the last batch, which may have room left.

    A group with more than `tokens` tokens is a batch of its own. A batch is yielded when the next group has arrived and
    does not fit into the batch any more.

    `shared_prefix_cost`: cost for each sample of a token of the shared prompt, relative to a token of the sample
    itself; None: samples share no prompt.
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
    """Wait until the scores of all `samples` have arrived from the channel, and return one array per sample, in their
    order.

    `scorer`: component that computes the scores. `owner`: name of this rank in errors. `timeout_s`: longest wait for
    one item. `skip`: if a sample has non-finite scores, replace all its scores by NaN instead of raising RewardError.

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
    """Wait until the returns of all `samples` have arrived from the actor, and return one array per sample, in their
    order.

    `owner`: name of this rank in errors. `skip`: if a sample has non-finite returns, replace all its returns by NaN
    instead of raising DivergedError.

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
    """Yield the scores of each of `samples`, in the order of arrival, until all have arrived.

    `giver`: component that sends the scores. `owner`: name of this rank in errors. `timeout_s`: longest wait for one
    item; None: the limit of the channel. Raises ChannelMisuse for scores of another sample, for a sample that is scored
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
            # No score: the function of a reward does not apply to the sample
            none_applies = role_of(giver) == "reward" and scores.values.shape == (0,)
            if scores.values.shape != (number,) and not none_applies:
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
    """Return the arrays of all samples, joined to one flat array; without samples, an empty array."""
    return np.concatenate([np.zeros(0, np.float32), *parts])


class Batch:
    """The samples of one rank, from which it makes the tensors of each micro-batch.

    A micro-batch is given by the indices of its samples (`picks`). The response tokens of the samples of all ranks have
    the indices 0 to M - 1, sample after sample; `places` returns these indices.
    """

    def __init__(self, shard: SampleShard, device: torch.device) -> None:
        self._shard = shard
        self._device = device
        self.kl_coef = shard.kl_coef
        self._first = np.cumsum([0, *shard.lengths.responses]).tolist()

    @property
    def tokens(self) -> int:
        """M, the number of response tokens in the samples of all ranks."""
        return int(self._first[-1])

    def packed(self, picks: MicroBatch, *, replays: bool = True) -> Packed:
        """Return the input of a forward pass over the samples `picks`.

        `replays`: let routers take the experts that the samples have; else they choose.
        """
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
            [s.parts for s in chosen],
            [s.routes for s in chosen] if replays else (),
        )

    def size(self, picks: MicroBatch) -> int:
        """Return the cost of a forward pass over the samples `picks`, in tokens. A shared prefix is counted once."""
        return self._shard.lengths.sizes.size(picks)

    def lengths(self, picks: MicroBatch) -> Tensor:
        """Return the number of response tokens of each of the samples `picks`, [samples] int64."""
        return torch.tensor(
            [self._shard.lengths.responses[i] for i in picks],
            dtype=torch.int64,
            device=self._device,
        )

    def engine_logprobs(self, picks: MicroBatch) -> Tensor:
        """Return the log-probabilities of the N response tokens of the samples `picks`, as the engine reported them
        when it sampled the tokens, [N].
        """
        chosen = [self._shard.samples[i] for i in picks]
        return torch.tensor(
            joined([s.logprobs[s.mask] for s in chosen]), device=self._device
        )

    def versions(self, picks: MicroBatch) -> Tensor:
        """Return the policy version that sampled each of the N response tokens of the samples `picks`, [N] int32."""
        chosen = [self._shard.samples[i] for i in picks]
        versions = np.concatenate(
            [np.zeros(0, np.int32), *(s.versions[s.mask] for s in chosen)]
        )
        return torch.tensor(versions, device=self._device)

    def target(self, name: Target, picks: MicroBatch) -> Tensor:
        """Return the target `name` for the N response tokens of the samples `picks`, [N]. The shard must contain this
        target.
        """
        return torch.tensor(
            joined([self._shard.targets[name][i] for i in picks]), device=self._device
        )

    def places(self, picks: MicroBatch) -> Tensor:
        """Return the indices of the N response tokens of the samples `picks` among all M response tokens, [N] int64."""
        pieces = [
            torch.arange(self._first[i], self._first[i + 1], device=self._device)
            for i in picks
        ]
        return torch.cat(
            [torch.empty(0, dtype=torch.int64, device=self._device), *pieces]
        )

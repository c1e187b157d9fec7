"""Samples of a language model between channels and learners: taken by rank 0, scattered, packed into tensors.

::

    samples         ──▶ rank 0: all groups ──┬─▶ rank 0: lengths of all, tokens and targets of samples 0 3 5
    scores, returns ──▶                      └─▶ rank 1: lengths of all, tokens and targets of samples 1 2 4

Letters: S samples of the iteration that are learned, M response tokens of these, N of one sample or micro-batch.
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
from rlplace.comm.channel import Channel
from rlplace.errors import ChannelTimeout, DivergedError
from rlplace.models.packed import Packed
from rlplace.placement.language.spec import role_of
from rlplace.tokens import Files, Sample, Scores, by_group
from rlplace.workers.worker import out_of_step, score_not_finite

Groups = Sequence[Sequence[Sample]]
TokenArray = NDArray[np.float32]
BySample = Sequence[TokenArray]  # [N] of each sample, in the order of the groups
# Numbers of response tokens. By the actor's own weights before the first step: old, its log-probabilities, and values
# of a head on its trunk. reference: log-probabilities of the reference. returns: what the values are to become.
Target = Literal["advantages", "old", "reference", "values", "returns"]

# All components have scored before the loop asks for their scores: only the network is still to be waited for.
SCORES_TIMEOUT_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths of all samples, [S] each, known to every rank."""

    sizes: SampleSizes
    responses: tuple[int, ...]  # of the tokens, those sampled by the policy

    @classmethod
    def of(cls, groups: Groups, *, again: float | None) -> Lengths:
        """`again`: as `sizes_of`."""
        samples = [sample for group in groups for sample in group]
        return cls(
            sizes=sizes_of(samples, again=again),
            responses=tuple(s.response_tokens for s in samples),
        )

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.sizes.tokens


class Masked(Protocol):
    """A sample, as far as a pass takes it."""

    @property
    def group(self) -> int: ...
    @property
    def tokens(self) -> NDArray[np.int32]: ...
    @property
    def mask(self) -> NDArray[np.bool_]: ...
    @property
    def images(self) -> Files: ...


def sizes_of(samples: Sequence[Masked], *, again: float | None) -> SampleSizes:
    """Return the sizes of samples, those of a group together, with what they begin with in common.

    `again`: what that costs for each of them, as in `SampleSizes`; None: nothing is shared.

    What is in common ends before the first token that is scored in any of them. With images it is all of that, or
    nothing.
    """
    tokens = tuple(len(sample.tokens) for sample in samples)
    groups = tuple(sample.group for sample in samples)
    if again is None:
        return SampleSizes(tokens, groups=groups)
    prompts = list[int]()
    for _, members in itertools.groupby(samples, key=lambda sample: sample.group):
        first, *others = group = list(members)
        whole = shared = min(
            int(s.mask.argmax()) if s.mask.any() else len(s.tokens) for s in group
        )
        for other in others:
            differ = np.flatnonzero(first.tokens[:shared] != other.tokens[:shared])
            shared = int(differ[0]) if len(differ) else shared
        if any(s.images for s in group) and (
            shared < whole or any(s.images != first.images for s in others)
        ):
            shared = 0
        prompts += [shared] * len(group)
    return SampleSizes(tokens, tuple(prompts), groups, again)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampleShard:
    lengths: Lengths
    own: Mapping[int, Sample]  # by number
    # Of the same samples, as far as they have been computed
    targets: Mapping[Target, Mapping[int, TokenArray]]
    kl_coef: float  # weight of the KL from the reference


# ── from channels, by rank 0 ─────────────────────────────────────────────────────────────────────────────────────────


def take_groups(
    channel: Channel, groups: int, owner: str, *, part: int | None = None
) -> list[list[Sample]]:
    """Block until all `groups` of an iteration are here, in any order, or a `part` of them; return them ascending.

    Raises ChannelTimeout; ChannelMisuse where a group came twice, so that one of them is not of this iteration.
    """
    arriving = arriving_groups(channel, groups, owner)
    taken = itertools.islice(arriving, groups if part is None else part)
    return list(by_group([sample for group in taken for sample in group]).values())


def arriving_groups(
    channel: Channel, groups: int, owner: str
) -> Iterator[Sequence[Sample]]:
    """Yield the `groups` of an iteration as they come; wait for each. Raises as `take_groups`."""
    taken = set[int]()
    while len(taken) < groups:
        group: Sequence[Sample] = channel.get()
        number = group[0].group
        if number in taken or not 0 <= number < groups:
            expected = f"each of the groups 0-{groups - 1} once"
            raise out_of_step(
                owner,
                "samples are not of this iteration",
                got=f"group {number}",
                expected=expected,
            )
        taken.add(number)
        yield group


def waves(
    arriving: Iterable[Sequence[Sample]], tokens: int, *, again: float | None
) -> Generator[Groups, None, Groups]:
    """Yield groups as they come, as many at a time as have the size of `tokens`, one at least; return the rest.

    A wave is there when a group has come that no longer fits.
    """
    wave = list[Sequence[Sample]]()
    held = 0
    for group in arriving:
        size = sizes_of(group, again=again).size(range(len(group)))
        if wave and held + size > tokens:
            yield wave
            wave = []
            held = 0
        wave.append(group)
        held += size
    return wave


def take_scores(
    channel: Channel,
    scorer: str,
    samples: Sequence[Sample],
    owner: str,
    timeout_s: float = SCORES_TIMEOUT_S,
    *,
    skip: bool = False,
) -> list[TokenArray]:
    """Return what `scorer` gives for each of `samples`, in their order.

    Raises ChannelTimeout with the samples whose scores are missing; ChannelMisuse for scores that are not of these
    samples. For numbers that are not finite RewardError; with `skip` these are nan.
    """
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
        raise ChannelTimeout.about(
            "scores-missing",
            channel.spec.name,
            f"{owner} waited {timeout_s:g} s for {scorer} to score {len(missing)} of {len(samples)} samples",
            got=f"no scores of {shown}   (group/sample)",
            why=f"{scorer} has reported that it is done, and samples are learned with all their scores",
            fix=f"look at what {scorer} logged: it must put scores of every sample it is given",
        ) from error
    return [found[sample.group, sample.sample] for sample in samples]


def take_returns(
    channel: Channel, samples: Sequence[Sample], owner: str, *, skip: bool = False
) -> list[TokenArray]:
    """Return what the actor gives a critic to learn for each of `samples`, in their order, while the actor works on it.

    Raises ChannelTimeout of the channel; ChannelMisuse for others. For a return that is not finite DivergedError; with
    `skip` all of its sample are nan.
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
    return DivergedError.about(
        "returns-not-finite",
        owner,
        f"the returns of sample {returns.sample} of group {returns.group} are not finite numbers",
        got=str(returns.values[:8].tolist())
        + (" ..." if len(returns.values) > 8 else ""),
        why="the actor sums them from rewards and the critic's values, and these are too large",
        fix="algorithm.reward_clip: <the largest reward to learn from>, or a smaller critic.optimizer.lr",
    )


def _arriving(
    channel: Channel,
    giver: str,
    samples: Sequence[Sample],
    owner: str,
    timeout_s: float | None = None,
) -> Iterator[Scores]:
    """Yield what `giver` puts, until it is there for every sample. Raises ChannelMisuse for what is not due."""
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
                    f"{giver} scored what it was not asked for",
                    got=got,
                    expected=expected,
                )
            number = 1 if role_of(giver) == "reward" else sample.response_tokens
            if scores.values.shape != (number,):
                got = f"an array of shape {scores.values.shape}"
                expected = f"{number} for sample {place}"
                raise out_of_step(
                    owner,
                    f"{giver} gave another number of scores",
                    got=got,
                    expected=expected,
                )
            yield scores


# ── into tensors, on every rank ──────────────────────────────────────────────────────────────────────────────────────


def joined(parts: BySample) -> TokenArray:
    """Return [M], also of no samples."""
    return np.concatenate([np.zeros(0, np.float32), *parts])


class Batch:
    """A rank's samples of an iteration as tensors, and where the response tokens of each lie among all M."""

    def __init__(self, shard: SampleShard, device: torch.device) -> None:
        self._shard = shard
        self._device = device
        self.kl_coef = shard.kl_coef
        self._first = np.cumsum([0, *shard.lengths.responses]).tolist()

    @property
    def tokens(self) -> int:
        return int(self._first[-1])

    def packed(self, picks: MicroBatch) -> Packed:
        chosen = [self._shard.own[i] for i in picks]
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
        return self._shard.lengths.sizes.size(picks)

    def lengths(self, picks: MicroBatch) -> Tensor:
        return torch.tensor(
            [self._shard.lengths.responses[i] for i in picks],
            dtype=torch.int64,
            device=self._device,
        )

    def engine_logprobs(self, picks: MicroBatch) -> Tensor:
        """Return [N] as the engine sampled them."""
        chosen = [self._shard.own[i] for i in picks]
        return torch.tensor(
            joined([s.logprobs[s.mask] for s in chosen]), device=self._device
        )

    def versions(self, picks: MicroBatch) -> Tensor:
        """Return [N] of the policies that sampled them."""
        chosen = [self._shard.own[i] for i in picks]
        versions = np.concatenate(
            [np.zeros(0, np.int32), *(s.versions[s.mask] for s in chosen)]
        )
        return torch.tensor(versions, device=self._device)

    def target(self, name: Target, picks: MicroBatch) -> Tensor:
        """Return [N] of a target that is known."""
        return torch.tensor(
            joined([self._shard.targets[name][i] for i in picks]), device=self._device
        )

    def places(self, picks: MicroBatch) -> Tensor:
        """Return [N] where their response tokens lie among all M."""
        pieces = [
            torch.arange(self._first[i], self._first[i + 1], device=self._device)
            for i in picks
        ]
        return torch.cat(
            [torch.empty(0, dtype=torch.int64, device=self._device), *pieces]
        )

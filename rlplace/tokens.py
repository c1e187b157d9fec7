"""Messages between text environments, generation engines and learners. They carry token ids instead of text.

Letters: P prompt tokens, N new tokens, L tokens of a whole episode.

::

    env ── Request: the conversation so far ──▶ rollout ── Completion: what the policy added ──▶ env
    env ── Sample: the whole episode, its loss mask and reward ──▶ actor, critic, reference, rewards
    critic, reference, rewards ── Scores: of each sample ──▶ actor ── Scores: the returns ──▶ critic
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

# Differences of rewards, relative to the larger one and to 1, that come from the rounding of sums in float64
ROUNDING = 1e-12
Tokens = NDArray[np.int32]
Array = NDArray[Any]
# Experts of tokens [tokens, routers, k]: int8, or int16 with more than 128 experts; -1: not known
Routes = NDArray[Any]
Finish = Literal["stop", "length"]
Files = Sequence[
    bytes
]  # images of a prompt, in the order of their tokens: bytes of PNG or JPEG files


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters of one request, in place of those of the config.

    `top_k`: 0: all tokens. `seed`: the answers follow from it and their numbers alone; None: as the config says.
    `stop_tokens`, `stop_texts`: end an answer, beside the model's own stop tokens. `ends`: whether the model's own stop
    tokens end an answer.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_tokens: tuple[int, ...] = ()
    stop_texts: tuple[str, ...] = ()
    ends: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """An env rank's request to a rollout rank: generate `samples` answers to the conversation in `tokens`.

    `group`: index of the prompt in the iteration, counted over all env ranks. The answers belong to the samples
    `first_sample` to `first_sample + samples - 1` of the group. `turn`: 0 for the first answer of an episode. `tokens`:
    [P], the whole conversation so far. `greedy`: whether to take the most probable token each time. `held_out`: whether
    the prompt is one for evaluation. `images`: the images for the image tokens of the prompt. `sampling`: how to draw;
    None: as the config says.
    """

    env_rank: int
    iteration: int
    group: int
    first_sample: int
    samples: int
    turn: int
    tokens: Tokens
    max_new_tokens: int
    greedy: bool = False
    held_out: bool = False
    images: Files = ()
    sampling: Sampling | None = None

    @property
    def weight(self) -> int:
        return self.samples


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A rollout rank's result: one finished answer, with its tokens and their log-probabilities.

    `env_rank`: the rank that has requested the answer. `held_out`: whether the prompt is one for evaluation. `group`:
    index of the prompt. `sample`: index of the answer among the answers to the prompt. `turn`: index of the turn in the
    conversation. `logprobs`: log-probability of each token under the distribution from which it was sampled.
    `versions`: policy version that sampled each token. `finish`: "stop": the answer ended by itself; "length": it was
    cut off. `routes`: the experts that a mixture of experts chose for each token that the engine has read: all P tokens
    of the request and all new tokens but the last one, with k experts in each of R layers; None: not recorded.
    """

    env_rank: int
    iteration: int
    held_out: bool
    group: int
    sample: int
    turn: int
    tokens: Tokens  # [N], with the stop token if the answer ended by one
    logprobs: NDArray[
        np.float32
    ]  # [N], of the distribution from which the tokens were sampled: see engines.contract.TextEngine
    versions: Tokens  # [N]
    finish: Finish
    routes: Routes | None = None  # [P + N - 1, R, k]


# Why an episode ended: its last answer was cut by a limit of tokens, the task ended it, or it had as many turns or
# tokens as the config allows
ENDS = ("cut_answer", "task", "max_turns", "sequence_length")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """An env rank's result: one whole episode of L tokens.

    `group`: index of the prompt. `sample`: index of the sample among the samples of the prompt. `tokens`: prompt,
    answers and the environment's texts between them. `mask`: true at the tokens that the policy sampled; at all others,
    `logprobs` is 0 and `versions` is -1. `reward`: weighted sum of `rewards`; nan if a number is not finite, so that
    learners leave the sample out. `rewards`: reward function -> its value. `turns`: count of answers in the episode.
    `truncated`: whether the last answer was cut off by a length limit. `ended`: one of ENDS, why there was no further
    answer; "" if a checkpoint of an older version does not tell it. `transcript`: the episode as text, for scorers that
    read text. `parts`: lengths of the conversations of the episode, whose tokens follow one another; empty: there is
    one. A model reads each conversation alone. `routes`: the experts that the engine chose for each token, with k
    experts in each of R layers; -1 where it read no such token; None: not recorded.
    """

    group: int
    sample: int
    tokens: Tokens  # [L]
    mask: NDArray[
        np.bool_
    ]  # [L], the loss mask: true at the tokens that the policy sampled
    logprobs: NDArray[np.float32]  # [L]
    versions: Tokens  # [L]
    # Weighted sum of all rewards of the episode; nan: a number is not finite, so learners leave the sample out
    reward: float
    rewards: Mapping[str, float]  # value of each reward function, by name
    turns: int
    truncated: bool  # the last answer was cut off by a length limit
    transcript: Any = (
        None  # the episode as text (envs.text.Transcript), for scorers that read text
    )
    images: Files = ()  # of the prompt
    ended: str = ""
    parts: tuple[int, ...] = ()
    routes: Routes | None = None  # [L, R, k]

    def __post_init__(self) -> None:
        lengths = {
            name: len(getattr(self, name))
            for name in ("tokens", "mask", "logprobs", "versions")
        }
        if len(set(lengths.values())) != 1:
            raise ValueError(
                f"sample {self.group}/{self.sample}: lengths differ: {lengths}"
            )
        if self.routes is not None and len(self.routes) != len(self.tokens):
            raise ValueError(
                f"sample {self.group}/{self.sample}: routes of {len(self.routes)} tokens are not {len(self.tokens)}"
            )
        if self.parts and sum(self.parts) != len(self.tokens):
            raise ValueError(
                f"sample {self.group}/{self.sample}: conversations of {self.parts} tokens are not {len(self.tokens)}"
            )
        if math.isinf(self.reward):
            raise ValueError(
                f"sample {self.group}/{self.sample}: reward is {self.reward}"
            )

    @property
    def poisoned(self) -> bool:
        return math.isnan(self.reward)

    def signal(self, name: str | None) -> float:
        """Return the number by which dynamic sampling compares this sample with the others of its group.

        `name`: a reward function or component, whose reward counts, 0 if it does not apply; None: the sum of all.
        """
        if name is None:
            return self.reward
        return self.rewards.get(name, 0.0)

    def without_text(self) -> Sample:
        return dataclasses.replace(self, transcript=None)

    def without_routes(self) -> Sample:
        return dataclasses.replace(self, routes=None)

    @property
    def weight(self) -> int:
        """The number of tokens: the weight of the sample in a channel's `get_batch`."""
        return len(self.tokens)

    @property
    def response_tokens(self) -> int:
        """The number of tokens that the policy sampled."""
        return int(self.mask.sum())

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens before the first token that the policy sampled.

        If the policy sampled no token, all tokens count.
        """
        if self.mask.any():
            return int(self.mask.argmax())
        return len(self.tokens)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Numbers about one sample: scores from a critic, a reference or a reward, or the returns for the critic.

    `group`: index of the prompt. `sample`: index of the sample among the samples of the prompt.

    `values` from a reward: [1], the reward; [0] if its function does not apply to the sample. Otherwise [N], a number
    for each token that the policy sampled: from a critic, the value of the state before the token; from a reference,
    the token's log-probability at the temperature of sampling; from the actor, the return from the token on.
    """

    group: int
    sample: int
    values: NDArray[np.float32]


@dataclasses.dataclass(slots=True)
class Conversation:
    """One conversation of an episode.

    `prompt`: the tokens before the first piece. `pieces`: what follows the prompt, in order: answers of the policy as
    Completion, texts of the environment as arrays of tokens. The texts of the environment are masked out of the loss.
    """

    prompt: Tokens
    pieces: list[Completion | Tokens] = dataclasses.field(default_factory=list)

    def tokens(self, most: int | None = None) -> Tokens:
        """Return the tokens of the prompt and of the first `most` pieces; None: of all pieces."""
        found = [self.prompt]
        for piece in self.pieces[:most]:
            found.append(piece.tokens if isinstance(piece, Completion) else piece)
        return np.concatenate(found)

    def routes(self) -> Routes | None:
        """Return the experts of all tokens, [tokens, R, k]; None if no answer has routes.

        A token that several answers follow was read for each of them. Its experts are those of the first of these
        passes, in which it was sampled or seen first. Nothing read the last token.
        """
        total = 0
        known: list[tuple[int, Routes]] = []
        # How many tokens each answer's routes reach
        for piece in (self.prompt, *self.pieces):
            if not isinstance(piece, Completion):
                total += len(piece)
                continue
            total += len(piece.tokens)
            if piece.routes is None:
                continue
            if len(piece.routes) != total - 1:
                raise ValueError(
                    f"routes of {len(piece.routes)} tokens are not those of the {total - 1} tokens that an engine reads"
                )
            known.append((total - 1, piece.routes))
        if not known:
            return None
        shape = known[0][1].shape[1:]
        found = np.full((total, *shape), -1, known[0][1].dtype)
        filled = 0
        for stop, routes in known:
            found[filled:stop] = routes[filled:]
            filled = stop
        return found


@dataclasses.dataclass(slots=True)
class Episode:
    """An episode in progress: sample `sample` of the prompt with index `group`.

    `conversations`: the first one begins with `prompt`. The others are begun by a program that starts a second
    conversation, or that goes on from an earlier answer. `answers`: all answers, in the order in which they were
    sampled. Each answer is in one conversation, so it is learned once; a conversation that goes on from an answer of
    another one has that answer in its prompt.
    """

    group: int
    sample: int
    prompt: Tokens
    images: Files = ()
    conversations: list[Conversation] = dataclasses.field(init=False)
    answers: list[Completion] = dataclasses.field(default_factory=list)
    # For each answer: its conversation, and the number of pieces up to the answer
    _places: list[tuple[Conversation, int]] = dataclasses.field(default_factory=list)
    # The conversation that the next answer belongs to
    _current: Conversation = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self._current = Conversation(self.prompt)
        self.conversations = [self._current]

    def answered(self, completion: Completion) -> None:
        """Add an answer, to the tokens of the last `asked`; the first answer is one to the prompt."""
        self._current.pieces.append(completion)
        self.answers.append(completion)
        self._places.append((self._current, len(self._current.pieces)))

    def after(self, answer: int | None, more: Tokens) -> tuple[Tokens, int]:
        """Return the tokens that the next answer follows, and the number of tokens of the episode with them.

        `answer`: number of the answer that `more` follows; None: `more` begins a conversation. Nothing is changed.
        """
        total = self.weight + len(more)
        if answer is None:
            return more, total
        conversation, pieces = self._places[answer]
        before = conversation.tokens(pieces)
        if pieces < len(conversation.pieces):
            total += len(before)
        return np.concatenate([before, more]), total

    def asked(self, answer: int | None, more: Tokens) -> None:
        """Add the tokens before the next answer. The arguments are those of `after`."""
        if answer is not None:
            conversation, pieces = self._places[answer]
            if pieces == len(conversation.pieces):
                conversation.pieces.append(more)
                self._current = conversation
                return
        tokens, _ = self.after(answer, more)
        self._current = Conversation(tokens)
        self.conversations.append(self._current)

    @property
    def context(self) -> Tokens:
        """All tokens that the next answer follows."""
        return self._current.tokens()

    @property
    def weight(self) -> int:
        """The number of tokens of all conversations."""
        return sum(len(each.tokens()) for each in self.conversations)

    def finish(
        self, rewards: Mapping[str, float], weights: Mapping[str, float]
    ) -> Sample:
        """Return the episode as a Sample, with the weighted sum of its rewards as reward.

        `rewards`: reward function -> its value. `weights`: reward function -> its factor in the sum. The reward is nan
        if a log-probability is not finite.
        """
        logprobs = self._along(lambda c: c.logprobs, 0.0, np.float32)
        # Exact, so that weights of 0.7, 0.2 and 0.1 give 1 for functions that all give 1
        reward = math.fsum(weights[name] * value for name, value in rewards.items())
        whole = [each.tokens() for each in self.conversations]
        parts: tuple[int, ...] = ()
        if len(whole) > 1:
            parts = tuple(map(len, whole))
        return Sample(
            group=self.group,
            sample=self.sample,
            tokens=np.concatenate(whole),
            mask=self._along(
                lambda c: np.ones(len(c.tokens), np.bool_), False, np.bool_
            ),
            logprobs=logprobs,
            versions=self._along(lambda c: c.versions, -1, np.int32),
            reward=reward if np.isfinite(logprobs).all() else math.nan,
            rewards=dict(rewards),
            turns=len(self.answers),
            truncated=bool(self.answers) and self.answers[-1].finish == "length",
            images=self.images,
            parts=parts,
            routes=self._routes(),
        )

    def _routes(self) -> Routes | None:
        """Return the experts of all tokens of the episode, [L, R, k]; None if no answer has routes."""
        each = [conversation.routes() for conversation in self.conversations]
        known = [routes for routes in each if routes is not None]
        if not known:
            return None
        shape = known[0].shape[1:]
        found = []
        for conversation, routes in zip(self.conversations, each, strict=True):
            if routes is None:
                length = len(conversation.tokens())
                routes = np.full((length, *shape), -1, known[0].dtype)
            found.append(routes)
        return np.concatenate(found)

    def _along(self, of: Any, otherwise: Any, dtype: Any) -> Array:
        """Return an array [L] with a value for each token of the episode.

        `of`: a function that returns the values for the tokens of an answer, from its Completion. `otherwise`: the
        value for all tokens that are not part of an answer. `dtype`: dtype of the array.
        """
        found: list[Array] = []
        for conversation in self.conversations:
            found.append(np.full(len(conversation.prompt), otherwise, dtype))
            for piece in conversation.pieces:
                if isinstance(piece, Completion):
                    found.append(of(piece))
                else:
                    found.append(np.full(len(piece), otherwise, dtype))
        return np.concatenate(found).astype(dtype, copy=False)


def rewards_differ(rewards: Sequence[float]) -> bool:
    """Return whether the rewards of a group differ by more than the rounding of sums.

    If several rewards are added, 0.1 + 0.2 and 0.3 count as equal. Without rewards the result is False.
    """
    if not rewards:
        return False
    high = max(rewards)
    low = min(rewards)
    return high - low > ROUNDING * max(1.0, abs(high), abs(low))


def by_group(samples: Sequence[Sample]) -> dict[int, list[Sample]]:
    """Return index of a prompt -> its samples. Prompts and samples are in ascending order of their indices."""
    groups: dict[int, list[Sample]] = {}
    for sample in sorted(samples, key=lambda s: (s.group, s.sample)):
        groups.setdefault(sample.group, []).append(sample)
    return groups

"""The episodes that an env rank has open at once: text for the task, tokens for the learner, grown side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rlplace.envs.text import TextEpisode, Transcript
from rlplace.models.conversation import Conversation
from rlplace.models.tokenizer import Tokenizer, Tokens
from rlplace.tokens import Completion, Episode, Request

Place = tuple[int, int]  # group, sample


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When an episode ends, whatever the environment says."""

    turns: int
    new_tokens: int  # of one answer
    tokens: int  # of the whole episode


@dataclasses.dataclass(slots=True)
class OpenEpisode:
    """One conversation in progress."""

    tokens: Episode
    dialogue: TextEpisode
    answers: list[str] = dataclasses.field(default_factory=list)
    replies: list[str] = dataclasses.field(default_factory=list)

    def transcript(self) -> Transcript:
        """Of the finished episode."""
        completions = [piece for piece in self.tokens.pieces if isinstance(piece, Completion)]
        return Transcript(
            prompt=self.dialogue.prompt,
            answers=tuple(self.answers),
            replies=tuple(self.replies),
            facts=self.dialogue.facts(),
            tokens=sum(len(completion.tokens) for completion in completions),
            truncated=completions[-1].finish == "length",
        )


class Dialogues:
    """Takes answers to episodes and says what is to be asked next. Owns what is open."""

    def __init__(
        self, tokenizer: Tokenizer, conversation: Conversation, limits: Limits, *, env_rank: int, iteration: int
    ) -> None:
        self._tokenizer, self._conversation, self._limits = tokenizer, conversation, limits
        self._env_rank, self._iteration = env_rank, iteration
        self.open: dict[Place, OpenEpisode] = {}

    def begin(self, group: int, prompt: Tokens, dialogues: Sequence[TextEpisode], *, greedy: bool) -> Request:
        """All samples of a group at once: the engine reads their prompt only once."""
        for sample, dialogue in enumerate(dialogues):
            tokens = Episode(group=group, sample=sample, prompt=prompt)
            self.open[group, sample] = OpenEpisode(tokens, dialogue)
        return self._request(group, 0, len(dialogues), 0, prompt, greedy)

    def take(self, completion: Completion, *, greedy: bool) -> Request | OpenEpisode:
        """The next turn, or the episode if that was its last answer, which is then no longer open.

        Raises KeyError for an answer that no open episode waits for.
        """
        place = (completion.group, completion.sample)
        episode = self.open[place]
        if completion.turn != len(episode.answers):
            raise KeyError(place)
        answer = self._tokenizer.decode(completion.tokens)
        episode.tokens.pieces.append(completion)
        episode.answers.append(answer)
        reply = episode.dialogue.reply(answer)
        # An answer that was cut has not said what it would; the environment takes it as it is, and that is the end.
        if reply is not None and completion.finish == "stop" and len(episode.answers) < self._limits.turns:
            more = self._conversation.reply(completion.tokens, reply)
            so_far = episode.tokens.tokens()
            if len(so_far) + len(more) < self._limits.tokens:
                episode.tokens.pieces.append(more)
                episode.replies.append(reply)
                tokens = episode.tokens.tokens()
                return self._request(*place, 1, completion.turn + 1, tokens, greedy)
        return self.open.pop(place)

    def _request(self, group: int, first: int, samples: int, turn: int, tokens: Tokens, greedy: bool) -> Request:
        return Request(
            env_rank=self._env_rank,
            iteration=self._iteration,
            group=group,
            first_sample=first,
            samples=samples,
            turn=turn,
            tokens=tokens,
            max_new_tokens=min(self._limits.new_tokens, self._limits.tokens - len(tokens)),
            greedy=greedy,
        )

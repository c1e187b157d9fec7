"""Shipped tasks: arithmetic, guessing a number, prompts of a data set, and games and puzzles of other libraries."""

from __future__ import annotations

import dataclasses
import operator
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from rlplace import codes
from rlplace.envs.registry import needs, unknown_choice
from rlplace.envs.text.contract import (
    Image,
    Message,
    MessagesWithTools,
    OneTurn,
    Split,
)
from rlplace.envs.text.right_answers import is_empty
from rlplace.envs.text.rows import ROW, bad_row, content_of, each, mixed
from rlplace.errors import Source, did_you_mean, suggestion
from rlplace.json_text import parsed

_SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
# One of this many problems is held out
_HELD_OUT = 10
# Most digits of a number in a problem or a guess; Python refuses to parse thousands of digits
_GUESS_DIGITS = 30
# Ending of textarena's games without wrappers: an observation has only the messages since the last one
_RAW = "-raw"
# Sender of textarena's own messages, and the kind of message that repeats the player's answer
_GAME = -1
_ECHO = "PLAYER_ACTION"
# reasoning-gym wants a size, but makes entries when they are asked for
_ENDLESS = 1 << 30
# reasoning-gym makes entry i from (first seed + i): held-out seeds begin where training never arrives
_HALF = 1 << 30
_ROLES = ("system", "user", "assistant")
# Keys of a message beside its content that chat templates of some models show
_NOT_SHOWN = (
    "reasoning_content",
    "reasoning",
    "thinking",
    "tool_calls",
    "function_call",
)
# Keys of a message by which data sets say whether an answer is learned: OpenAI, axolotl, ms-swift, verl
_LEARNED_KEYS = ("weight", "loss_mask", "loss", "train", "trainable")
# A list of messages that Python has written as a text
_PYTHON_MESSAGES = re.compile(r"\s*\[\s*\{\s*'(?:role|content)'\s*:")
# Name of the error about a row without this column, and about a null in this column
_LACKS = {"prompt": "lacks-prompt", "answer": "lacks-answer"}
_HAS_NULL = {"prompt": "null-prompt", "answer": "null-answer"}
# Column names of well-known data sets, to propose one that is probably meant
_MEANT = {
    "prompt": (
        "prompt",
        "question",
        "problem",
        "query",
        "instruction",
        "input",
        "messages",
    ),
    "answer": ("answer", "ground_truth", "solution", "label", "target", "output"),
}


class Arithmetic:
    """A task: sums, differences or products of two numbers. `digits`: digits of each number.

    The number of episodes is unlimited. A tenth of all problems is held out for evaluation: the same problems for all
    seeds.
    """

    rewards: ClassVar[Sequence[str]] = ("math_answer",)
    size: int | None = None

    def __init__(
        self,
        *,
        seed: int,
        split: Split,
        digits: int = 1,
        operations: Sequence[str] = ("+",),
        template: str = "What is {problem}? Answer with the number only.",
    ) -> None:
        # Check the arguments
        if not 1 <= digits <= _GUESS_DIGITS:
            raise ValueError(f"digits must be 1 to {_GUESS_DIGITS}, got {digits}")
        unknown = [sign for sign in operations if sign not in _SIGNS]
        if unknown or not operations:
            raise ValueError(
                f"operations are of {', '.join(_SIGNS)}, got {', '.join(unknown) or 'none'}"
            )
        if "{problem}" not in template:
            raise ValueError("template must have {problem} in it")
        self._seed = seed
        self._split = split
        self._low = 0 if digits == 1 else 10 ** (digits - 1)
        self._high = 10**digits - 1
        self._operations = tuple(operations)
        self._template = template

    def episode(self, number: int) -> OneTurn:
        """Return an episode with problem number `number`."""
        draw = random.Random(f"{self._seed}/{self._split}/{number}")
        left, sign, right = self._problem(draw)
        problem = f"{left} {sign} {right}"
        answer = str(_SIGNS[sign](left, right))
        return OneTurn(
            prompt=self._template.replace("{problem}", problem),
            known={"answer": answer},
        )

    def identity(self, number: int) -> str:
        """Return the prompt of an episode: episodes with equal prompts are equal."""
        return str(self.episode(number).prompt)

    def _problem(self, draw: random.Random) -> tuple[int, str, int]:
        """Return a random problem of this task's split: first number, sign, second number.

        Whether a problem is held out depends on the problem alone, not on the seed.
        """
        while True:
            left = draw.randint(self._low, self._high)
            right = draw.randint(self._low, self._high)
            sign = draw.choice(self._operations)
            held_out = random.Random(f"{left}{sign}{right}").randrange(_HELD_OUT) == 0
            if held_out == (self._split == "held_out"):
                return left, sign, right


class GuessNumber:
    """A task: guess a number from 1 to `highest` in `guesses` tries. After a wrong guess, the reply is higher or lower.

    `env.max_turns` has to be at least `guesses`.
    """

    rewards: ClassVar[Sequence[str]] = ("score",)
    size: int | None = None

    def __init__(
        self, *, seed: int, split: Split, highest: int = 15, guesses: int = 4
    ) -> None:
        if highest < 1 or guesses < 1:
            raise ValueError(
                f"highest and guesses must be at least 1, got {highest} and {guesses}"
            )
        self._name = f"{seed}/{split}"
        self._highest = highest
        self._guesses = guesses

    def episode(self, number: int) -> Guessing:
        """Return an episode. Its secret number is a random number that depends on `number`."""
        return Guessing(self._secret(number), self._highest, self._guesses)

    def identity(self, number: int) -> str:
        """Return the secret number of an episode as text: episodes with equal secrets are equal."""
        return str(self._secret(number))

    def _secret(self, number: int) -> int:
        return random.Random(f"{self._name}/{number}").randint(1, self._highest)


class Guessing:
    """An episode of GuessNumber, with one secret number.

    The score is 1 if the first guess is right, lower for each further guess, and 0 if no guess is right.
    """

    def __init__(self, secret: int, highest: int, guesses: int) -> None:
        self._secret = secret
        self._guesses = guesses
        self._used = 0
        self._found = False
        self.prompt = (
            f"I think of a number from 1 to {highest}. You have {guesses} guesses. "
            "After each I say whether mine is higher or lower. Answer with one number only."
        )

    def reply(self, answer: str) -> str | None:
        """Compare the last number in the answer with the secret number, and return the reply.

        Return None if the guess is right or was the last one.
        """
        self._used += 1
        numbers = re.findall(r"\d+", answer)
        guess = int(numbers[-1][:_GUESS_DIGITS]) if numbers else None
        self._found = guess == self._secret
        if self._found or self._used == self._guesses:
            return None
        if guess is None:
            return "That is no number. Answer with one number only."
        if guess < self._secret:
            return "Higher."
        return "Lower."

    def facts(self) -> Mapping[str, Any]:
        """Return name -> value for reward functions: the secret number, as `answer`, and the `score`."""
        score = 0.0
        if self._found:
            score = 1 - (self._used - 1) / (2 * self._guesses)
        return {"answer": str(self._secret), "score": score}


# ── tasks of libraries ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True, slots=True)
class WordedGame:
    """How a game of Gymnasium is played in words.

    `rules`: text about the rules. `moves`: a word for each action of the game, in order. `describe`: takes the
    environment and an observation, and returns a text about the observation.
    """

    rules: str
    moves: tuple[str, ...]
    describe: Callable[[Any, Any], str]


class ToyText:
    """A task: a game of Gymnasium, played in words. The score of an episode is the sum of the game's rewards.

    `options`: arguments of the game.
    """

    rewards: ClassVar[Sequence[str]] = ("score",)
    # Games draw from the module `random`, so their replies must not be made at the same time
    replies_alone = True
    size: int | None = None

    def __init__(
        self,
        *,
        seed: int,
        split: Split,
        game: str,
        options: Mapping[str, object] | None = None,
    ) -> None:
        if game not in _GAMES:
            raise unknown_choice(
                "game", game, _GAMES, why="games with words: " + ", ".join(_GAMES)
            )
        self._name = f"{seed}/{split}"
        self._id = game
        self._game = _GAMES[game]
        self._options: dict[str, Any] = dict(options or {})
        # Environments without an episode: some are slow to make. The first one also checks the arguments
        self._idle = [self._make()]

    def episode(self, number: int) -> ToyTextGame:
        """Return a new game. Its seed is a random number that depends on `number`."""
        seed = random.Random(f"{self._name}/{number}").getrandbits(31)
        env = self._idle.pop() if self._idle else self._make()
        return ToyTextGame(self._game, env, seed, self._idle)

    def _make(self) -> Any:
        """Return a new environment of the game. Raises ConfigError if that is not possible."""
        with needs("gymnasium", got=self._id, extra="envs"):
            import gymnasium
        if self._id not in gymnasium.registry:
            here = [game for game in _GAMES if game in gymnasium.registry]
            stem = self._id.partition("-v")[0]
            same = next((game for game in here if game.startswith(stem)), None)
            why = f"Gymnasium {gymnasium.__version__} has no such version"
            raise unknown_choice("game", self._id, here, why=why, example=same)
        return gymnasium.make(self._id, disable_env_checker=True, **self._options)


class ToyTextGame:
    """An episode of ToyText: one game in progress. An answer that does not name a move costs a turn.

    At the end of the episode, its environment is added to `idle`, the list of environments that a new episode may take.
    """

    def __init__(self, game: WordedGame, env: Any, seed: int, idle: list[Any]) -> None:
        self._game = game
        self._env = env
        self._idle = idle
        self._score = 0.0
        observation, _ = env.reset(seed=seed)
        moves = ", ".join(game.moves)
        self.prompt = f"{game.rules}\nAnswer with one word: {moves}.\n\n{self._described(observation)}"

    def _described(self, observation: Any) -> str:
        """Return a text about an observation of the game."""
        return self._game.describe(self._env.unwrapped, observation)

    def reply(self, answer: str) -> str | None:
        """Make the last move that the answer names, and return a text about the game; None if the game is over."""
        # The last word that is a move counts
        words = re.findall(r"[a-z]+", answer.lower())
        named = [word for word in words if word in self._game.moves]
        if not named:
            moves = ", ".join(self._game.moves)
            return f"That is no move. Answer with one word: {moves}."
        move = self._game.moves.index(named[-1])
        observation, reward, terminated, truncated, _ = self._env.step(move)
        self._score += float(reward)
        if terminated or truncated:
            return None
        return self._described(observation)

    def facts(self) -> Mapping[str, Any]:
        """Return {"score": score of the game} for reward functions; make its environment free for another episode."""
        if self._env is not None:
            self._idle.append(self._env)
            self._env = None
        return {"score": self._score}


def _frozen_lake(env: Any, observation: Any) -> str:
    """Return the map of the lake as text, with P where the player is."""
    place = int(observation)
    width = env.ncol
    cells = [cell.decode() for cell in env.desc.ravel()]
    cells[place] = "P"
    rows = []
    for first in range(0, len(cells), width):
        rows.append("".join(cells[first : first + width]))
    return "\n".join(rows)


def _taxi(env: Any, observation: Any) -> str:
    """Return a text about the map, the taxi, the passenger and the destination."""
    row, column, passenger, destination = env.decode(int(observation))
    places = env.locs
    # The number behind the last place means that the passenger is in the taxi
    waiting = "in your taxi"
    if passenger < len(places):
        waiting = f"at row {places[passenger][0]}, column {places[passenger][1]}"
    where = places[destination]
    walls = "\n".join("".join(cell.decode() for cell in line) for line in env.desc)
    return (
        f"{walls}\nYou are at row {row}, column {column}. The passenger is {waiting} "
        f"and wants to go to row {where[0]}, column {where[1]}."
    )


def _blackjack(env: Any, observation: Any) -> str:
    """Return a text about the player's sum and the dealer's card."""
    own, dealer, ace = observation
    soft = " with an ace that counts 11" if ace else ""
    return f"You have {own}{soft}. The dealer shows {dealer}."


_TAXI = WordedGame(
    "You drive a taxi: fetch the passenger, bring them where they want to go, and let them out there.",
    ("south", "north", "east", "west", "pickup", "dropoff"),
    _taxi,
)
_GAMES: Mapping[str, WordedGame] = {
    "FrozenLake-v1": WordedGame(
        "You are P on a frozen lake of F (ice), H (hole) and G (goal). Reach G; a hole ends the game.",
        ("left", "down", "right", "up"),
        _frozen_lake,
    ),
    "Taxi-v4": _TAXI,
    # Its name in older versions of Gymnasium
    "Taxi-v3": _TAXI,
    "Blackjack-v1": WordedGame(
        "You play blackjack against a dealer: come nearer to 21 than they do, and not above it.",
        ("stick", "hit"),
        _blackjack,
    ),
}


class TextArena:
    """A task: a game of the library textarena for one player. The score of an episode is the player's reward.

    `options`: arguments of the game. The number of episodes is unlimited. If the game does not understand a move, the
    player may try once more; a second such move ends the game.
    """

    rewards: ClassVar[Sequence[str]] = ("score",)
    size: int | None = None

    def __init__(
        self,
        *,
        seed: int,
        split: Split,
        game: str,
        options: Mapping[str, object] | None = None,
    ) -> None:
        with needs("textarena", got=f"text_arena, for {game}", extra="text-arena"):
            import textarena
        self._library: Any = textarena
        self._name = f"{seed}/{split}"
        self._id = game.removesuffix(_RAW) + _RAW
        self._options: dict[str, Any] = dict(options or {})
        known = self._library.envs.registration.ENV_REGISTRY
        if self._id not in known:
            games = [name.removesuffix(_RAW) for name in known if name.endswith(_RAW)]
            raise unknown_choice(
                "game",
                game,
                games,
                why=f"it is none of the {len(games)} games of textarena",
            )
        try:
            # The first episode shows wrong arguments, a wrong number of players and missing word lists
            self.episode(0)
        except LookupError as error:
            # A subclass of LookupError is a bug of the game
            if type(error) is not LookupError:
                raise
            download = "python -m nltk.downloader words averaged_perceptron_tagger_eng"
            raise codes.config_error(
                "missing-library",
                "env.kwargs.game",
                game,
                error="word-lists",
                download=download,
            ) from error
        except AssertionError as error:  # the library's check of the number of players
            raise ValueError(f"{game} is no game for one: {error}") from error

    def episode(self, number: int) -> TextArenaGame:
        """Return a new game. Its seed is a random number that depends on `number`."""
        seed = random.Random(f"{self._name}/{number}").getrandbits(31)
        return TextArenaGame(self._library.make(self._id, **self._options), seed)


class TextArenaGame:
    """An episode of TextArena: one game in progress.

    The library draws from Python's module `random`, so each game keeps a state of random numbers of its own.
    """

    def __init__(self, game: Any, seed: int) -> None:
        self._game = game
        self._random: tuple[Any, ...] = random.Random(seed).getstate()
        self._score = 0.0
        with self._own_random():
            game.reset(num_players=1, seed=seed)
        self.prompt = self._news()

    def reply(self, answer: str) -> str | None:
        """Make the move `answer`, and return the game's new messages; None if the game is over."""
        with self._own_random():
            done, _ = self._game.step(answer)
        if not done:
            return self._news()
        rewards, _ = self._game.close()
        self._score = float(rewards[0])
        return None

    def facts(self) -> Mapping[str, Any]:
        """Return {"score": score of the game} for reward functions."""
        return {"score": self._score}

    def _news(self) -> str:
        """Return the game's messages since the last call. The repeated answer of the player is left out."""
        _, messages = self._game.get_observation()
        return "\n".join(
            text.strip()
            for sender, text, kind in messages
            if sender == _GAME and kind.name != _ECHO
        )

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """Within the `with` statement, give the module `random` the state of this game; then restore its old state."""
        outside = random.getstate()
        random.setstate(self._random)
        try:
            yield
        finally:
            self._random = random.getstate()
            random.setstate(outside)


class ReasoningGym:
    """A task: the entries of one dataset of the library reasoning-gym. `options`: arguments of the dataset."""

    rewards: ClassVar[Sequence[str]] = ("reasoning_score",)
    size: int | None = None

    def __init__(
        self,
        *,
        seed: int,
        split: Split,
        dataset: str,
        options: Mapping[str, object] | None = None,
    ) -> None:
        with needs("reasoning_gym", got=f"reasoning_gym, for {dataset}", extra="text"):
            from reasoning_gym import factory
        if dataset not in factory.DATASETS:
            why = f"it is none of the {len(factory.DATASETS)} datasets of reasoning_gym"
            raise unknown_choice(
                "dataset", dataset, factory.DATASETS, why=why, example="chain_sum"
            )
        first = random.Random(seed).getrandbits(29)
        if split == "held_out":
            first += _HALF
        try:
            self._made = factory.create_dataset(
                dataset, seed=first, size=_ENDLESS, **(options or {})
            )
        except AssertionError as error:  # the library's check of arguments
            raise ValueError(f"{dataset} refuses options: {error}") from error

    def episode(self, number: int) -> OneTurn:
        """Return an episode with entry number `number` of the dataset."""
        entry = self._made[number]
        return OneTurn(
            prompt=entry["question"],
            known={"answer": str(entry["answer"]), "entry": entry},
        )

    def identity(self, number: int) -> str:
        """Return the prompt of an episode: episodes with equal prompts are equal."""
        return str(self._made[number]["question"])


# ── prompts of a data set ────────────────────────────────────────────────────────────────────────────────────────────


class PromptSet:
    """A task with the prompts of one or several data sets: each row is an episode.

    Column `prompt` is a text, or messages with role and content, perhaps as a JSON text. Supervised fine-tuning does
    not learn a message of the assistant whose `weight`, `loss_mask`, `loss`, `train` or `trainable` is 0 or false.
    Column `answer` is the right answer, which reward functions compare with the policy's answer, or a list of answers
    that are each right. Column `image` is for models that read images: a path relative to the folder of the data set,
    a mapping with the `bytes` of a PNG or JPEG, or a list of paths and mappings. Images take the places of message
    parts {"type": "image"}; if there are no such parts, images come before the text of the user.

    Column `tools` has the tools that the model may call: a list of their definitions, or this list as a JSON text. The
    chat template shows them. A column with anything else, or `tools=None`, is a fact only.

    A dot names a column within another column: `reward_model.ground_truth`. All other columns are given to reward
    functions, as facts under their own names. `rows` selects a range of rows, (first, last + 1), such as the part to
    hold out. Relative paths start at the folder in which the run was started.

    Several data sets are a list of paths, or a mapping from path to weight. A weight is the number of times that each
    row comes in an epoch: {a.jsonl: 1, b.jsonl: 0.5}. With 0.5, an epoch has half of the rows, and the next epoch has
    the other half. With several data sets, each row has the fact `data_set`: the
    name of its file, preceded by names of folders if two files have the same name.
    """

    rewards: ClassVar[Sequence[str]] = ("math_answer",)

    def __init__(
        self,
        *,
        seed: int,
        split: Split,
        path: str | Sequence[str] | Mapping[str, float],
        prompt: str = "prompt",
        answer: str | None = "answer",
        image: str | None = None,
        tools: str | None = "tools",
        rows: tuple[int, int] | None = None,
        dataset_split: str | None = None,
    ) -> None:
        self._tools = tools
        self._prompt = prompt
        self._answer = answer
        self._image = image
        # Every row once; `shares` says how often an epoch asks the rows of each data set
        self._rows, self.shares = mixed(path, rows, dataset_split)
        size = len(self._rows)
        self.size: int | None = size
        # Says which rows these are: prompts with equal content are equal
        chosen = [prompt, image, tools, rows, dataset_split]
        self.content = f"{content_of(path)}\n{chosen!r}"
        # Find bad rows now, before anything starts
        each(range(size), lambda number: self._check(*self._rows[number]))

    def episode(self, number: int) -> OneTurn:
        """Return an episode with the prompt in row number `number`."""
        values, place = self._rows[number]
        facts = {
            name: value
            for name, value in values.items()
            if name not in (self._prompt, self._image)
        }
        if self._answer is not None:
            facts["answer"] = _column(values, self._answer)
        return OneTurn(prompt=self._asked(values, place), known=facts)

    def place(self, number: int) -> Source:
        """Return the file and line of row number `number`."""
        return self._rows[number][1]

    def _asked(self, values: Mapping[str, Any], place: Source) -> Any:
        """Return the prompt of a row; None if the value in the prompt column is not a prompt.

        `values`: column -> value. `place`: file and line of the row, for errors. Raises ConfigError for images that
        cannot be found.
        """
        prompt = _column(values, self._prompt)
        given = None if self._image is None else _column(values, self._image)
        if given is None:
            listed = []
        elif isinstance(given, list):
            listed = given
        else:
            listed = [given]
        images = [_as_image(each, place) for each in listed]
        asked = _as_prompt(prompt, images, place)
        tools = None if self._tools is None else _as_tools(_column(values, self._tools))
        # A text may be a rendered chat, which has its tools already
        if tools is None or asked is None or isinstance(asked, str):
            return asked
        return MessagesWithTools.of(asked, tools)

    def _check(self, values: Mapping[str, Any], place: Source) -> None:
        """Raise ConfigError if a column of the row is missing, null or without a right answer, or holds no prompt.

        `values`: column -> value. `place`: file and line of the row, for the error.
        """
        for key, column in (("prompt", self._prompt), ("answer", self._answer)):
            if column is None:
                continue
            value = _column(values, column)
            # Some libraries write nan for a missing value; nan differs from itself
            if value is None or value != value:
                # Propose a similar name, or one that other data sets use
                names = _columns(values)
                usual = [n for n in names if n.rpartition(".")[2] in _MEANT[key]]
                near = did_you_mean(column, names)
                if not near and usual:
                    near = usual[0]
                error = _LACKS[key]
                if column in names:
                    error = _HAS_NULL[key]
                raise bad_row(
                    error,
                    "columns: " + ", ".join(names),
                    place,
                    column=column,
                    hint=suggestion(near),
                    value="null" if value is None else value,
                    near=near or "<column>",
                )
            if key == "answer" and is_empty(value):
                raise bad_row("empty-answer", repr(value), place, column=column)
        if self._asked(values, place) is None:
            got = repr(_column(values, self._prompt))
            raise bad_row(
                "no-prompt", got, place, column=self._prompt, roles=", ".join(_ROLES)
            )


def _column(values: Mapping[str, Any], name: str) -> Any:
    """Return the value of the column `name`; None if there is no such column.

    `outer.inner` names a column within another column.
    """
    if name in values or "." not in name:
        return values.get(name)
    outer, _, inner = name.partition(".")
    within = values.get(outer)
    if isinstance(within, Mapping):
        return _column(within, inner)
    return None


def _columns(values: Mapping[str, Any]) -> list[str]:
    """Return the names of all columns. A column within another column is named `outer.inner`."""
    names = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            names += [f"{name}.{inner}" for inner in _columns(value)]
        else:
            names.append(name)
    return names


def _as_prompt(value: Any, images: Sequence[Image], place: Source) -> Any:
    """Return the value of a prompt column as a prompt that includes `images`; None if it is not a prompt.

    Raises ConfigError if images and image parts of the messages do not match. `place`: file and line of the row.
    """
    if isinstance(value, str):
        if _PYTHON_MESSAGES.match(value):
            raise bad_row("python-messages", value, place)
        value = _messages_in(value)
    if isinstance(value, str):
        if images:
            return [Message("user", (*images, value))]
        return value
    if not isinstance(value, Sequence) or not value:
        return None
    # Messages; images take the places of image parts
    messages = list[Message]()
    left = list(images)
    for message in value:
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            return None
        for key in _NOT_SHOWN:
            if message.get(key):
                raise bad_row("message-key", repr(message[key]), place, name=key)
        content = message.get("content")
        if isinstance(content, list):
            content = tuple(_as_part(part, left, place) for part in content)
        if not isinstance(content, str | tuple):
            return None
        learned = _is_learned(message, place)
        messages.append(Message(message["role"], content, is_learned=learned))
    # No message has image parts: all images come before the first text of the user
    if left and len(left) == len(images):
        of_user = [at for at, message in enumerate(messages) if message.role == "user"]
        at = of_user[0] if of_user else None
        if at is not None and isinstance(messages[at].content, str):
            messages[at] = Message("user", (*left, messages[at].text))
            left = []
    if left:
        got = f"{len(left)} of {len(images)} are left"
        raise bad_row("images-left", got, place)
    return messages


def _messages_in(text: str) -> Any:
    """Return the list of messages in a JSON text; the text itself if it is anything else."""
    if not text.lstrip().startswith("[") or '"role"' not in text:
        return text
    try:
        found = parsed(text)
    except ValueError:
        return text
    if not isinstance(found, list) or not found:
        return text
    are_messages = [
        isinstance(each, dict) and "role" in each and "content" in each
        for each in found
    ]
    return found if all(are_messages) else text


def _is_learned(message: Mapping[str, Any], place: Source) -> bool:
    """Return whether an answer is learned from, as its message says. Raises ConfigError for a weight between 0 and 1.

    `place`: file and line of the row.
    """
    if message["role"] != "assistant":
        return True
    for key in _LEARNED_KEYS:
        value = message.get(key)
        if value is None:
            continue
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise bad_row("message-weight", f"{key}: {value!r}", place, name=key)
        if not value:
            return False
    return True


def _as_tools(value: Any) -> Sequence[Mapping[str, Any]] | None:
    """Return the definitions of tools in a column; None if it has none, or something else.

    A definition is a mapping with a `name` and with `parameters` or a `description`, or has such a mapping as its
    `function`. Values of None are left out: Parquet adds them for keys that only other rows have.
    """
    if isinstance(value, str):
        try:
            value = parsed(value)
        except ValueError:
            return None
    if not isinstance(value, list) or not value:
        return None
    tools = [_without_none(tool) for tool in value]
    return tools if all(map(_is_tool, tools)) else None


def _is_tool(tool: Any) -> bool:
    if not isinstance(tool, Mapping):
        return False
    defined = tool.get("function", tool)
    if not isinstance(defined, Mapping) or not isinstance(defined.get("name"), str):
        return False
    return "parameters" in defined or "description" in defined


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _without_none(each) for key, each in value.items() if each is not None
        }
    if isinstance(value, list):
        return [_without_none(each) for each in value]
    return value


def _as_part(part: Any, left: list[Image], place: Source) -> str | Image:
    """Return a part of a message: a text or an image. Raises ConfigError for an image that cannot be found.

    An image part without a file is replaced by the first image in `left`, which is removed from `left`.
    """
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind == "image" and part.get("image") is not None:
        return _as_image(part["image"], place)
    if kind == "image" and left:
        return left.pop(0)
    error = "part"
    if kind == "image":
        error = "no-image-for-part"
    raise bad_row(error, repr(part), place)


def _as_image(value: Any, place: Source) -> Image:
    """Return an image of a data set. Raises ConfigError if the file does not exist.

    `value`: a path relative to the data set's folder, bytes, or a mapping with bytes or a path. `place`: file and line
    of the row.
    """
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return Image(value)
    found = Path(place.file.removesuffix(ROW))
    file = (found if found.is_dir() else found.parent) / str(value)
    if not isinstance(value, str) or not file.is_file():
        error = "no-image"
        if isinstance(value, str):
            error = "image-path"
        raise bad_row(error, repr(value), place, folder=file.parent)
    return Image(str(file.absolute()))

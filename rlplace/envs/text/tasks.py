"""Shipped tasks: arithmetic, a number to be guessed, prompts of a data set; games and puzzles of other libraries."""

from __future__ import annotations

import dataclasses
import operator
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from rlplace.envs.registry import needs, unknown_choice
from rlplace.envs.text.contract import Image, Message, OneTurn, Split
from rlplace.envs.text.rows import ROW, bad_row, each, mixed
from rlplace.errors import ConfigError, Source, did_you_mean, suggestion

_SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_HELD_OUT = 10  # one problem in so many is never trained on
_GUESS_DIGITS = 30  # of a problem, and of a guess that are read; Python refuses to read thousands of them
_RAW = "-raw"  # without wrappers: each observation holds only the messages since the last one
_GAME = -1  # sender of the game's own messages
_ECHO = "PLAYER_ACTION"  # kind of a message that repeats the player's own answer
_ENDLESS = 1 << 30  # reasoning-gym wants a size; an entry is made when it is asked for
# Entry i is made from first seed + i: held-out ones begin where training never comes
_HALF = 1 << 30
_ROLES = ("system", "user", "assistant")
_MEANT = {  # columns of well-known data sets
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
    """Sums, differences or products of numbers of `digits` digits. Endless; every tenth is held out for all seeds."""

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
        left, sign, right = self._problem(
            random.Random(f"{self._seed}/{self._split}/{number}")
        )
        problem = f"{left} {sign} {right}"
        answer = str(_SIGNS[sign](left, right))
        return OneTurn(
            prompt=self._template.replace("{problem}", problem),
            known={"answer": answer},
        )

    def _problem(self, draw: random.Random) -> tuple[int, str, int]:
        """Draw until the problem belongs to the split; its split follows from the problem alone."""
        while True:
            left = draw.randint(self._low, self._high)
            right = draw.randint(self._low, self._high)
            sign = draw.choice(self._operations)
            held_out = random.Random(f"{left}{sign}{right}").randrange(_HELD_OUT) == 0
            if held_out == (self._split == "held_out"):
                return left, sign, right


class GuessNumber:
    """Guess 1..`highest` in `guesses` tries, each told higher or lower; `env.max_turns`: at least `guesses`."""

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
        secret = random.Random(f"{self._name}/{number}").randint(1, self._highest)
        return Guessing(secret, self._highest, self._guesses)


class Guessing:
    """One secret. Its score is 1 if it was found, and then a little less for every guess but the first."""

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
        left = 1 - (self._used - 1) / (2 * self._guesses)
        return {"answer": str(self._secret), "score": left if self._found else 0.0}


# ── tasks of libraries ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True, slots=True)
class WordedGame:
    """One of Gymnasium's games in words: rules to begin with, names of moves, descriptions of observations."""

    rules: str
    moves: tuple[str, ...]
    describe: Callable[[Any, Any], str]  # (the environment, its observation)


class ToyText:
    """`game` with arguments of its own in `options`; an episode's score is the sum of the game's rewards."""

    rewards: ClassVar[Sequence[str]] = ("score",)
    replies_alone = True  # games share the module `random`
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
        # To make some is slow; arguments that it does not take are refused here
        self._idle = [self._make()]

    def episode(self, number: int) -> ToyTextGame:
        seed = random.Random(f"{self._name}/{number}").getrandbits(31)
        return ToyTextGame(
            self._game,
            self._idle.pop() if self._idle else self._make(),
            seed,
            self._idle,
        )

    def _make(self) -> Any:
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
    """One game in progress, in an environment that goes back to `idle`. A word that is no move costs a turn only."""

    def __init__(self, game: WordedGame, env: Any, seed: int, idle: list[Any]) -> None:
        self._game = game
        self._env = env
        self._idle = idle
        self._score = 0.0
        observation, _ = env.reset(seed=seed)
        moves = ", ".join(game.moves)
        self.prompt = f"{game.rules}\nAnswer with one word: {moves}.\n\n{self._described(observation)}"

    def _described(self, observation: Any) -> str:
        return self._game.describe(self._env.unwrapped, observation)

    def reply(self, answer: str) -> str | None:
        named = [
            word
            for word in re.findall(r"[a-z]+", answer.lower())
            if word in self._game.moves
        ]
        if not named:
            return (
                "That is no move. Answer with one word: "
                + ", ".join(self._game.moves)
                + "."
            )
        observation, reward, terminated, truncated, _ = self._env.step(
            self._game.moves.index(named[-1])
        )
        self._score += float(reward)
        if terminated or truncated:
            return None
        return self._described(observation)

    def facts(self) -> Mapping[str, Any]:
        if self._env is not None:
            self._idle.append(self._env)  # for an episode to come: this one is over
            self._env = None
        return {"score": self._score}


def _frozen_lake(env: Any, observation: Any) -> str:
    place = int(observation)
    width = env.ncol
    cells = [cell.decode() for cell in env.desc.ravel()]
    cells[place] = "P"
    return "\n".join(
        "".join(cells[row : row + width]) for row in range(0, len(cells), width)
    )


def _taxi(env: Any, observation: Any) -> str:
    row, column, passenger, destination = env.decode(int(observation))
    places = env.locs
    waiting = (
        "in your taxi"
        if passenger == len(places)
        else f"at row {places[passenger][0]}, column {places[passenger][1]}"
    )
    where = places[destination]
    walls = "\n".join("".join(cell.decode() for cell in line) for line in env.desc)
    return (
        f"{walls}\nYou are at row {row}, column {column}. The passenger is {waiting} "
        f"and wants to go to row {where[0]}, column {where[1]}."
    )


def _blackjack(env: Any, observation: Any) -> str:
    own, dealer, ace = observation
    return f"You have {own}{' with an ace that counts 11' if ace else ''}. The dealer shows {dealer}."


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
    "Taxi-v3": _TAXI,  # its name in older versions of Gymnasium
    "Blackjack-v1": WordedGame(
        "You play blackjack against a dealer: come nearer to 21 than they do, and not above it.",
        ("stick", "hit"),
        _blackjack,
    ),
}


class TextArena:
    """`game` with arguments of its own in `options`; an episode's score is the game's reward of its only player.

    An endless task. A move that the game does not understand may be made again once; then the game is over.
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
        self._name, self._id = f"{seed}/{split}", game.removesuffix(_RAW) + _RAW
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
            self.episode(0)  # finds wrong arguments and missing players and word lists
        except LookupError as error:
            if type(error) is not LookupError:  # a mistake of the game's own
                raise
            what = "the game needs word lists that are not on this machine"
            why = "it takes them from nltk, which fetches them from the internet and stores them in ~/nltk_data"
            download = "python -m nltk.downloader words averaged_perceptron_tagger_eng"
            fix = f"{download}        (or a game without: FrozenLake-v0)"
            raise ConfigError.of(
                "missing-library", "env.kwargs.game", what, game, why, fix
            ) from error
        except AssertionError as error:  # how the library counts players
            raise ValueError(f"{game} is no game for one: {error}") from error

    def episode(self, number: int) -> TextArenaGame:
        seed = random.Random(f"{self._name}/{number}").getrandbits(31)
        return TextArenaGame(self._library.make(self._id, **self._options), seed)


class TextArenaGame:
    """One game in progress. Owns the random state of the game, which the library keeps in the module `random`."""

    def __init__(self, game: Any, seed: int) -> None:
        self._game = game
        self._random: tuple[Any, ...] = random.Random(seed).getstate()
        self._score = 0.0
        with self._own_random():
            game.reset(num_players=1, seed=seed)
        self.prompt = self._news()

    def reply(self, answer: str) -> str | None:
        with self._own_random():
            done, _ = self._game.step(answer)
        if not done:
            return self._news()
        rewards, _ = self._game.close()
        self._score = float(rewards[0])
        return None

    def facts(self) -> Mapping[str, Any]:
        return {"score": self._score}

    def _news(self) -> str:
        """Return the game's messages since the last call, without the echo of the player's own answer."""
        _, messages = self._game.get_observation()
        return "\n".join(
            text.strip()
            for sender, text, kind in messages
            if sender == _GAME and kind.name != _ECHO
        )

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """Restore this game's state of the process's generator, from which all games draw."""
        outside = random.getstate()
        random.setstate(self._random)
        try:
            yield
        finally:
            self._random = random.getstate()
            random.setstate(outside)


class ReasoningGym:
    """One dataset of the library by its name, with its own arguments in `options`."""

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
            known = (
                f"it is none of the {len(factory.DATASETS)} datasets of reasoning_gym"
            )
            raise unknown_choice(
                "dataset", dataset, factory.DATASETS, why=known, example="chain_sum"
            )
        first = random.Random(seed).getrandbits(29) + (
            _HALF if split == "held_out" else 0
        )
        try:
            self._made = factory.create_dataset(
                dataset, seed=first, size=_ENDLESS, **(options or {})
            )
        except AssertionError as error:  # how the library checks its arguments
            raise ValueError(f"{dataset} refuses options: {error}") from error

    def episode(self, number: int) -> OneTurn:
        entry = self._made[number]
        return OneTurn(
            prompt=entry["question"],
            known={"answer": str(entry["answer"]), "entry": entry},
        )


# ── prompts of a data set ────────────────────────────────────────────────────────────────────────────────────────────


class PromptSet:
    """Rows of a data set; one row is one episode.

    Column `prompt` is asked (a text, or messages with role and content), `answer` is what verifiers compare with.

    Column `image` has what a model sees: a path from the folder of the data set, a map with the `bytes` of a PNG or
    JPEG, or a list of these. They stand where messages have parts {"type": "image"}, else before the text of the user.

    A column within another is named with a dot, `reward_model.ground_truth`. All other columns are facts too, by their
    names. `rows` takes a part, first to before last, such as the part that is
    held out. Relative paths count from where the run was started. Several data sets are a list of paths, or their paths
    with how often each row is asked in an epoch: {a.jsonl: 1, b.jsonl: 0.5}; rows have the name of the file, with its
    folder where two are alike, as the fact `data_set`.
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
        rows: tuple[int, int] | None = None,
        dataset_split: str | None = None,
    ) -> None:
        self._prompt = prompt
        self._answer = answer
        self._image = image
        self._rows = mixed(path, rows, dataset_split, seed)
        self.size: int | None = len(self._rows)
        each(self._rows, lambda row: self._check(*row))

    def episode(self, number: int) -> OneTurn:
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
        """Return where the row of an episode is written."""
        return self._rows[number][1]

    def _asked(self, values: Mapping[str, Any], place: Source) -> Any:
        """Return the row's Prompt; None where it is none. Raises ConfigError for images that are not there."""
        prompt = _column(values, self._prompt)
        given = None if self._image is None else _column(values, self._image)
        listed = given if isinstance(given, list) else [] if given is None else [given]
        images = [_as_image(each, place) for each in listed]
        return _as_prompt(prompt, images, place)

    def _check(self, values: Mapping[str, Any], place: Source) -> None:
        """Raise ConfigError with the row's place: a bad row is found before anything starts."""
        for key, column in (("prompt", self._prompt), ("answer", self._answer)):
            if column is None:
                continue
            value = _column(values, column)
            # Nan is how some libraries write that there is none
            if value is None or value != value:
                names = _columns(values)
                near = did_you_mean(column, names) or next(
                    (n for n in names if n.rpartition(".")[2] in _MEANT[key]), None
                )
                what = f"a row has no {column!r}" + suggestion(near)
                if column in names:
                    what = f"a row's {column!r} is {'null' if value is None else value}"
                why = "every row needs the columns that are asked and compared"
                remark = "        (answer: null where nothing is compared)" * (
                    key == "answer"
                )
                fix = f"env.kwargs.{key}={near or '<column>'}{remark}"
                raise bad_row(what, "columns: " + ", ".join(names), place, why, fix)
        if self._asked(values, place) is None:
            got = repr(_column(values, self._prompt))
            why = f"a prompt is a text, or a list of messages with a role ({', '.join(_ROLES)}) and a content"
            fix = f"kwargs: {{prompt: <a column other than {self._prompt}>}}"
            raise bad_row(f"{self._prompt!r} is no prompt", got, place, why, fix)


def _column(values: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, or of one within another, `outer.inner`; None where there is none."""
    if name in values or "." not in name:
        return values.get(name)
    outer, _, inner = name.partition(".")
    within = values.get(outer)
    if isinstance(within, Mapping):
        return _column(within, inner)
    return None


def _columns(values: Mapping[str, Any]) -> list[str]:
    """Return the names of all columns, and of those within others."""
    return [
        f"{name}{inner}"
        for name, value in values.items()
        for inner in (
            [f".{n}" for n in _columns(value)]
            if isinstance(value, Mapping) and value
            else [""]
        )
    ]


def _as_prompt(value: Any, images: Sequence[Image], place: Source) -> Any:
    """Return the value as a Prompt; None where it is none."""
    if isinstance(value, str):
        if images:
            return [Message("user", (*images, value))]
        return value
    if not isinstance(value, Sequence) or not value:
        return None
    messages = list[Message]()
    left = list(images)
    for message in value:
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            return None
        content = message.get("content")
        if isinstance(content, list):
            content = tuple(_as_part(part, left, place) for part in content)
        if not isinstance(content, str | tuple):
            return None
        messages.append(Message(message["role"], content))
    if left and len(left) == len(images):  # no message says where they stand
        at = next(
            (at for at, message in enumerate(messages) if message.role == "user"), None
        )
        if at is not None and isinstance(messages[at].content, str):
            messages[at] = Message("user", (*left, messages[at].text))
            left = []
    if left:
        what = "a row has more images than places for them"
        got = f"{len(left)} of {len(images)} are left"
        why = (
            'they stand where messages have parts {"type": "image"}; where none '
            "has, before the first text of the user"
        )
        raise bad_row(what, got, place, why)
    return messages


def _as_part(part: Any, left: list[Image], place: Source) -> str | Image:
    """Return a part of a message; an image that has no file of its own is the first that is left."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind == "image" and part.get("image") is not None:
        return _as_image(part["image"], place)
    if kind == "image" and left:
        return left.pop(0)
    what = (
        "a message has an image, and the row has none for it"
        if kind == "image"
        else "a part of a message is not read"
    )
    why = 'parts are {"type": "text", "text": ...} and {"type": "image"}, or {"type": "image", "image": <path>}'
    raise bad_row(
        what,
        repr(part),
        place,
        why,
        "kwargs: {image: <column>}" if kind == "image" else "remove the part",
    )


def _as_image(value: Any, place: Source) -> Image:
    """Return what a data set has as an image: a path from its own folder, or a map as `datasets` has it."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return Image(value)
    found = Path(place.file.removesuffix(ROW))
    file = (found if found.is_dir() else found.parent) / str(value)
    if not isinstance(value, str) or not file.is_file():
        what = "a row's image is not there"
        why = (
            f"paths count from {file.parent}"
            if isinstance(value, str)
            else "it is a path, or a map with bytes"
        )
        raise bad_row(what, repr(value), place, why)
    return Image(str(file.absolute()))

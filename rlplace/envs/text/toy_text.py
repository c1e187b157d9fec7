"""Gymnasium's toy-text games told in words: a model reads where things stand and answers with a move."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from rlplace.envs.text.contract import Split
from rlplace.errors import ConfigError, Problem, did_you_mean

Describe = Callable[[Any, Any], str]  # (the environment, its observation)


class Game:
    """One of Gymnasium's: rules to begin with, words for moves, and words for what is observed."""

    def __init__(self, rules: str, moves: Sequence[str], describe: Describe) -> None:
        self.rules, self.moves, self.describe = rules, tuple(moves), describe


class ToyText:
    """`game` with arguments of its own in `options`; an episode's score is the sum of the game's rewards."""

    rewards: ClassVar[Sequence[str]] = ("score",)

    def __init__(self, *, seed: int, split: Split, game: str, options: Mapping[str, object] | None = None) -> None:
        games = _games()
        if game not in games:
            raise ConfigError([_unknown(game, games)])
        self._name, self._id, self._game = f"{seed}/{split}", game, games[game]
        self._options: dict[str, Any] = dict(options or {})
        self._idle = [self._make()]  # to make some is slow; arguments that it does not take are refused here

    @property
    def size(self) -> int | None:
        return None

    def episode(self, number: int) -> Playing:
        seed = random.Random(f"{self._name}/{number}").getrandbits(31)
        return Playing(self._game, self._idle.pop() if self._idle else self._make(), seed, self._idle)

    def _make(self) -> Any:
        try:
            import gymnasium
        except ModuleNotFoundError as error:
            if error.name != "gymnasium":
                raise
            raise ConfigError([_missing(self._id)]) from error
        return gymnasium.make(self._id, disable_env_checker=True, **self._options)


class Playing:
    """One game in progress, in an environment that goes back to `idle`. A word that is no move costs a turn only."""

    def __init__(self, game: Game, env: Any, seed: int, idle: list[Any]) -> None:
        self._game, self._env, self._idle, self._score = game, env, idle, 0.0
        observation, _ = env.reset(seed=seed)
        moves = ", ".join(game.moves)
        self.prompt = f"{game.rules}\nAnswer with one word: {moves}.\n\n{self._told(observation)}"

    def _told(self, observation: Any) -> str:
        return self._game.describe(self._env.unwrapped, observation)

    def reply(self, answer: str) -> str | None:
        named = [word for word in re.findall(r"[a-z]+", answer.lower()) if word in self._game.moves]
        if not named:
            return "That is no move. Answer with one word: " + ", ".join(self._game.moves) + "."
        observation, reward, terminated, truncated, _ = self._env.step(self._game.moves.index(named[-1]))
        self._score += float(reward)
        return None if terminated or truncated else self._told(observation)

    def facts(self) -> Mapping[str, Any]:
        if self._env is not None:
            self._idle.append(self._env)  # for an episode to come: this one is over
            self._env = None
        return {"score": self._score}


def _games() -> Mapping[str, Game]:
    return {
        "FrozenLake-v1": Game(
            "You are P on a frozen lake of F (ice), H (hole) and G (goal). Reach G; a hole ends the game.",
            ("left", "down", "right", "up"),
            _frozen_lake,
        ),
        "Taxi-v4": Game(
            "You drive a taxi: fetch the passenger, bring them where they want to go, and let them out there.",
            ("south", "north", "east", "west", "pickup", "dropoff"),
            _taxi,
        ),
        "Blackjack-v1": Game(
            "You play blackjack against a dealer: come nearer to 21 than they do, and not above it.",
            ("stick", "hit"),
            _blackjack,
        ),
    }


def _frozen_lake(env: Any, observation: Any) -> str:
    place, width = int(observation), env.ncol
    cells = [cell.decode() for cell in env.desc.ravel()]
    cells[place] = "P"
    return "\n".join("".join(cells[row : row + width]) for row in range(0, len(cells), width))


def _taxi(env: Any, observation: Any) -> str:
    row, column, passenger, destination = env.decode(int(observation))
    places = env.locs
    waiting = (
        "in your taxi" if passenger == len(places) else f"at row {places[passenger][0]}, column {places[passenger][1]}"
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


def _unknown(game: str, known: Mapping[str, object]) -> Problem:
    near = did_you_mean(game, known)
    return Problem(
        code="bad-task-kwargs",
        key="env.kwargs.game",
        what="unknown game" + (f", did you mean {near!r}?" if near else ""),
        got=game,
        why="games that are told in words: " + ", ".join(known),
        fix=f"game: {near or 'FrozenLake-v1'}",
    )


def _missing(game: str) -> Problem:
    return Problem(
        code="missing-library",
        key="env.task",
        what="the library of the task is not installed",
        got=game,
        why="there is no module gymnasium",
        fix="pip install 'rlplace[envs]'",
    )

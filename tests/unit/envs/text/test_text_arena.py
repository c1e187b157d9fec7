"""Games of TextArena: with the library where it is installed, else with a stand-in of its interface; ids say which."""

from __future__ import annotations

import importlib.util
import random
import sys

import pytest

from rlplace.envs.text.tasks import TextArena, TextArenaGame
from rlplace.errors import ConfigError, Problem
from rlplace.extras import install_command
from tests import arena

INSTALLED = importlib.util.find_spec("textarena") is not None


@pytest.fixture(params=["library" if INSTALLED else "stand-in"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "stand-in":
        monkeypatch.setitem(sys.modules, "textarena", arena.module())


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", arena.module())


def problem_of(game: str) -> Problem:
    with pytest.raises(ConfigError) as caught:
        TextArena(seed=0, split="train", game=game)
    (problem,) = caught.value.problems
    return problem


def guess(low: int = 1, high: int = 20) -> str:
    return f"[{(low + high) // 2}]"


def played(game: TextArenaGame) -> list[str]:
    """What the game says to one who halves the numbers that are left."""
    low, high, said = 1, 20, [game.prompt]
    while (answer := game.reply(guess(low, high))) is not None:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if "higher" in answer else (low, middle - 1)
        said.append(answer)
    return said


@pytest.mark.usefixtures("library")
def test_a_number_is_found_by_halving() -> None:
    task = TextArena(seed=0, split="train", game="GuessTheNumber-v0")
    assert task.size is None
    for number in range(10):
        game = task.episode(number)
        assert game.facts() == {"score": 0.0}
        said = played(game)
        assert game.facts() == {"score": 1.0}
        assert len(said) <= 5
        assert all("[" not in text for text in said[1:]), (
            "what the player said itself is not told again"
        )


@pytest.mark.usefixtures("library")
def test_an_episode_follows_from_seed_split_and_number_whoever_plays_in_between() -> (
    None
):
    def task(seed: int = 3, split: str = "train") -> TextArena:
        return TextArena(seed=seed, split=split, game="GuessTheNumber-v0")

    alone = [played(task().episode(n)) for n in range(5)]
    together = [task().episode(n) for n in range(5)]
    random.random()
    assert [played(game) for game in reversed(together)] == alone[::-1]
    assert [played(task(seed=4).episode(n)) for n in range(5)] != alone
    assert [played(task(split="held_out").episode(n)) for n in range(5)] != alone


@pytest.mark.usefixtures("library")
def test_games_leave_the_generator_of_the_process_alone() -> None:
    random.seed(7)
    expected = random.random()
    random.seed(7)
    TextArena(seed=0, split="train", game="GuessTheNumber-v0").episode(0).reply("[10]")
    assert random.random() == expected


@pytest.mark.usefixtures("library")
def test_games_that_there_are_not() -> None:
    problem = problem_of("GuesTheNumber-v0")
    assert (problem.code, problem.key, problem.fix) == (
        "bad-task-kwargs",
        "env.kwargs.game",
        "game: GuessTheNumber-v0",
    )
    with pytest.raises(ValueError, match="TicTacToe-v0 is no game for one"):
        TextArena(seed=0, split="train", game="TicTacToe-v0")
    with pytest.raises(TypeError, match="colour"):
        TextArena(
            seed=0, split="train", game="GuessTheNumber-v0", options={"colour": 1}
        )


@pytest.mark.usefixtures("stand_in")
def test_a_game_without_its_words() -> None:
    problem = problem_of("Wordless-v0")
    assert (problem.code, problem.got) == ("missing-library", "Wordless-v0")
    assert "nltk.downloader" in str(problem.fix)


def test_the_library_is_named_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    problem = problem_of("FrozenLake-v0")
    assert (problem.code, problem.fix) == (
        "missing-library",
        install_command("text-arena"),
    )

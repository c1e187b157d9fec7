"""recipes/games: rules, games of two policies, signs of results, faultless play, ratings."""

from __future__ import annotations

import ast
import importlib
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.append(str(RECIPES))  # as Python does for a script of this folder
board = importlib.import_module("games.board")
network = importlib.import_module("games.network")
rating = importlib.import_module("games.rating")
sys.path.remove(str(RECIPES))

TIC_TAC_TOE = (3, 3, 3, False)
CONNECT_FOUR = (6, 7, 4, True)
RULES = {"tic-tac-toe": TIC_TAC_TOE, "connect four": CONNECT_FOUR}


@pytest.fixture(scope="module", params=RULES.values(), ids=RULES)
def game(request: pytest.FixtureRequest):
    return board.Game(*request.param)


@pytest.fixture(scope="module")
def small():
    return board.Game(*TIC_TAC_TOE)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def at_random(boards: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(boards)


class Referee:
    """The rules once more, a cell at a time."""

    def __init__(self, rows: int, columns: int, line: int, falling: bool) -> None:
        self.rows = rows
        self.columns = columns
        self.line = line
        self.falling = falling
        self.owners: dict[tuple[int, int], int] = {}

    def may_take(self, cell: int) -> bool:
        row, column = divmod(cell, self.columns)
        if (row, column) in self.owners:
            return False
        below = (row + 1, column)
        return not self.falling or row + 1 == self.rows or below in self.owners

    def seen_by(self, player: int) -> list[int]:
        cells = itertools.product(range(self.rows), range(self.columns))
        return [player * self.owners.get(cell, 0) for cell in cells]

    def take(self, cell: int, player: int) -> bool:
        """Take a cell; return whether the player has won by it."""
        row, column = divmod(cell, self.columns)
        self.owners[row, column] = player
        for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
            length = 1
            for way in (1, -1):
                step = 1
                while self._owner(row, column, way * step, down, right) == player:
                    length += 1
                    step += 1
            if length >= self.line:
                return True
        return False

    def _owner(self, row: int, column: int, far: int, down: int, right: int) -> int:
        return self.owners.get((row + far * down, column + far * right), 0)


def moves_of(moves, number: int) -> list[tuple[int, list[int], int, float]]:
    """Return (side, board, move, result) of each move of a game, in turn."""
    mine = moves.game == number
    parts = (moves.side, moves.board.int(), moves.move, moves.result)
    return list(zip(*(part[mine].tolist() for part in parts), strict=True))


def test_there_are_as_many_lines_as_counted_by_hand() -> None:
    assert len(board.Game(*TIC_TAC_TOE).lines) == 3 + 3 + 2
    # Rows: 4 in each of 6; columns: 3 in each of 7; diagonals: 3 x 4 starts, both ways.
    assert len(board.Game(*CONNECT_FOUR).lines) == 24 + 21 + 24


def test_each_line_wins_for_its_owner_alone(game) -> None:
    for line in game.lines:
        cells = torch.zeros(1, game.cells)
        cells[0, line] = 1.0
        assert game.won(cells).tolist() == [True]
        assert game.won(-cells).tolist() == [False]
        for cell in line:
            broken = cells.clone()
            broken[0, cell] = -1.0
            assert game.won(broken).tolist() == [False]


def test_no_line_goes_over_an_edge() -> None:
    small = board.Game(*TIC_TAC_TOE)
    around = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 0, 0], [0, 1, 0, 0, 0, 1, 1, 0, 0]])
    assert small.won(around).tolist() == [False, False]


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_games_keep_the_rules(rules: tuple[int, int, int, bool]) -> None:
    """Every move of whole games is replayed by a referee that shares no code with the game."""
    game = board.Game(*rules)
    # As it is: mirrored and turned boards have a test of their own.
    game.views = game.views[:1]
    count = 60
    results, moves = game.play(at_random, at_random, count, generator())
    drawn = 0
    for number in range(count):
        referee = Referee(*rules)
        played = moves_of(moves, number)
        side = 1 if number % 2 == 0 else -1  # the first policy begins every second game
        won = False
        for mover, seen, move, result in played:
            assert not won, "a move after the end"
            assert mover == side
            assert seen == referee.seen_by(mover)
            assert referee.may_take(move)
            won = referee.take(move, mover)
            assert result == mover * results[number]
            side = -side
        if won:
            assert results[number] == played[-1][0]
        else:
            drawn += 1
            assert len(played) == game.cells
            assert results[number] == 0.0
    assert (results == 1).any()
    assert (results == -1).any()
    assert rules != TIC_TAC_TOE or drawn > 0


def test_a_full_board_without_a_line_is_a_draw(small) -> None:
    results, moves = small.play(small.faultless, small.faultless, 16, generator())
    assert results.tolist() == [0.0] * 16
    assert len(moves.game) == 16 * 9
    assert (moves.result == 0).all()


def test_cells_that_may_not_be_taken_are_never_drawn(game) -> None:
    """Not even by a policy that wants to take these alone."""

    def wants_others(boards: torch.Tensor) -> torch.Tensor:
        return torch.where(game.legal(boards), 0.0, 1e4)

    _, moves = game.play(wants_others, wants_others, 40, generator())
    taken = game.legal(moves.board).gather(1, moves.move[:, None])
    assert taken.all()
    chances = game.masked(wants_others(moves.board), moves.board).softmax(-1)
    assert (chances[~game.legal(moves.board)] == 0.0).all()


def test_a_piece_falls_to_the_lowest_empty_cell() -> None:
    game = board.Game(*CONNECT_FOUR)
    cells = torch.zeros(1, 42)
    assert game.legal(cells)[0].nonzero()[:, 0].tolist() == list(range(35, 42))
    cells[0, 35] = -1.0
    cells[0, 28] = 1.0
    assert game.legal(cells)[0].nonzero()[:, 0].tolist() == [21, *range(36, 42)]
    cells[0, [21, 14, 7, 0]] = torch.tensor([-1.0, 1.0, -1.0, 1.0])
    assert game.legal(cells)[0].nonzero()[:, 0].tolist() == list(range(36, 42))


def test_results_change_their_sign_from_move_to_move(game) -> None:
    results, moves = game.play(at_random, at_random, 50, generator())
    for number in range(50):
        found = [result for _, _, _, result in moves_of(moves, number)]
        expected = [abs(results[number].item()) * (-1) ** n for n in range(len(found))]
        # The player of the last move has won, or nobody has.
        assert found[::-1] == expected


def test_the_moves_of_the_first_policy_have_its_results(game) -> None:
    results, moves = game.play(at_random, at_random, 50, generator())
    own = moves.of_first()
    assert set(own.side.tolist()) == {1}
    assert torch.equal(own.result, results[own.game])
    # Both begin half of the games: an empty board is seen by both.
    empty = (moves.board == 0).all(1)
    assert moves.side[empty].sum() == 0
    assert empty.sum() == 50


def test_the_rules_are_the_same_from_all_sides(game) -> None:
    assert len(game.views) == (2 if game.falling else 8)
    assert len(game.views.unique(dim=0)) == len(game.views)
    _, moves = game.play(at_random, at_random, 50, generator())
    for view in game.views:
        seen = moves.board[:, view]
        assert torch.equal(game.won(-seen), game.won(-moves.board))
        assert torch.equal(game.legal(seen), game.legal(moves.board)[:, view])


def test_a_move_on_a_mirrored_board_reaches_the_cell_that_was_meant(small) -> None:
    """A player that always wins if it may complete a line never misses one, from whatever side it sees the board."""
    results, moves = small.play(small.faultless, at_random, 200, generator())
    own = moves.of_first()
    could_win = 0
    for seen, move, result in zip(own.board.int(), own.move, own.result, strict=True):
        value, best = small.solved(tuple(seen.tolist()))
        assert move in best
        assert result >= value
        could_win += value == 1
    assert could_win > 100
    assert (results == -1).sum() == 0


def test_faultless_play_is_that_of_the_books(small) -> None:
    value, best = small.solved((0,) * 9)
    assert (value, best) == (0, list(range(9)))
    assert len(small._solved) == 5478  # boards of tic-tac-toe that can be reached
    # After a corner the centre alone holds, after the centre a corner, after an edge both and more.
    assert small.solved((-1, 0, 0, 0, 0, 0, 0, 0, 0)) == (0, [4])
    assert small.solved((0, 0, 0, 0, -1, 0, 0, 0, 0)) == (0, [0, 2, 6, 8])
    assert small.solved((0, -1, 0, 0, 0, 0, 0, 0, 0)) == (0, [0, 2, 4, 7])


def test_values_change_their_sign_from_player_to_player(small) -> None:
    """1 to move takes cell 2 and wins; the other player, on the board that follows, has lost."""
    before = (1, 1, 0, -1, -1, 0, 0, 0, 0)
    assert small.solved(before) == (1, [2])
    after = tuple(-cell for cell in (1, 1, 1, -1, -1, 0, 0, 0, 0))
    assert small.solved(after) == (-1, [])
    # The same pieces, the other player to move: it completes its line, or blocks and has two lines open.
    assert small.solved(tuple(-cell for cell in before)) == (1, [2, 5])


def test_a_player_without_faults_cannot_be_beaten(small) -> None:
    assert small.defeats(small.faultless) == 0
    assert small.defeats(at_random) > 100  # takes the first free cell, from each side


def test_a_network_takes_its_likeliest_moves_and_legal_ones_alone(game) -> None:
    net = network.Network(game, width=16, seed=0)
    _, moves = game.play(net.likeliest, at_random, 10, generator())
    own = moves.of_first()
    logits, values = net(own.board)
    assert torch.equal(logits.argmax(-1), own.move)
    assert (logits[~game.legal(own.board)] <= -1e9).all()
    assert values.shape == own.move.shape


def test_a_network_sees_whose_piece_it_is(small) -> None:
    net = network.Network(small, width=16, seed=0)
    boards = torch.zeros(3, 9)
    boards[1, 4] = 1.0
    boards[2, 4] = -1.0
    _, values = net(boards)
    assert len(values.unique()) == 3


def test_a_network_learns_from_the_side_of_the_player_to_move(small) -> None:
    """The move that won becomes likelier; values are near to the results of the players that saw the boards."""
    net = network.Network(small, width=32, seed=0)
    optimizer = torch.optim.Adam(net.parameters())
    wins_at_2 = torch.tensor([1.0, 1.0, 0.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0])
    lost = torch.tensor([-1.0, -1.0, 0.0, 1.0, 0.0, 0.0, -1.0, 1.0, 0.0])  # two lines
    boards = torch.stack([wins_at_2, wins_at_2, wins_at_2, lost])
    count = 32
    moves = board.Moves(
        game=torch.arange(4 * count),
        side=torch.ones(4 * count),
        board=boards.repeat(count, 1),
        move=torch.tensor([2, 2, 8, 2]).repeat(count),
        result=torch.tensor([1.0, 1.0, -1.0, -1.0]).repeat(count),
    )
    for _ in range(3):
        network.learn(net, optimizer, moves, 0.01, 0.01, generator())
    logits, values = net(boards)
    chances = logits.softmax(-1)[0]
    assert chances[2] > 0.6
    assert chances[8] < 0.1
    assert values[0].item() == pytest.approx(1 / 3, abs=0.3)
    assert values[3].item() == pytest.approx(-1.0, abs=0.3)


def test_ratings_are_those_that_the_points_follow_from() -> None:
    true = torch.tensor([0.0, 120.0, -200.0, 900.0], dtype=torch.float64)
    expected = 1 / (1 + 10 ** ((true[None] - true[:, None]) / 400))
    ratings = rating.Ratings()
    ratings.points = 100 * expected * (1 - torch.eye(4, dtype=torch.float64))
    assert ratings.elo().tolist() == pytest.approx(true.tolist(), abs=0.1)


def test_points_of_a_new_player_come_from_its_results() -> None:
    ratings = rating.Ratings()
    ratings.add([torch.tensor([1.0, 0.0, 1.0, -1.0])])
    # 2.5 of 4 points, and a draw.
    assert ratings.points.tolist() == [[0.0, 2.0], [3.0, 0.0]]
    assert ratings.elo().tolist() == pytest.approx([0.0, 400 * 0.17609], abs=0.1)
    # Wins alone give no infinite rating.
    ratings.add([torch.ones(4), torch.ones(4)])
    assert 0.0 < ratings.elo()[2] < 1000.0


def test_strength_is_measured_outside_of_the_league(small) -> None:
    def strength(game, policy, games: int) -> dict[str, float]:
        player = SimpleNamespace(game=game, likeliest=policy)
        return rating.measured(player, games, generator())

    faultless = strength(small, small.faultless, 200)
    assert faultless["against_faultless"] == 0.0
    assert faultless["against_random"] > 0.8
    assert faultless["defeats"] == 0
    random = strength(small, at_random, 400)
    assert random["against_faultless"] < -0.8
    assert abs(random["against_random"]) < 0.15
    large = board.Game(*CONNECT_FOUR)
    assert set(strength(large, at_random, 4)) == {"against_random"}


def test_the_games_know_nothing_of_the_engine() -> None:
    for file in (RECIPES / "games").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [name.name for name in getattr(node, "names", ())]
            if isinstance(node, ast.ImportFrom):
                names = [node.module]
            assert not any(str(name).startswith("rlplace") for name in names), file

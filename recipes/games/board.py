"""Board games of two players, without a line of the engine: rules, games of two policies, faultless play.

Tic-tac-toe is a line of 3 on 3 x 3 cells. Connect four is a line of 4 on 6 x 7 cells, where a piece falls to the lowest
empty cell of its column.

A board is a row of cells as the player to move sees it: 1 is its own piece, -1 the other player's, 0 an empty cell. So
one network plays both sides, and a result, a value or an advantage is that of the player to move. It changes its sign
from one move to the next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

# Takes boards [n, cells] as the player to move sees them; returns the logits of the cells [n, cells].
Policy = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Moves:
    """Moves of both players, turn by turn.

    `game` [n]: number of the game. `side` [n]: 1 for the first policy of `play`, -1 for the second. `board` [n, cells]:
    what the player saw. `move` [n]: the cell that the player took, of the board as it saw it. `result` [n]: 1, 0 or -1,
    how the game ended for the player of the move.
    """

    game: torch.Tensor
    side: torch.Tensor
    board: torch.Tensor
    move: torch.Tensor
    result: torch.Tensor

    def of_first(self) -> Moves:
        """Return the moves of the first policy alone."""
        own = self.side == 1
        return Moves(*(part[own] for part in self.parts()))

    @classmethod
    def joined(cls, several: Sequence[Moves]) -> Moves:
        """Return the moves of several calls of `play`, one after the other."""
        parts = zip(*(moves.parts() for moves in several), strict=True)
        return cls(*map(torch.cat, parts))

    def parts(self) -> tuple[torch.Tensor, ...]:
        return (self.game, self.side, self.board, self.move, self.result)


class Game:
    """The rules: two players fill a board in turns; a whole line of one player wins, a full board is a draw."""

    def __init__(self, rows: int, columns: int, line: int, falling: bool) -> None:
        self.cells = rows * columns
        self.columns = columns
        self.falling = falling
        self.lines: list[list[int]] = []  # the cells of each line
        for row in range(rows):
            for column in range(columns):
                for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
                    last_row = row + (line - 1) * down
                    last_column = column + (line - 1) * right
                    if last_row < rows and 0 <= last_column < columns:
                        first = row * columns + column
                        step = down * columns + right
                        self.lines.append([first + n * step for n in range(line)])
        self.views = self._views(rows, columns)
        self._solved: dict[tuple[int, ...], tuple[int, list[int]]] = {}

    def _views(self, rows: int, columns: int) -> torch.Tensor:
        """Return the mirrored and turned boards with the same rules [views, cells]: which cell is where."""
        cells = torch.arange(rows * columns).view(rows, columns)
        views = [cells, cells.flip(1)]
        if not self.falling:
            views += [view.flip(0) for view in views]
            if rows == columns:
                views += [view.T for view in views]
        return torch.stack([view.flatten() for view in views])

    def legal(self, boards: torch.Tensor) -> torch.Tensor:
        """Return which cells may be taken [n, cells]: the empty ones; in falling games, the lowest of each column."""
        empty = boards == 0
        if not self.falling:
            return empty
        floor = torch.ones_like(empty[:, : self.columns])
        below_is_filled = torch.cat([~empty[:, self.columns :], floor], 1)
        return empty & below_is_filled

    def won(self, boards: torch.Tensor) -> torch.Tensor:
        """Return whether the player of the ones has a whole line [n]."""
        return (boards[:, self.lines] == 1).all(-1).any(-1)

    def masked(self, logits: torch.Tensor, boards: torch.Tensor) -> torch.Tensor:
        """Return the logits, with -1e9 for cells that may not be taken: a softmax gives these exactly 0."""
        return logits.masked_fill(~self.legal(boards), -1e9)

    @torch.no_grad()
    def play(
        self, policy: Policy, other: Policy, count: int, random: torch.Generator
    ) -> tuple[torch.Tensor, Moves]:
        """Play `count` games of two policies, which draw their moves; `policy` begins games 0, 2, 4 and so on.

        At each move, a player sees the board mirrored or turned at random. So games of the same two policies differ,
        and a policy that knows an answer in one corner alone soon meets its fault in the others.

        Return the results of `policy` [count], which are 1, 0 or -1, and the moves of both.
        """
        games = torch.arange(count)
        boards = torch.zeros(count, self.cells)  # 1: a piece of `policy`
        results = torch.zeros(count)
        unfinished = torch.ones(count, dtype=torch.bool)
        parts: list[tuple[torch.Tensor, ...]] = []
        for turn in range(self.cells):
            for side, player in ((1, policy), (-1, other)):
                begins = 0 if side == 1 else 1
                rows = games[unfinished & ((games + turn) % 2 == begins)]
                if len(rows) == 0:
                    continue
                views = self.views[
                    torch.randint(len(self.views), (len(rows),), generator=random)
                ]
                seen = (boards[rows] * side).gather(1, views)
                chances = self.masked(player(seen), seen).softmax(-1)
                moves = torch.multinomial(chances, 1, generator=random)[:, 0]
                cells = views.gather(1, moves[:, None])[:, 0]
                boards[rows, cells] = float(side)
                won = rows[self.won(boards[rows] * side)]
                results[won] = float(side)
                unfinished[won] = False
                parts.append((rows, torch.full_like(rows, side), seen, moves))
        game, side_of, board, move = map(torch.cat, zip(*parts, strict=True))
        result = results[game] * side_of
        return results, Moves(game, side_of, board, move, result)

    def solved(self, board: tuple[int, ...]) -> tuple[int, list[int]]:
        """Return (result of the player to move if neither errs, all moves that reach it), by minimax.

        It looks at every board that can follow: 5,478 in tic-tac-toe, far too many in connect four.
        """
        if board in self._solved:
            return self._solved[board]
        reached: dict[int, int] = {}
        result = -1
        lost = any(all(board[cell] == -1 for cell in line) for line in self.lines)
        if not lost:
            for move in self.legal(torch.tensor([board]))[0].nonzero()[:, 0].tolist():
                after = [-cell for cell in board]
                after[move] = -1
                reached[move] = -self.solved(tuple(after))[0]
            result = max(reached.values(), default=0)
        best = [move for move, value in reached.items() if value == result]
        self._solved[board] = result, best
        return result, best

    def faultless(self, boards: torch.Tensor) -> torch.Tensor:
        """A policy that never errs: it draws from the best moves."""
        logits = torch.full_like(boards, -1e9)
        for row, board in enumerate(boards.int().tolist()):
            _, best = self.solved(tuple(board))
            logits[row, best] = 0.0
        return logits

    @torch.no_grad()
    def defeats(self, policy: Policy) -> int:
        """Count the lost final positions that an opponent can reach against `policy`, which takes its likeliest moves.

        The policy plays first and second, in each symmetric view of the board. The opponent makes every possible move.
        """
        found = 0
        for own_turn in (True, False):
            boards = torch.zeros(1, self.cells)
            while len(boards) > 0:
                taken = self.legal(boards)
                if own_turn:
                    chosen = torch.zeros_like(taken)
                    for view in self.views:
                        seen = boards[:, view]
                        likeliest = self.masked(policy(seen), seen).argmax(-1)
                        chosen[torch.arange(len(boards)), view[likeliest]] = True
                    taken &= chosen
                rows, moves = taken.nonzero(as_tuple=True)
                after = boards[rows]
                after[torch.arange(len(rows)), moves] = 1.0
                won = self.won(after)
                if not own_turn:
                    found += len(after[won].unique(dim=0))
                # The other player sees the same board with opposite signs.
                boards = -after[~won].unique(dim=0)
                own_turn = not own_turn
        return found

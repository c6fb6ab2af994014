"""The game 2048: seeded, pure, standard library alone.

A board is four rows of four tiles, 0 where there is none. A move pushes all tiles to one side; equal neighbours merge
once, and what they become is added to the score. Then a tile appears: a 2, one time in ten a 4. Which and where follows
from the seed of the game, the number of the move and the board: same seed and same moves, same board. A move that
changes nothing is illegal.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

Board = tuple[tuple[int, ...], ...]
DIRECTIONS = ("left", "right", "up", "down")
SIZE = 4
_P_FOUR = 0.1


@dataclass(frozen=True)
class Game:
    """A game as it stands.

    Attributes:
        seed: of the tiles that appear.
        board: its rows from above.
        score: sum of all tiles that were made by merging.
        moves: made so far.
    """

    seed: str
    board: Board
    score: int = 0
    moves: int = 0

    @property
    def max_tile(self) -> int:
        """The largest tile."""
        return max(max(row) for row in self.board)

    def legal(self) -> list[str]:
        """Directions that change something; none when the game is over."""
        return [direction for direction in DIRECTIONS if pushed(self.board, direction)[0] != self.board]

    def move(self, direction: str) -> Game | None:
        """The game after a move, with the tile that appears; `None` if the move is illegal."""
        board, gained = pushed(self.board, direction)
        if board == self.board:
            return None
        moves = self.moves + 1
        board = _with_new_tile(board, random.Random(f"{self.seed} {moves}"))
        return replace(self, board=board, score=self.score + gained, moves=moves)


def new_game(seed: str) -> Game:
    """A board with two tiles."""
    rng = random.Random(seed)
    empty: Board = ((0,) * SIZE,) * SIZE
    return Game(seed, _with_new_tile(_with_new_tile(empty, rng), rng))


def pushed(board: Board, direction: str) -> tuple[Board, int]:
    """The board after a push, before a tile appears, and what was gained.

    Raises:
        ValueError: `direction` is none of `DIRECTIONS`.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"{direction!r} is not a direction: say one of {', '.join(DIRECTIONS)}")
    lines = board if direction in ("left", "right") else _turned(board)
    backwards = direction in ("right", "down")
    results = [_merged(line[::-1] if backwards else line) for line in lines]
    lines = tuple(line[::-1] if backwards else line for line, _ in results)
    return lines if direction in ("left", "right") else _turned(lines), sum(gained for _, gained in results)


def _merged(line: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """A line pushed to its beginning, and what was gained."""
    tiles = [tile for tile in line if tile]
    done: list[int] = []
    gained = 0
    while tiles:
        tile = tiles.pop(0)
        if tiles and tiles[0] == tile:
            tile += tiles.pop(0)
            gained += tile
        done.append(tile)
    return (*done, *[0] * (len(line) - len(done))), gained


def _turned(board: Board) -> Board:
    """Columns as rows."""
    return tuple(zip(*board, strict=True))


def _with_new_tile(board: Board, rng: random.Random) -> Board:
    row, column = rng.choice([(r, c) for r in range(SIZE) for c in range(SIZE) if not board[r][c]])
    tile = 4 if rng.random() < _P_FOUR else 2
    line = board[row]
    return (*board[:row], (*line[:column], tile, *line[column + 1 :]), *board[row + 1 :])

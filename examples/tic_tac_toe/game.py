"""Tic-tac-toe: the rules, and the board as lines of text. Standard library alone.

A board is a string of nine characters, row by row: `X`, `O`, or `.` where a cell is free. Cells are numbered from 1 to
9. X begins, so the board says whose turn it is. Boards are never changed: `moved` returns the next one.
"""

from __future__ import annotations

import random

EMPTY = "." * 9
LINES = ((1, 2, 3), (4, 5, 6), (7, 8, 9), (1, 4, 7), (2, 5, 8), (3, 6, 9), (1, 5, 9), (3, 5, 7))


def side_to_move(board: str) -> str:
    """Return whose turn it is."""
    return "X" if board.count("X") == board.count("O") else "O"


def other(side: str) -> str:
    """Return the opponent's mark."""
    return "O" if side == "X" else "X"


def free_cells(board: str) -> list[int]:
    """Return the cells that may be taken."""
    return [cell for cell, mark in enumerate(board, 1) if mark == "."]


def moved(board: str, cell: int) -> str:
    """Return the board after the side to move took a cell.

    Raises:
        ValueError: the cell is taken, or there is none of this number.
    """
    if cell not in free_cells(board):
        raise ValueError(f"cell {cell} is not free")
    return board[: cell - 1] + side_to_move(board) + board[cell:]


def winner(board: str) -> str | None:
    """Return who has a line, if anybody has."""
    for line in LINES:
        marks = {board[cell - 1] for cell in line}
        if len(marks) == 1 and marks != {"."}:
            return marks.pop()
    return None


def is_over(board: str) -> bool:
    """Whether nobody moves any more."""
    return winner(board) is not None or not free_cells(board)


def completing(board: str, side: str) -> list[int]:
    """Return the free cells that would give a side a line."""
    found: set[int] = set()
    for line in LINES:
        marks = [board[cell - 1] for cell in line]
        if marks.count(side) == 2 and marks.count(".") == 1:
            found.add(line[marks.index(".")])
    return sorted(found)


def at_random(board: str, rng: random.Random) -> int:
    """Return the move of a player who takes any free cell."""
    return rng.choice(free_cells(board))


def as_lines(board: str, side: str) -> list[str]:
    """Return the rows, columns and diagonals as a side sees them: `X1` is its own cell, `O2` its opponent's, `3` free.

    Whoever plays O sees itself as X too, so that what is learned on one side serves on the other.
    """
    marks = {side: "X", other(side): "O", ".": ""}
    return [" ".join(f"{marks[board[cell - 1]]}{cell}" for cell in line) for line in LINES]

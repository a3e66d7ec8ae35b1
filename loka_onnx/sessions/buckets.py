"""Requests of any size on programs of fixed batch sizes.

A program of one batch size also serves smaller requests: the last row is repeated, and its outputs are cut
off. This is exact because in the served models each row's answer depends on that row alone. A request beyond
the largest size is cut into several.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.errors import EngineError
from loka_onnx.sessions.runner import Arrays

Run = Callable[[int, Arrays], Arrays]
"""Runs the program of a size on exactly that many rows."""


MOST_PADDING = 2
"""Largest ratio of padded to actual rows where a request could run unpadded."""


def padded_rows(rows: int, sizes: Sequence[int]) -> int | None:
    """The smallest of ascending sizes that holds a request; None where the padding would be too much."""
    return next((size for size in sizes if rows <= size <= MOST_PADDING * rows), None)


@dataclass(frozen=True)
class Piece:
    """Rows of a request that one program serves: `rows` rows from `start`, in a program of `size` rows."""

    start: int
    rows: int
    size: int


def pieces_of(rows: int, sizes: Sequence[int]) -> tuple[Piece, ...]:
    """Split a request: the largest of ascending sizes while it is full, then the smallest that holds the
    rest.

    Raises:
        EngineError: The request is empty, or there is no program.
    """
    if rows < 1 or not sizes:
        raise EngineError(
            "E0905 no program serves this batch",
            evidence=f"{rows} rows; programs of {', '.join(map(str, sizes)) or 'no size'}",
            remedy="send at least one row",
        )
    largest = sizes[-1]
    full = tuple(Piece(start, largest, largest) for start in range(0, rows - largest + 1, largest))
    done = largest * len(full)
    if done == rows:
        return full
    return (*full, Piece(done, rows - done, next(size for size in sizes if size >= rows - done)))


def padded(value: npt.NDArray[Any], piece: Piece) -> npt.NDArray[Any]:
    """Take the rows of a piece in C order, and repeat the last one up to the program's size.

    A repeated row is valid; zeros might not be (an id may have to be positive).
    """
    rows = value[piece.start : piece.start + piece.rows]
    if piece.size > piece.rows:
        rows = np.concatenate([rows, np.repeat(rows[-1:], piece.size - piece.rows, axis=0)])
    return np.ascontiguousarray(rows)


def rows_of(inputs: Mapping[str, npt.NDArray[Any]]) -> int:
    """Rows of a request.

    Raises:
        EngineError: An input has no batch axis, or they do not agree.
    """
    counts: dict[str, int | None]
    counts = {name: value.shape[0] if value.ndim else None for name, value in inputs.items()}
    if len({*counts.values()}) != 1 or None in counts.values():
        raise EngineError(
            "E0906 the inputs of a batch have different numbers of rows",
            evidence=", ".join(f"'{name}' {count}" for name, count in counts.items())
            or "there are no inputs",
            remedy="put the batch on axis 0 of every input",
        )
    return next(count for count in counts.values() if count is not None)


def run_in_buckets(
    run: Run, inputs: Mapping[str, npt.NDArray[Any]], sizes: Sequence[int], batched: Collection[str]
) -> Arrays:
    """Serve a request with programs of fixed sizes.

    Args:
        batched: Outputs whose axis 0 is the batch; others are taken from the first piece.

    Raises:
        EngineError: The request is empty, its inputs disagree, or an output does not follow the batch.
    """
    pieces = pieces_of(rows_of(inputs), sizes)
    answers: list[Arrays] = []
    for piece in pieces:
        answer = run(piece.size, {name: padded(value, piece) for name, value in inputs.items()})
        answers.append({name: _cut(name, v, piece) if name in batched else v for name, v in answer.items()})
    first = answers[0]
    if len(answers) == 1:
        return first
    return {
        name: np.concatenate([answer[name] for answer in answers]) if name in batched else value
        for name, value in first.items()
    }


def _cut(name: str, value: npt.NDArray[Any], piece: Piece) -> npt.NDArray[Any]:
    if value.shape[:1] != (piece.size,):
        raise EngineError(
            f"E0907 output '{name}' does not follow the batch",
            evidence=f"a program of {piece.size} rows gave shape {value.shape}",
            remedy="export the model with axis 0 of every output dynamic",
        )
    return value[: piece.rows]

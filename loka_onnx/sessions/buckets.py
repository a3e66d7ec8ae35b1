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
from loka_onnx.sessions.dlpack import Borrowed
from loka_onnx.sessions.runner import Arrays

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
    rest. EngineError without rows or sizes.
    """
    if rows < 1 or not sizes:
        raise EngineError(
            "E0905 no program serves this batch",
            evidence=f"{rows} rows; programs of {', '.join(map(str, sizes)) or 'no size'}",
            remedy="send at least one row",
        )
    largest = sizes[-1]
    pieces = [Piece(start, largest, largest) for start in range(0, rows - largest + 1, largest)]
    if rest := rows % largest:
        pieces.append(Piece(rows - rest, rest, next(size for size in sizes if size >= rest)))
    return tuple(pieces)


def padded(value: npt.NDArray[Any], piece: Piece) -> npt.NDArray[Any]:
    """Take the rows of a piece in C order, and repeat the last one up to the program's size: a repeated row
    is valid; zeros might not be (an id may have to be positive).
    """
    rows = value[piece.start : piece.start + piece.rows]
    if piece.size > piece.rows:
        rows = np.concatenate([rows, np.repeat(rows[-1:], piece.size - piece.rows, axis=0)])
    # An axis of length 1 may have a negative stride, which PyTorch refuses.
    return np.ascontiguousarray(rows) if min(rows.strides) >= 0 else rows.copy()


def rows_of(inputs: Mapping[str, npt.NDArray[Any] | Borrowed]) -> int:
    """Rows of a request; an `EngineError` where an input has no batch axis, or they do not agree."""
    counts = {name: value.shape[0] if value.shape else None for name, value in inputs.items()}
    rows = next(iter(counts.values()), None)
    if rows is None or {*counts.values()} != {rows}:
        raise EngineError(
            "E0906 the inputs of a batch have different numbers of rows",
            evidence=", ".join(f"'{name}' {count}" for name, count in counts.items())
            or "there are no inputs",
            remedy="put the batch on axis 0 of every input",
        )
    return rows


def run_in_buckets(
    run: Callable[[int, Arrays], Arrays],
    inputs: Mapping[str, npt.NDArray[Any]],
    sizes: Sequence[int],
    batched: Collection[str],
) -> Arrays:
    """Serve a request by `run`, which takes a program's size and exactly that many rows; an `EngineError`
    where that does not fit. Axis 0 of `batched` outputs is the batch; others are taken from the first piece.
    """
    answers: dict[str, list[npt.NDArray[Any]]] = {}
    for piece in pieces_of(rows_of(inputs), sizes):
        answer = run(piece.size, {name: padded(value, piece) for name, value in inputs.items()})
        for name, value in answer.items():
            if name in batched and value.shape[:1] != (piece.size,):
                raise EngineError(
                    f"E0907 output '{name}' does not follow the batch",
                    evidence=f"a program of {piece.size} rows gave shape {value.shape}",
                    remedy="export the model with axis 0 of every output dynamic",
                )
            answers.setdefault(name, []).append(value[: piece.rows] if name in batched else value)
    return {
        name: np.concatenate(values) if name in batched and len(values) > 1 else values[0]
        for name, values in answers.items()
    }

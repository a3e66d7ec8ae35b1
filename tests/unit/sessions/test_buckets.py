"""Requests of any size through programs of fixed sizes: which one, padding, cutting."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka_onnx.errors import EngineError
from loka_onnx.sessions.buckets import Piece, padded, pieces_of, rows_of, run_in_buckets

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True).map(sorted)


@given(rows=st.integers(1, 200), sizes=SIZES)
def test_pieces_cover_each_row_once_and_waste_less_than_any_smaller_program(rows, sizes):
    pieces = pieces_of(rows, sizes)
    covered = [row for piece in pieces for row in range(piece.start, piece.start + piece.rows)]
    assert covered == list(range(rows))
    assert all(piece.size == piece.rows for piece in pieces[:-1])
    assert not any(size >= pieces[-1].rows for size in sizes if size < pieces[-1].size)


@given(rows=st.integers(1, 100), sizes=SIZES)
def test_a_row_gets_the_answer_of_a_program_that_sees_it_alone(rows: int, sizes: list[int]) -> None:
    ran: list[int] = []

    def run(size: int, inputs: dict[str, Any]) -> dict[str, Any]:
        ran.append(size)
        assert all(len(value) == size and value.flags.c_contiguous for value in inputs.values())
        return {"out": inputs["x"].sum(axis=1) + inputs["ids"], "version": np.arange(3)}

    x = np.random.default_rng(rows).normal(size=(rows, 3)).T.copy().T
    ids = np.arange(rows) + 1
    got = run_in_buckets(run, {"x": x, "ids": ids}, sizes, {"out"})
    np.testing.assert_array_equal(got["out"], x.sum(axis=1) + ids)
    np.testing.assert_array_equal(got["version"], np.arange(3))
    assert set(ran) <= set(sizes)


def test_what_pads_is_a_row_of_the_request() -> None:
    value = np.array([[7, 8], [9, 10]])
    np.testing.assert_array_equal(padded(value, Piece(0, 2, 4)), [[7, 8], [9, 10], [9, 10], [9, 10]])
    assert padded(value, Piece(0, 2, 2)).base is value


@pytest.mark.parametrize(("rows", "sizes", "said"), [(0, (4,), "0 rows; programs of 4"), (3, (), "no size")])
def test_a_request_that_nothing_serves(rows: int, sizes: tuple[int, ...], said: str) -> None:
    with pytest.raises(EngineError, match=said):
        pieces_of(rows, sizes)


@pytest.mark.parametrize(("second", "said"), [(np.zeros(3), "3"), (np.zeros(()), "None")])
def test_inputs_that_disagree_are_refused(second: np.ndarray[Any, Any], said: str) -> None:
    with pytest.raises(EngineError, match=f"'x' 2, 'y' {said}"):
        rows_of({"x": np.zeros((2, 1)), "y": second})


def test_an_output_that_does_not_follow_the_batch_is_refused() -> None:
    with pytest.raises(EngineError, match=r"'out'(?s:.*)4 rows gave shape \(1,\)"):
        run_in_buckets(lambda size, inputs: {"out": np.zeros(1)}, {"x": np.zeros((2, 1))}, (4,), {"out"})

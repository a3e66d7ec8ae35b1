"""Plain rows as users and candidates, and back."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loka_onnx.core.rewrite import INDEX
from loka_onnx.sessions.runner import to_rows, to_users

USERS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=12)


@given(USERS)
def test_rows_are_what_they_were_and_neighbours_with_equal_values_are_one_user(users: list[tuple[int, int]]):
    age, history = np.array(users, np.int64)[:, 0], np.array(users, np.float32)
    rows = {"age": age, "history": history, "item": np.arange(len(users))}
    request = to_users(rows, ("age", "history"))
    changes = 1 + sum(one != other for one, other in pairwise(users))
    assert len(request["age"]) == len(request["history"]) == changes
    assert request[INDEX].dtype == np.int64
    back = to_rows(request, ("age", "history"))
    assert back.keys() == rows.keys()
    for name, values in rows.items():
        np.testing.assert_array_equal(back[name], values)
        assert back[name].dtype == values.dtype

"""A lookup and a dense engine behind one interface."""

from __future__ import annotations

import numpy as np
import pytest

from loka_onnx.errors import EngineError
from loka_onnx.sessions.runner import Arrays, Runner, SplitRunner


class Recorder(Runner):
    """Answers what it is told to, and keeps what it was asked."""

    def __init__(self, answer: Arrays, closing: Exception | None = None) -> None:
        self.answer, self.closing = answer, closing
        self.asked: list[Arrays] = []
        self.closed = 0

    def run(self, inputs):
        self.asked.append(dict(inputs))
        return self.answer

    def close(self):
        self.closed += 1
        if self.closing is not None:
            raise self.closing


ROWS = {"table": np.ones((2, 4), np.float32)}
ANSWER = {"ctr": np.zeros(2, np.float32)}
REQUEST = {"ids": np.array([1, 2]), "x": np.zeros((2, 3), np.float32)}


def test_the_engine_gets_what_was_looked_up_beside_the_inputs() -> None:
    lookup, dense = Recorder(ROWS), Recorder(ANSWER)
    runner = SplitRunner(lookup, dense)
    assert runner.run(REQUEST) is ANSWER
    assert lookup.asked[0].keys() == REQUEST.keys()
    assert dense.asked[0].keys() == {"ids", "x", "table"}
    assert dense.asked[0]["table"] is ROWS["table"]


def test_both_are_freed_even_where_one_fails() -> None:
    lookup, dense = Recorder(ROWS), Recorder(ANSWER, EngineError("the device is gone"))
    with pytest.raises(EngineError, match="the device is gone"), SplitRunner(lookup, dense):
        pass
    assert (lookup.closed, dense.closed) == (1, 1)

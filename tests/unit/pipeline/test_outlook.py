"""Expected times against what they stand for."""

from dataclasses import replace

import numpy as np
import pytest

from loka_onnx.evaluation.latency import from_host, measure_latency
from loka_onnx.pipeline.judging import PER_LOAD
from loka_onnx.pipeline.outlook import _timing
from loka_onnx.planning.speed import FIRST_LOADS


@pytest.mark.parametrize("request_ms", [0.02, 1.0, 8.0, 90.0, 700.0])
def test_the_time_of_timing_is_that_of_measuring_in_the_first_loads(request_ms: float) -> None:
    now_ns = 0

    def run(_: object) -> dict[str, object]:
        nonlocal now_ns
        now_ns += int(request_ms * 1e6)
        return {}

    options = replace(PER_LOAD, clock_ns=lambda: now_ns)
    measure_latency(from_host(run), lambda rows: {"x": np.zeros(rows)}, (8,), options, "cpu", True)
    assert _timing(request_ms / 1e3) == pytest.approx(FIRST_LOADS * now_ns / 1e9, rel=0.1)

"""Ratios of times, part by part."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from loka_onnx.core.evaluation import Evaluation, Latency
from loka_onnx.planning.speed import Speed


def latency(batch: int, parts: list[float], counts: bool = True) -> Latency:
    middle = float(np.median(parts))
    return Latency(batch, middle, middle, middle, 200, "gpu", counts, parts_us=tuple(parts))


def speed(**parts: list[float]) -> Speed:
    return Speed({int(name[1:]): latency(int(name[1:]), values) for name, values in parts.items()})


DRIFT = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9]
"""A machine that slows down to nearly half."""


def test_what_slows_both_cancels() -> None:
    ratio = speed(b8=[100 * d for d in DRIFT]).over(speed(b8=[80 * d for d in DRIFT]))
    assert ratio is not None
    assert (ratio.value, ratio.lower, ratio.upper) == pytest.approx((1.25, 1.25, 1.25))
    assert ratio.rows == 10
    # The same times in another order are no longer the same machine: nothing cancels.
    apart = speed(b8=[100 * d for d in DRIFT]).over(speed(b8=[80 * d for d in reversed(DRIFT)]))
    assert apart is not None and apart.lower < 1.0 < apart.upper


def test_the_interval_holds_what_it_should() -> None:
    rng = np.random.default_rng(4)
    inside = 0
    for _ in range(400):
        ours, theirs = (100 * np.exp(rng.normal(0, 0.05, 10)) for _ in range(2))
        ratio = speed(b1=ours.tolist()).over(speed(b1=(theirs * 1.1).tolist()))
        assert ratio is not None
        inside += ratio.lower <= 1 / 1.1 <= ratio.upper
    # 97.85 % of 400 draws, three standard errors down.
    assert inside / 400 > 0.956


def test_sizes_weigh_by_the_row() -> None:
    both = speed(b10=[10.0] * 10, b100=[130.0] * 10)
    assert both.per_row_us == pytest.approx((1.0 + 1.3) / 2)
    assert both.at(100).per_row_us == pytest.approx(1.3)
    assert both.batches == (10, 100)
    # Over the sizes in common.
    assert both.ratio(speed(b100=[100.0] * 10)) == pytest.approx(1.3)
    with pytest.raises(KeyError, match="batch size in common"):
        both.over(speed(b5=[1.0] * 10))


@pytest.mark.parametrize("parts", [[100.0] * 5, [90.0, 110.0]])
def test_too_few_parts_have_no_width(parts: list[float]) -> None:
    ratio = speed(b1=parts).over(speed(b1=[50.0] * len(parts)))
    assert ratio is not None
    assert (ratio.value, ratio.lower, ratio.upper, ratio.rows) == (2.0, 2.0, 2.0, 0)


def test_parts_that_do_not_correspond_are_not_compared() -> None:
    ratio = speed(b1=[100.0] * 10).over(speed(b1=[50.0] * 8))
    assert ratio is not None
    assert (ratio.lower, ratio.upper, ratio.rows) == (2.0, 2.0, 0)


def test_engines_that_were_timed_apart_have_a_ratio_and_no_interval() -> None:
    """As many parts in another job are no pairs."""
    ours, theirs = speed(b1=[100.0] * 10), speed(b1=[80.0] * 10)
    for change in ({"job": "gpu-trt-sm90-bf16"}, {"device": "NVIDIA H100 PCIe"}):
        apart = Speed({batch: replace(x, **change) for batch, x in theirs.latencies.items()})  # type: ignore[arg-type]
        assert ours.over(apart) is None and apart.over(ours) is None
        assert ours.ratio(apart) == ours.least_over(apart) == pytest.approx(1.25)
        # The same job is the same machine.
        again = Speed({batch: replace(x, **change) for batch, x in ours.latencies.items()})  # type: ignore[arg-type]
        assert again.over(apart) == ours.over(theirs)
    noisy = speed(b1=[70.0 * d for d in DRIFT])
    times = ours.over(noisy)
    assert times is not None and ours.least_over(noisy) == times.lower < ours.ratio(noisy)


def evaluation(*latencies: Latency) -> Evaluation:
    return Evaluation("e", "trt", "fp32", "gpu", "selection", 10, (), latencies, "measured")


def test_only_what_counts_is_a_speed() -> None:
    good, other = latency(1, [1.0]), latency(2, [1.0], counts=False)
    assert Speed.of(evaluation(good), is_simulated=False) is not None
    assert Speed.of(evaluation(good), is_simulated=True) is None
    assert Speed.of(evaluation(good, other), is_simulated=False) is None
    assert Speed.of(evaluation(), is_simulated=False) is None
    assert Speed.of(None, is_simulated=False) is None

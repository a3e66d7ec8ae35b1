"""Ratios of times, load by load."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from loka_onnx.core.evaluation import Latency
from loka_onnx.planning.speed import ANALYSES, LOADS, MOST_LOADS, Speed, contenders, not_slower, rivals

LAST_RISK = ANALYSES[LOADS]


def latency(batch: int, parts: list[float], counts: bool = True) -> Latency:
    middle = float(np.median(parts))
    return Latency(batch, middle, middle, middle, 200, "gpu", counts, loads_us=tuple(parts))


def speed(**parts: list[float]) -> Speed:
    return Speed({int(name[1:]): latency(int(name[1:]), values) for name, values in parts.items()})


DRIFT = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9]
"""A machine that slows down to nearly half."""


def test_what_slows_both_cancels_and_requests_that_stall_do_not_move_the_ratio():
    ratio = speed(b8=[100 * d for d in DRIFT]).over(speed(b8=[80 * d for d in DRIFT]))
    assert (ratio.value, ratio.lower, ratio.upper) == pytest.approx((1.25, 1.25, 1.25))
    assert ratio.rows == 10
    # The same times in another order are no longer the same machine: nothing cancels.
    apart = speed(b8=[100 * d for d in DRIFT]).over(speed(b8=[80 * d for d in reversed(DRIFT)]))
    assert apart.lower < 1.0 < apart.upper
    # A busy host can stretch most requests of a load; its least time is what the engine takes.
    stalled = replace(latency(8, [100.0, 103.0, 101.0]), p50_us=1700.0)
    found = Speed({8: stalled}).over(speed(b8=[50.0, 51.5, 50.5]))
    assert (found.value, found.lower, found.upper) == pytest.approx((2.0, 2.0, 2.0))


def test_the_interval_is_the_paired_t_or_pooled_over_rivals_with_a_divided_risk():
    rng = np.random.default_rng(5)
    ours, theirs = np.exp(rng.normal(4, 0.05, (2, 7)))
    found = speed(b8=(8 * ours).tolist()).over(speed(b8=(8 * theirs).tolist()))
    change = np.log(ours / theirs)
    half = stats.t.ppf(0.975, 6) * change.std(ddof=1) / np.sqrt(7)
    lower, upper = np.exp(change.mean() - half), np.exp(change.mean() + half)
    assert (found.value, found.lower, found.upper) == pytest.approx((np.exp(change.mean()), lower, upper))
    rng = np.random.default_rng(6)
    times = np.exp(rng.normal(4, 0.01, (4, 6)) + rng.normal(0, 0.2, 6))
    speeds = rivals({f"e{n}": speed(b1=row.tolist()) for n, row in enumerate(times)})
    found = speeds["e0"].over(speeds["e1"])
    # Two-way analysis of variance, written out.
    logs = np.log(times)
    residual = logs - logs.mean(axis=1, keepdims=True) - logs.mean(axis=0) + logs.mean()
    sd = np.sqrt((residual**2).sum() / (3 * 5))
    half = stats.t.ppf(1 - LAST_RISK / 6 / 2, 15) * sd * np.sqrt(2 / 6)
    middle = (logs[0] - logs[1]).mean()
    assert found.upper == pytest.approx(np.exp(middle + half))
    assert found.lower == pytest.approx(np.exp(middle - half))
    # One batch size of two is one of two contests.
    both = rivals({f"e{n}": speed(b1=row.tolist(), b2=row.tolist()) for n, row in enumerate(times)})
    one, other = both["e0"].at(1), both["e1"].at(1)
    apart = one.over(other)
    half = stats.t.ppf(1 - LAST_RISK / 6 / 2 / 2, 15) * sd * np.sqrt(2 / 6)
    assert apart.upper == pytest.approx(np.exp(middle + half))


@pytest.mark.parametrize("engines", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 8))])
def test_equal_engines_are_seldom_told_apart_and_three_percent_at_a_deviation_of_one_percent(engines):
    rng = np.random.default_rng(engines)

    def drawn(deviation: float, first: float) -> dict[str, Speed]:
        times = np.exp(deviation * rng.standard_normal((engines, LOADS)) + 0.05 * rng.standard_normal(LOADS))
        times[0] *= first
        return rivals({f"e{n}": speed(b1=row.tolist()) for n, row in enumerate(times)})

    wrong = right = 0
    for _ in range(300):
        speeds = drawn(0.02, 1.0)
        fastest = min(speeds.values(), key=lambda each: each.per_row_us)
        wrong += any(each.is_slower(fastest, 0.01) for each in speeds.values() if each is not fastest)
        speeds = drawn(0.01, 0.97)
        right += speeds["e1"].is_slower(speeds["e0"], 0.01)
    # 1.6 % of 300, three standard errors up.
    assert wrong / 300 < LAST_RISK + 3 * np.sqrt(LAST_RISK / 300)
    assert right / 300 >= 0.8


def test_more_loads_are_for_those_between_which_the_first_leave_the_choice_open():
    def timed(*us: float) -> tuple[Latency, ...]:
        return (latency(8, list(us)), latency(16, [2 * each for each in us]))

    close = {"a": timed(103, 103, 98), "b": timed(101, 99, 100), "c": timed(200, 202, 198)}
    assert contenders(close, 0.01) == ("a", "b")
    # The first, the most exact one, is chosen unless it turns out slower: it does not look so.
    assert contenders({"b": close["b"], "a": close["a"]}, 0.01) == ()
    assert contenders({"a": timed(100, 101, 99), "b": close["b"]}, 0.01) == ()
    assert contenders({"a": close["a"], "c": close["c"]}, 0.01) == ()
    assert contenders({"a": close["a"]}, 0.01) == contenders({}, 0.01) == ()
    # One that failed at a size is out of the contest.
    assert contenders({**close, "d": close["a"][:1]}, 0.01) == ("a", "b")
    # The fastest of one size may be another than that of all sizes: it counts where sizes have their own,
    # and by the margin of those.
    small = {
        "a": (latency(1, [10.0, 10.1, 9.9]), latency(2, [40.0, 40.4, 39.6])),
        "b": (latency(1, [30.0, 30.3, 29.7]), latency(2, [21.0, 22.1, 19.9])),
        "c": (latency(1, [30.0, 29.7, 30.3]), latency(2, [20.1, 19.9, 20.0])),
    }
    assert contenders(small, 0.01, 0.03) == ("b", "c")
    assert contenders(small, 0.01, 0.06) == contenders(small, 0.01) == ()
    # An engine that is slower than the main one at a size gets no route there, told apart or not.
    noisy = {
        "a": (latency(1, [40.0, 40.4, 39.6]), latency(2, [43.0, 48.0, 42.0])),
        "b": (latency(1, [20.0, 20.2, 19.8]), latency(2, [40.0, 38.5, 41.5])),
    }
    speeds = rivals({name: Speed({item.batch: item for item in items}) for name, items in noisy.items()})
    assert speeds["a"].is_slower(speeds["b"], 0.01)
    assert not speeds["a"].at(2).is_slower(speeds["b"].at(2), 0.01)
    assert contenders(noisy, 0.01, 0.03) == ()


def test_an_engine_that_is_surely_slower_than_any_is_not_alike():
    """The fastest median is of an engine whose loads differ; another one is surely faster than the last."""
    loads = {
        "wild": [60.0] * 3 + [140.0] * 2 + [64.0],
        "fast": [70.0, 70.1, 69.9] * 2,
        "slow": [90.0, 90.1, 89.9] * 2,
    }
    speeds = {name: Speed({8: latency(8, us)}) for name, us in loads.items()}
    assert not speeds["slow"].is_slower(speeds["wild"], 0.01)
    assert not_slower(speeds, 0.01) == ["wild", "fast"]


def test_the_most_loads_are_for_those_that_look_apart_and_are_not_told_apart():
    """On a busy host, two of six loads took half as long again."""
    noisy = {
        "a": (latency(8, [100, 101, 150, 80, 160, 98]),),
        "b": (latency(8, [72, 110, 71, 85, 70, 72]),),
    }
    assert contenders(noisy, 0.01, least=0.05) == contenders(noisy, 0.01) == ("a", "b")
    alike = {
        "a": (latency(8, [100, 101, 150, 80, 160, 98]),),
        "b": (latency(8, [98, 120, 147, 70, 157, 110]),),
    }
    assert contenders(alike, 0.01) == ("a", "b")
    assert contenders(alike, 0.01, least=0.05) == ()
    quiet = [100 + 0.5 * (-1) ** n for n in range(MOST_LOADS - 6)]
    more = {
        "a": (latency(8, [*noisy["a"][0].loads_us, *quiet]),),
        "b": (latency(8, [*noisy["b"][0].loads_us, *(0.71 * each for each in quiet)]),),
    }
    speeds = rivals({name: Speed({item.batch: item for item in items}) for name, items in more.items()})
    assert speeds["a"].is_slower(speeds["b"], 0.01)


def test_engines_are_compared_by_the_least_time_of_each_load():
    rng = np.random.default_rng(3)

    def busy(us: float) -> Speed:
        medians = us * np.exp(rng.exponential(0.5, LOADS))
        least = us * np.exp(rng.normal(0.0, 0.002, LOADS))
        known = latency(8, medians.tolist())
        return Speed({8: replace(known, p50_us=us, least_us=tuple(least))})

    slow, fast = busy(103.0), busy(100.0)
    assert slow.is_slower(fast, 0.01)
    without = [Speed({8: replace(each.latencies[8], least_us=())}) for each in (slow, fast)]
    assert not without[0].is_slower(without[1], 0.01)

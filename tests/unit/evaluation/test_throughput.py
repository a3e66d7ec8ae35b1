"""The load generator against queueing theory, on a clock that the test owns, and on a real engine."""

import gc
import threading
from math import exp, factorial, log

import numpy as np
import pytest
from scipy.stats import binom
from virtual_clock import Server, VirtualClock, exponential

from loka_onnx.errors import EngineError
from loka_onnx.evaluation.throughput import (
    ALLOWED,
    FEWEST,
    Answers,
    LoadOptions,
    WallClock,
    _Search,
    find_highest_rate,
    offer,
    over_limit,
    poisson_arrivals,
)

INPUTS = ({"x": np.zeros(1)},)


def load(rate: float, count: int, seconds, streams: int = 1, seed: int = 1) -> Answers:
    clock = VirtualClock(streams)
    runs = [Server(clock, seconds) for _ in range(streams)]
    return offer(runs, INPUTS, poisson_arrivals(rate, count, seed), clock)


def test_arrivals_are_poisson_and_stretch():
    arrivals = poisson_arrivals(50.0, 20_000, seed=3)
    gaps = np.diff(arrivals)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    # The standard deviation of an exponential is its mean; of even gaps it would be 0.
    assert gaps.std() == pytest.approx(1 / 50, rel=0.03)
    np.testing.assert_allclose(poisson_arrivals(25.0, 20_000, seed=3), 2 * arrivals)
    assert not np.allclose(poisson_arrivals(50.0, 20_000, seed=4), arrivals)


@pytest.mark.parametrize("utilization", [0.3, 0.7])
def test_the_wait_of_a_constant_server_is_that_of_theory(utilization):
    """M/D/1: W = ρ/(2μ(1 − ρ)) (Pollaczek, Khinchine); service time 1 ms."""
    answers = load(1000 * utilization, 60_000, lambda: 1e-3)
    wait = np.mean(answers.latency_us) - 1000.0
    assert wait == pytest.approx(1000 * utilization / (2 * (1 - utilization)), rel=0.05)
    np.testing.assert_allclose(answers.service_us, 1000.0)
    assert answers.late_us.max() == pytest.approx(0.0, abs=1e-6)


def test_the_99th_percentile_of_a_random_server_is_that_of_theory():
    """M/M/1: the time in the system is exponential with rate μ − λ."""
    answers = load(500.0, 120_000, exponential(1e-3, seed=2))
    quantiles = np.percentile(answers.latency_us, [50, 99])
    # Neighbours in the queue are alike: 120,000 of them leave some 3 % at the 99th percentile.
    assert quantiles == pytest.approx([1e6 * log(2) / 500, 1e6 * log(100) / 500], rel=0.06)


def test_several_streams_share_one_queue():
    """M/M/2: mean wait = C(2, a)/(2μ − λ), Erlang's C; two queues of their own would wait far longer."""
    servers, load_of = 2, 1.4
    erlang_b = (load_of**servers / factorial(servers)) / sum(load_of**k / factorial(k) for k in range(3))
    erlang_c = erlang_b / (1 - load_of / servers * (1 - erlang_b))
    expected_us = 1e6 * erlang_c / (2000.0 - 1400.0)
    answers = load(1400.0, 6000, exponential(1e-3, seed=5), streams=servers)
    wait = float(np.mean(answers.latency_us - answers.service_us))
    # 6,000 requests through threads; seeds 1 to 8 were within 12 %. Two queues of their own: 2333 µs.
    assert wait == pytest.approx(expected_us, rel=0.2)


def test_latency_counts_from_the_arrival_that_was_intended():
    """A stall makes those behind it late; a generator that waits for answers would see one slow request."""
    clock = VirtualClock()
    times = iter([0.001] * 10 + [0.1] + [0.001] * 89)
    server = Server(clock, lambda: next(times))
    answers = offer([server], INPUTS, np.arange(1, 101) * 0.002, clock)
    # The stalled one arrives at 22 ms, is done at 122; the k-th behind it arrives 2k ms later, done k later.
    np.testing.assert_allclose(answers.latency_us[10:], 1000.0 * (100 - np.arange(90)))
    assert (answers.service_us > 10_000).sum() == 1
    np.testing.assert_allclose(answers.latency_us[:10], 1000.0, rtol=1e-6)


def test_without_pause_the_rate_is_the_capacity():
    clock = VirtualClock(2)
    found = offer([Server(clock, lambda: 0.004) for _ in range(2)], INPUTS, np.zeros(100), clock)
    assert 100 / found.seconds == pytest.approx(500.0, rel=1e-6)


def options(clock, **changes) -> LoadOptions:
    base = {"p99_us": 10_000.0, "requests": 20_000, "seconds": 1e9, "clock": clock}
    return LoadOptions(**{**base, **changes})


def test_the_highest_rate_of_a_random_server_is_that_of_theory():
    """M/M/1 with μ = 1000/s: exp(−(μ − λ)·10 ms) = 1 % at λ = 1000 − 100·ln 100 = 539.5."""
    clock = VirtualClock()
    told = []
    found = find_highest_rate(
        [Server(clock, exponential(1e-3, seed=7))],
        INPUTS,
        options(clock, on_trial=lambda: told.append(clock.now())),
    )
    exact = 1000 - 100 * log(100)
    assert exp(-(1000 - exact) * 0.01) == pytest.approx(0.01)
    assert found.capacity_per_s == pytest.approx(1000, rel=0.03)
    # The upper end is held under the limit, so that the rate lies below, by what 20,000 requests leave open.
    assert 0.85 * exact < found.requests_per_s < 1.01 * exact
    assert len(told) == len(found.trials)
    last = found.trials[-1]
    assert last.passed and last.rate_per_s == found.requests_per_s
    assert last.p99_us < 10_000 and last.over_upper <= ALLOWED


@pytest.mark.parametrize(("share", "passes"), [(0.05, True), (0.15, False)])
def test_the_queue_may_fill_for_a_tenth_of_a_trial(share, passes):
    """A slow start within the first tenth does not count; one that reaches beyond it does."""
    clock = VirtualClock()
    found = options(clock, requests=2000, p99_us=5000.0)
    before = 20 + 2000
    stalls, asked = range(before, before + int(share * 2000), 4), iter(range(10_000_000))
    # 1 ms, and 50 for some of the requests.
    server = Server(clock, lambda: 0.05 if next(asked) in stalls else 0.001)
    search = _Search([server], INPUTS, found)
    search.capacity()
    assert len(server.served) == before
    # 40 requests a second: the queue is empty again before the next one.
    assert search._try(15.0, 0).passed is passes


def test_no_rate_below_a_twentieth_of_the_capacity_is_tried():
    """Every second request takes 10 ms, the limit is half of that: nothing passes, however few arrive."""
    clock = VirtualClock()
    calls = iter(range(10_000_000))
    times = lambda: 0.01 if next(calls) % 50 == 0 else 0.001  # noqa: E731
    limits = options(clock, requests=FEWEST, p99_us=5000.0, steps=12)
    found = _Search([Server(clock, times)], INPUTS, limits)
    assert found.bisect(1000.0) == 0.0
    tried = sorted(trial.rate_per_s for trial in found.trials)
    # Half way down twelve times from the capacity, towards a twentieth of it.
    assert 50.0 < tried[0] < 50.5
    assert found.confirmed(49.9, 1000.0) == 0.0 and len(found.trials) == 13
    found.confirmed(50.1, 1000.0)
    assert len(found.trials) == 14, "0.95 of it is below"


@pytest.mark.parametrize(("seconds", "limit_us", "rate"), [(0.02, 10_000.0, 0.0), (0.001, 1e9, 1000.0)])
def test_what_is_slower_than_the_limit_alone_has_no_rate_and_without_a_queue_it_is_the_capacity(
    seconds, limit_us, rate
):
    clock = VirtualClock()
    limit = options(clock, p99_us=limit_us, requests=FEWEST)
    found = find_highest_rate([Server(clock, lambda: seconds)], INPUTS, limit)
    assert found.requests_per_s == pytest.approx(rate) and bool(found.trials) is bool(rate)
    assert found.capacity_per_s == pytest.approx(1 / seconds)


def test_a_result_of_luck_is_not_confirmed():
    """Stalls that the trials of the search do not meet: the confirmation lowers the rate, then gives up."""
    clock = VirtualClock()
    calls = iter(range(10_000_000))
    search = 20 + FEWEST + 7 * FEWEST

    def seconds() -> float:
        return 0.001 if next(calls) < search else 0.05

    limits = options(clock, requests=FEWEST, p99_us=5000.0)
    found = find_highest_rate([Server(clock, seconds)], INPUTS, limits)
    assert any(trial.passed for trial in found.trials[:7])
    assert found.requests_per_s == 0.0
    assert [t.rate_per_s for t in found.trials[8:]] == pytest.approx(
        [t.rate_per_s * 0.95 for t in found.trials[7:-1]]
    )


def test_the_same_seed_gives_the_same_result():
    def search(seed):
        clock = VirtualClock()
        server = Server(clock, exponential(1e-3, seed=7))
        return find_highest_rate([server], INPUTS, options(clock, requests=1000, seed=seed))

    assert search(3) == search(3)
    assert search(3) != search(4)


def test_the_upper_end_is_exact_for_independent_requests():
    late = np.zeros(1000)
    assert over_limit(late, 1.0, 0.95) == (0.0, pytest.approx(1 - 0.05 ** (1 / 1000)))
    late[::250] = 2.0
    share, upper = over_limit(late, 1.0, 0.95)
    assert share == 0.004
    # Clopper, Pearson: at that share, 4 or fewer of 1000 come with a probability of 5 %.
    assert binom.cdf(4, 1000, upper) == pytest.approx(0.05, rel=0.01)
    assert over_limit(np.full(50, 2.0), 1.0, 0.95) == (1.0, 1.0)


def test_late_requests_that_come_together_say_less():
    apart, together = np.zeros(4000), np.zeros(4000)
    apart[::100], together[:40] = 2.0, 2.0
    assert over_limit(apart, 1.0, 0.95)[0] == over_limit(together, 1.0, 0.95)[0] == 0.01
    assert over_limit(together, 1.0, 0.95)[1] > 1.5 * over_limit(apart, 1.0, 0.95)[1]


def test_an_engine_that_fails_ends_the_trial():
    started = []

    def bad(inputs):
        started.append(1)
        if len(started) == 5:
            raise EngineError("the worker died", evidence="signal 11")

    with pytest.raises(EngineError):
        offer([bad, bad], INPUTS, np.zeros(500), WallClock())
    assert len(started) < 20
    assert not [t for t in threading.enumerate() if t.name.startswith("stream-")]
    assert gc.isenabled()


def test_the_wall_clock_does_not_wake_early():
    clock = WallClock()
    for wait in (0.0, 0.0001, 0.002):
        moment = clock.now() + wait
        clock.sleep_until(moment)
        assert clock.now() >= moment
    clock.sleep_until(clock.now() - 1.0)

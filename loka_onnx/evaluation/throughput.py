"""Requests per second at a stated 99th percentile of latency, under concurrent load.

**Open loop.** Requests arrive whether or not earlier ones are answered: gaps are exponential (a Poisson
process, as of many independent users), drawn beforehand. A request's latency counts from its intended
arrival; a generator that waits for answers slows its own load down exactly when the engine is slow
("coordinated omission": Gil Tene, "How NOT to Measure Latency", 2013; Schroeder, Wierman, Harchol-Balter,
"Open Versus Closed: A Cautionary Tale", NSDI 2006). A free stream, which has a loaded copy of the engine and
a thread, takes the next arrival in order: a first-come, first-served queue with as many servers as streams.

**The verdict on a rate.** The 99th percentile is under the limit if at most 1 % of requests take longer.
Latencies of neighbours in a queue are alike, so the upper end of that share uses means of consecutive batches
of requests (Law, *Simulation Modeling and Analysis*, 5th edition, section 9.5.3), and is never below the
exact binomial one (Clopper and Pearson, 1934). The first part of a trial, while the queue fills, is left out.

**The highest rate** is found by bisection; all trials have the same arrivals, stretched in time. As the best
of several noisy trials, it is confirmed under other arrivals, and lowered until it holds there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import betaincinv, stdtrit

from loka_onnx.core.progress import collector_paused
from loka_onnx.core.throughput import Trial
from loka_onnx.evaluation.latency import Run

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

ALLOWED = 0.01
"""Share of requests that may take longer than the limit on a 99th percentile."""
BLOCKS = 20
"""Batches of consecutive requests that the spread is taken over."""
FILLING = 0.1
"""First part of a trial, in which the queue fills."""
FEWEST = 400
"""Fewest requests of a trial: 299 without a late one show a 99th percentile at 95 % confidence."""
LOWEST = 0.05
"""Lowest rate tried, as a part of the capacity: below, trials take long and the queue is empty."""
LOWERED = 0.95
"""Factor by which a rate that is not confirmed is lowered."""
_SPIN_SECONDS = 3e-4
"""A sleep may last this much too long; the rest is waited for without sleeping."""


class WallClock:
    """The time of this machine, which a test may replace."""

    def now(self) -> float:
        """Return seconds since some moment."""
        return time.perf_counter()

    def sleep_until(self, moment: float) -> None:
        """Sleep most of the time, and yield to other threads for the rest."""
        left = moment - self.now()
        if left > 2 * _SPIN_SECONDS:
            time.sleep(left - _SPIN_SECONDS)
        while self.now() < moment:
            time.sleep(0)


@dataclass(frozen=True)
class LoadOptions:
    """Limit of the 99th percentile, size of a trial, bisections, confidence (one-sided, of each verdict)."""

    p99_us: float
    requests: int = 5000
    seconds: float = 2.0
    steps: int = 6
    confirmations: int = 6
    confidence: float = 0.95
    seed: int = 0
    clock: WallClock = field(default_factory=WallClock, repr=False)
    on_trial: Callable[[], None] = field(default=lambda: None, repr=False)


@dataclass(frozen=True)
class Answers:
    """Outcomes of the requests of a trial, (requests,) in the order of arrival.

    `latency_us` counts from the intended arrival, `service_us` is the engine's own time. `late_us` is the
    wait for the generator: to the start from arrival, or from when the stream was free if that was later.
    """

    latency_us: Floats
    service_us: Floats
    late_us: Floats
    seconds: float


@dataclass(frozen=True)
class HighestRate:
    """Requests per second at the limit (0 where no rate is low enough) and without pause, and all trials."""

    requests_per_s: float
    capacity_per_s: float
    trials: tuple[Trial, ...]


def poisson_arrivals(rate_per_s: float, count: int, seed: int) -> Floats:
    """Return (count,) arrival times in seconds; the same ones for one seed, stretched by the rate."""
    gaps = np.random.default_rng(seed).exponential(size=count)
    return np.asarray(np.cumsum(gaps) / rate_per_s, dtype=np.float64)


def offer(
    runs: Sequence[Run], inputs: Sequence[Mapping[str, Array]], arrivals: Floats, clock: WallClock
) -> Answers:
    """Answer requests as they arrive; one of `runs` for each stream, `inputs` in turns.

    `arrivals` are (requests,) rising times in seconds. Raises StageError if an engine fails.
    """
    queue = _Queue(arrivals, clock)
    threads = [
        threading.Thread(target=queue.serve, args=(run, inputs), name=f"stream-{number}", daemon=True)
        for number, run in enumerate(runs)
    ]
    with collector_paused():
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:
            # An interrupt reaches only the waiting thread: stop the streams too.
            queue.stop()
            raise
    for error in queue.errors:
        raise error
    return queue.answers()


def over_limit(latency_us: Floats, limit_us: float, confidence: float) -> tuple[float, float]:
    """Return the share of requests (in order of arrival) beyond a limit, and its one-sided upper end."""
    over = latency_us > limit_us
    count, total = int(over.sum()), over.size
    binomial = 1.0 if count == total else float(betaincinv(count + 1, total - count, confidence))
    means = np.array([block.mean() for block in np.array_split(over, min(BLOCKS, total))])
    spread = float(means.std(ddof=1)) / sqrt(means.size) if means.size > 1 else 0.0
    batched = float(means.mean()) + float(stdtrit(max(means.size - 1, 1), confidence)) * spread
    return count / total, min(1.0, max(binomial, batched))


def find_highest_rate(
    runs: Sequence[Run], inputs: Sequence[Mapping[str, Array]], options: LoadOptions
) -> HighestRate:
    """Return the highest rate whose 99th percentile is under the limit; `runs` and `inputs` as in `offer`."""
    search = _Search(runs, inputs, options)
    capacity, is_hopeless = search.capacity()
    if is_hopeless:
        return HighestRate(0.0, capacity, ())
    rate = search.bisect(capacity)
    return HighestRate(search.confirmed(rate, capacity), capacity, tuple(search.trials))


class _Queue:
    def __init__(self, arrivals: Floats, clock: WallClock) -> None:
        self._arrivals, self._clock = arrivals, clock
        self._lock, self._next = threading.Lock(), 0
        self._start: float | None = None
        self._latency, self._service, self._late = (np.zeros(arrivals.size) for _ in range(3))
        self._end = 0.0
        self.errors: list[BaseException] = []

    def serve(self, run: Run, inputs: Sequence[Mapping[str, Array]]) -> None:
        """Run one stream: take arrivals in order until there are none, or an engine has failed."""
        try:
            free = self._begin()
            while (place := self._take()) is not None:
                due = self._begin() + float(self._arrivals[place])
                self._clock.sleep_until(due)
                began = self._clock.now()
                run(inputs[place % len(inputs)])
                done = self._clock.now()
                self._latency[place], self._service[place] = done - due, done - began
                self._late[place] = began - max(due, free)
                free = done
                with self._lock:
                    self._end = max(self._end, done)
        except BaseException as error:  # raised by the waiting thread
            self.errors.append(error)

    def stop(self) -> None:
        """Let no further request start."""
        with self._lock:
            self._next = self._arrivals.size

    def answers(self) -> Answers:
        seconds = self._end - self._begin()
        return Answers(self._latency * 1e6, self._service * 1e6, self._late * 1e6, seconds)

    def _begin(self) -> float:
        """Return the moment that arrivals count from: the first stream was ready."""
        with self._lock:
            if self._start is None:
                self._start = self._clock.now()
            return self._start

    def _take(self) -> int | None:
        with self._lock:
            if self._next == self._arrivals.size or self.errors:
                return None
            self._next += 1
            return self._next - 1


class _Search:
    def __init__(
        self, runs: Sequence[Run], inputs: Sequence[Mapping[str, Array]], options: LoadOptions
    ) -> None:
        self._runs, self._inputs, self._options = runs, inputs, options
        self.trials: list[Trial] = []

    def capacity(self) -> tuple[float, bool]:
        """Return requests per second without pause, and whether the engine alone is slower than the limit."""
        options = self._options
        warm = self._without_pause(20 * len(self._runs))
        measured = self._without_pause(self._count(20 * len(self._runs) / warm.seconds))
        over = measured.service_us > options.p99_us
        # Under load a request takes no less, so a share that is surely too large stays so.
        count, total = int(over.sum()), over.size
        least = float(betaincinv(count, total - count + 1, 1.0 - options.confidence)) if count else 0.0
        return measured.latency_us.size / measured.seconds, least > ALLOWED

    def bisect(self, capacity: float) -> float:
        """Return the highest rate that passes; 0 where none does."""
        if self._try(capacity, self._options.seed).passed:
            return capacity
        low, high, best = LOWEST * capacity, capacity, 0.0
        for _ in range(self._options.steps):
            middle = (low + high) / 2.0
            if self._try(middle, self._options.seed).passed:
                low = best = middle
            else:
                high = middle
        return best

    def confirmed(self, rate: float, capacity: float) -> float:
        """Return the rate, lowered until it passes under other arrivals; 0 where none does."""
        for attempt in range(self._options.confirmations + 1):
            if rate < LOWEST * capacity:
                return 0.0
            if self._try(rate, self._options.seed + 1 + attempt).passed:
                return rate
            rate *= LOWERED
        return 0.0

    def _without_pause(self, count: int) -> Answers:
        return offer(self._runs, self._inputs, np.zeros(count), self._options.clock)

    def _try(self, rate: float, seed: int) -> Trial:
        options = self._options
        count = self._count(rate)
        arrivals = poisson_arrivals(rate, count, seed)
        answers = offer(self._runs, self._inputs, arrivals, options.clock)
        settled = slice(int(FILLING * count), None)
        latency_us = answers.latency_us[settled]
        over, upper = over_limit(latency_us, options.p99_us, options.confidence)
        p50, p99 = np.percentile(latency_us, [50, 99])
        late = float(np.percentile(answers.late_us[settled], 99))
        trial = Trial(rate, count, float(p50), float(p99), over, upper, late, upper <= ALLOWED)
        self.trials.append(trial)
        options.on_trial()
        return trial

    def _count(self, rate: float) -> int:
        options = self._options
        return max(FEWEST, min(options.requests, round(rate * options.seconds)))

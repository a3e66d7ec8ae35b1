"""Time that passes only while everybody sleeps, and engines that take a drawn time of it.

The load generator runs as it is, threads included; only the clock is another.
"""

import threading
from collections.abc import Callable

import numpy as np

from loka_onnx.evaluation.throughput import WallClock


class VirtualClock(WallClock):
    """A clock that jumps to the next moment at which a thread wakes, once all threads sleep.

    Args:
        threads: How many sleep on it at a time; time stands still until all of them have come.
    """

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        self._now = 0.0
        self._changed = threading.Condition()
        self._known: set[threading.Thread] = set()
        self._wakes: dict[threading.Thread, float] = {}

    def now(self) -> float:
        return self._now

    def sleep_until(self, moment: float) -> None:
        if self.threads == 1:
            self._now = max(self._now, moment)
            return
        me = threading.current_thread()
        with self._changed:
            self._known.add(me)
            self._wakes[me] = max(moment, self._now)
            while True:
                self._advance()
                if self._wakes[me] <= self._now:
                    del self._wakes[me]
                    return
                # A thread that has ended tells nobody: look again before long.
                self._changed.wait(0.001)

    def _advance(self) -> None:
        ended = {thread for thread in self._known if not thread.is_alive()}
        if len(ended) == self.threads:
            self._known -= ended
            ended = set()
        awake = len(self._known - ended) - len(self._wakes)
        if len(self._known) == self.threads and awake == 0:
            self._now = max(self._now, min(self._wakes.values()))
            self._changed.notify_all()


class Server:
    """An engine that takes a time of its own on a virtual clock.

    Args:
        clock: The clock.
        seconds: Gives the time of the next request.
    """

    def __init__(self, clock: VirtualClock, seconds: Callable[[], float]) -> None:
        self.clock, self.seconds = clock, seconds
        self.served: list[float] = []

    def __call__(self, inputs: object) -> None:
        self.served.append(self.clock.now())
        self.clock.sleep_until(self.clock.now() + self.seconds())


def exponential(mean: float, seed: int) -> Callable[[], float]:
    """Draws of an exponential time."""
    random = np.random.default_rng(seed)
    left: list[float] = []

    def draw() -> float:
        if not left:
            left.extend(random.exponential(mean, 10_000).tolist())
        return left.pop()

    return draw

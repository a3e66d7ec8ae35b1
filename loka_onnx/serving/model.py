"""The engine that is served: what is said of it, its answers, and how it fares."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from loka_onnx.errors import EngineError
from loka_onnx.runtime import Engine, Health
from loka_onnx.serving.bodies import Body, unpack
from loka_onnx.serving.protocol import Card, InferAnswer, read_request, write_answer

VERSION = "1"
"""A server has one bundle, and a bundle has no number of its own; Triton's begin with 1."""

HEALTH_SECONDS = 10.0
"""How long the result of a self-test counts, so that a probe of every second costs nothing."""


@dataclass
class Tally:
    """Number of times that something happened, and the time that it took together.

    Attributes:
        count: How often.
        ns: Nanoseconds.
    """

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        """Count one more."""
        self.count += 1
        self.ns += ns


class ServedModel:
    """An engine under a name; answers requests in any number of threads.

    Args:
        engine: The engine.
        name: What it is called in URLs.

    Attributes:
        engine: The engine.
        card: What is said of it.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine = engine
        kind = PurePosixPath(engine.entry.path).suffix.lstrip(".") or "engine"
        platform = f"{engine.entry.backend}_{kind}"
        self.card = Card(name, VERSION, platform, tuple(engine.inputs), tuple(engine.outputs))
        self._lock = threading.Lock()
        self._tallies = {name: Tally() for name in ("success", "fail", "queue", "compute_infer")}
        self._rows = 0
        self._last_ms = 0
        self._testing = threading.Lock()
        self._health = engine.health()
        self._tested = time.monotonic()

    def answer(self, body: Body, most_bytes: int, queued_ns: int) -> InferAnswer:
        """Answers a request.

        Args:
            body: Its body.
            most_bytes: Largest size of the body, unpacked.
            queued_ns: How long it has waited for this thread.

        Raises:
            HTTPException: 413, it unpacks to more; 503, to more than the server holds.
            DataError: The request is wrong.
            EngineError: The engine fails on it.
        """
        began = time.perf_counter_ns()
        rows, infer_ns, done = 0, 0, False
        try:
            request = read_request(unpack(body, most_bytes), body.header_length, self.card)
            called = time.perf_counter_ns()
            values = self.engine.infer(request.inputs)
            infer_ns = time.perf_counter_ns() - called
            rows = len(next(iter(request.inputs.values())))
            found = write_answer(request, values, self.card)
            done = True
            return found
        except EngineError:
            # The next probe tests it again, whatever the last one found.
            self._tested = float("-inf")
            raise
        finally:
            with self._lock:
                took = time.perf_counter_ns() - began
                self._tallies["success" if done else "fail"].add(took + queued_ns)
                if done:
                    self._tallies["queue"].add(queued_ns)
                    self._tallies["compute_infer"].add(infer_ns)
                    self._rows += rows
                    self._last_ms = time.time_ns() // 1_000_000

    @property
    def last_health(self) -> Health:
        """What the last self-test found."""
        return self._health

    def health(self) -> Health:
        """What a self-test finds now, or found within the last `HEALTH_SECONDS`."""
        with self._testing:
            if time.monotonic() - self._tested > HEALTH_SECONDS:
                # The time first: a failure meanwhile asks for the next test.
                self._tested = time.monotonic()
                self._health = self.engine.health()
            return self._health

    def statistics(self) -> dict[str, Any]:
        """The model's element of Triton's statistics extension: counts and nanoseconds since the start."""
        with self._lock:
            return {
                "name": self.card.name,
                "version": self.card.version,
                "last_inference": self._last_ms,
                "inference_count": self._rows,
                "execution_count": self._tallies["success"].count,
                "inference_stats": {
                    name: {"count": tally.count, "ns": tally.ns} for name, tally in self._tallies.items()
                },
            }

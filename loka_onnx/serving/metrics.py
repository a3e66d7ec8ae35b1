"""What `/metrics` says: of the server, and of its engine (`loka_onnx.runtime.metrics`)."""

from __future__ import annotations

from loka_onnx.runtime import Engine

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
"""Upper bounds of the latency histogram; a ranker has milliseconds."""


class Meter:
    """Counts answers; in a registry of its own, so that a process may have several.

    Args:
        engine: Whose metrics are shown as well.
    """

    def __init__(self, engine: Engine) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self._registry = CollectorRegistry()
        self._answers = Counter(
            "loka_onnx_serve_answers",
            "Inference requests that were answered.",
            ["status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "loka_onnx_serve_seconds",
            "From the head of an inference request to its answer.",
            buckets=SECONDS,
            registry=self._registry,
        )
        self._waiting = Gauge(
            "loka_onnx_serve_waiting", "Inference requests that wait or run.", registry=self._registry
        )
        self._registry.register(engine.metrics)

    def count(self, status: int, seconds: float) -> None:
        """Count an answer."""
        self._answers.labels(str(status)).inc()
        self._seconds.observe(seconds)

    def text(self, waiting: int) -> bytes:
        """All metrics, in the text format 0.0.4.

        Args:
            waiting: Requests that wait or run.
        """
        from prometheus_client import generate_latest

        self._waiting.set(waiting)
        return generate_latest(self._registry)

"""Loading a bundle on a fleet host; imports nothing heavier than it needs."""

from loka_onnx.runtime.engine import Engine, Serving
from loka_onnx.runtime.health import Cause, Health, Skipped
from loka_onnx.runtime.loading import load
from loka_onnx.runtime.metrics import Metrics, Snapshot

__all__ = ["Cause", "Engine", "Health", "Metrics", "Serving", "Skipped", "Snapshot", "load"]

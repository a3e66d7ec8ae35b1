"""Loading a bundle on a fleet host; imports nothing heavier than it needs."""

from loka_onnx.runtime.engine import Engine, Health, Skipped
from loka_onnx.runtime.loading import load

__all__ = ["Engine", "Health", "Skipped", "load"]

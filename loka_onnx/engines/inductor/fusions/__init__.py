"""What the compiler does not fuse by itself, written into the planned graph as nodes of a domain of our own.

One fusion per file. Each has a docstring with its algebra, takes a `PlannedGraph`, edits it, and returns what
it fused and what it declined. `fuse` runs them all.
"""

from loka_onnx.engines.inductor.fusions.base import DOMAIN, Fused, FusionReport
from loka_onnx.engines.inductor.fusions.sequence import fuse

__all__ = ["DOMAIN", "Fused", "FusionReport", "fuse"]

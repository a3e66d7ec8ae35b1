"""Fusions that the compiler does not find, written into the planned graph as nodes of an own domain.

One fusion per file; its docstring states the algebra. It edits a `PlannedGraph` and returns what it fused and
declined. `fuse` runs them all.
"""

from loka_onnx.engines.inductor.fusions.base import DOMAIN, Fused, FusionReport
from loka_onnx.engines.inductor.fusions.sequence import fuse

__all__ = ["DOMAIN", "Fused", "FusionReport", "fuse"]

"""All lowered operators: importing the modules registers them; others are declined with a reason."""

from __future__ import annotations

from loka_onnx.engines.inductor.lowering import (
    comparisons,
    elementwise,
    indexing,
    movement,
    norms,
    padding,
    pooling,
    products,
    quantization,
    reductions,
    shape_arithmetic,
)
from loka_onnx.engines.inductor.lowering.registry import OPERATORS

__all__ = ["OPERATORS"]

MODULES = (
    comparisons,
    elementwise,
    indexing,
    movement,
    norms,
    padding,
    pooling,
    products,
    quantization,
    reductions,
    shape_arithmetic,
)
"""Modules that register their functions on import."""

OPERATORS.decline(
    "If", "Loop", "Scan", "SequenceMap", reason="control flow that depends on the elements of tensors"
)
OPERATORS.decline("NonZero", "Compress", "Unique", reason="the shape of its result depends on elements")
OPERATORS.decline(
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
    "Bernoulli",
    "Multinomial",
    reason="it draws random numbers, which differ between engines",
)

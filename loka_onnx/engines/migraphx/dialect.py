"""Form of a planned model that MIGraphX honours, rule by rule.

Behaviour of MIGraphX 2.15 and 2.16 on an unchanged planned model, and the rule that prevents it:

====================================================================  =====================================
behaviour                                                             rule
====================================================================  =====================================
FLOAT8E4M3FN does not parse                                           `to_fnuz`, `to_carrier`
Q/DQ without a zero point: deleted, the model runs unquantized        `explicit_zero_points`
a scale of shape (1,) throws; FP8 in ``int32_data`` read as numbers   `rank_0_scales`
FP16 scales compute garbage, BF16 factors of an FP8 product throw     `float32_products`
scales with an axis: silently the wrong axis (2.15), throws (2.16)    `scales_behind_products`
the bias of a Gemm stands before the scales of its channels           `gemm_to_matmul`
a residual beside a Q is replaced by its rounded values               `separate_sources`
RMSNormalization does not parse                                       `decompose_rms_norms`
====================================================================  =====================================

A GPU drops pairs that are around no product. Plans for this backend have none: it is unknown what it moves in
FP8, so that pairs stay at their products (`core.fusions`). A program is never passed to ``quantize_*`` or
``optimize_module``, which remove its pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import onnx

from loka_onnx.core.devices import AMD, CPU
from loka_onnx.engines.migraphx.draft import GraphDraft
from loka_onnx.engines.migraphx.norms import decompose_rms_norms
from loka_onnx.engines.migraphx.pairs import (
    explicit_zero_points,
    rank_0_scales,
    separate_sources,
    to_carrier,
    to_fnuz,
)
from loka_onnx.engines.migraphx.products import float32_products, gemm_to_matmul, scales_behind_products


class Float8Form(StrEnum):
    """Form of FP8 for the device."""

    FNUZ = "fnuz"
    """E4M3FNUZ, which the device multiplies."""
    CARRIER = "carrier"
    """E4M3FN bits that are parsed as E4M3FNUZ and retyped as E4M3FN afterwards."""


FORMS: Mapping[str, Float8Form] = {
    "gfx942": Float8Form.FNUZ,
    "gfx950": Float8Form.CARRIER,
    "gfx1201": Float8Form.CARRIER,
    # The reference target computes either; E4M3FNUZ needs no retyping.
    CPU: Float8Form.FNUZ,
}
"""Architectures whose products take FP8. gfx90a and gfx11 multiply FP32 where the graph has FP8, as a gfx950
does with FNUZ."""
ARCHITECTURES = frozenset({CPU, *(each for several in AMD.values() for each in several)})


def write_dialect(model: onnx.ModelProto, folder: Path, form: Float8Form) -> onnx.ModelProto:
    """Rewrite a planned model for MIGraphX.

    Args:
        model: The planned model; not changed. Its external data stays external unless a rule changes it.

    Raises:
        ModelError: A planned product has a form that MIGraphX cannot honour.
    """
    draft = GraphDraft(model, folder)
    explicit_zero_points(draft)
    rank_0_scales(draft)
    products = gemm_to_matmul(draft)
    scales_behind_products(draft, products)
    float32_products(draft, products)
    separate_sources(draft)
    if form is Float8Form.FNUZ:
        to_fnuz(draft)
    else:
        to_carrier(draft)
    decompose_rms_norms(draft)
    return draft.finished()

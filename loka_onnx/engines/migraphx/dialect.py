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

A GPU drops pairs that are around no product; plans for this backend have none (`core.backends`). A program is
never passed to ``quantize_*`` or ``optimize_module``, which remove its pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from enum import StrEnum
from pathlib import Path

import numpy as np
import onnx

from loka_onnx.core.devices import CPU
from loka_onnx.engines.draft import GraphDraft, attribute
from loka_onnx.engines.migraphx.pairs import (
    explicit_zero_points,
    rank_0_scales,
    separate_sources,
    to_carrier,
    to_fnuz,
)
from loka_onnx.engines.migraphx.products import (
    FLOAT,
    float32_products,
    gemm_to_matmul,
    scales_behind_products,
)
from loka_onnx.errors import ModelError


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
"""Architectures whose products take FP8. gfx90a and gfx11 multiply FP32, as gfx950 does with FNUZ."""


def write_dialect(model: onnx.ModelProto, folder: Path, form: Float8Form) -> onnx.ModelProto:
    """Return a planned model rewritten for MIGraphX; data stays external unless a rule changes it."""
    draft = GraphDraft(deepcopy(model), folder)
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


def decompose_rms_norms(draft: GraphDraft) -> None:
    """Decompose RMSNormalization as ONNX defines it, statistics in FP32 (operator set 23, function body).

    ::

        y = x / √(mean(x²) + ε) · scale        the mean over the axes from `axis` on

    x is cast to FP32 before it is squared, and the quotient back afterwards, as `stash_type` says; the scale
    is multiplied in the graph's own type. MIGraphX parses LayerNormalization, but not RMSNormalization.
    """
    for node in [node for node in draft.nodes if node.op_type == "RMSNormalization"]:
        _decompose(draft, node)


def _decompose(draft: GraphDraft, node: onnx.NodeProto) -> None:
    x, scale = node.input[0], node.input[1]
    if attribute(node, "stash_type", FLOAT) != FLOAT or scale not in draft.constants:
        raise ModelError(
            "E0849 an RMSNormalization cannot be decomposed",
            where=f"node '{node.name}'",
            evidence="its statistics are not FP32, or its scale is computed",
            remedy="keep the statistics in FP32 (stash_type 1) and the scale a constant",
        )
    kind, axes = draft.kind(scale), _axes(draft, node)
    name = node.name

    def add(op: str, inputs: list[str], what: str, **attributes: int) -> str:
        return draft.insert(node, op, inputs, f"{name}/{what}", **attributes)

    def number(what: str, value: float) -> str:
        return draft.add_constant(f"{name}/{what}", np.array(value, np.float32))

    wide = x if kind == FLOAT else add("Cast", [x], "to_fp32", to=FLOAT)
    squared = add("Mul", [wide, wide], "squared")
    along = draft.add_constant(f"{name}/axes", np.array(axes, np.int64))
    mean = add("ReduceMean", [squared, along], "mean", keepdims=1)
    shifted = add("Add", [mean, number("epsilon", attribute(node, "epsilon", 1e-5))], "shifted")
    normed = add("Div", [wide, add("Sqrt", [shifted], "root")], "normed")
    if kind != FLOAT:
        normed = add("Cast", [normed], "to_base", to=kind)
    # The last operator keeps the norm's name, which identifies its site.
    node.op_type = "Mul"
    del node.attribute[:]
    node.input[0] = normed


def _axes(draft: GraphDraft, node: onnx.NodeProto) -> list[int]:
    axis = int(attribute(node, "axis", -1))
    if axis < 0:
        return list(range(axis, 0))
    rank = draft.rank(node.input[0])
    if rank is None:
        raise ModelError(
            "E0850 the axes of an RMSNormalization cannot be told",
            where=f"node '{node.name}'",
            evidence=f"axis {axis} of a tensor of unknown rank",
            remedy="count the axis from the end, as in axis=-1",
        )
    return list(range(axis - rank, 0))

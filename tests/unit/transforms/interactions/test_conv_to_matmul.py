"""Convolutions of kernel size 1 become products with a weight on the left; others stay, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from rewrite_models import op_types
from shape_cases import CONVOLUTIONS
from shape_models import Case, match, rewrite

from loka_onnx.core.site import SiteKind
from loka_onnx.transforms.interactions.conv_to_matmul import ConvToMatMul


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_every_form_becomes_a_product(case: str, tmp_path: Path) -> None:
    done = rewrite(CONVOLUTIONS[case].model(), ConvToMatMul(), tmp_path)
    operators = op_types(done.after)
    assert "Conv" not in operators
    assert "Transpose" not in operators
    (site,) = done.artifact.sites
    (product,) = [node for node in done.after.graph.node if node.op_type == "MatMul"]
    assert (site.name, site.kind, site.op_type) == (product.name, SiteKind.LINEAR, "MatMul")
    assert site.name.endswith(".conv")
    assert site.weight is not None
    assert (site.weight.index, site.k) == (0, 16)
    assert site.is_fp8_able
    # The engine adds in the same order: not a bit moves.
    assert done.record.max_abs == 0.0


def test_the_operations_are_those_of_the_convolution(tmp_path: Path) -> None:
    done = rewrite(CONVOLUTIONS["of_pixels"].model(), ConvToMatMul(), tmp_path)
    assert done.artifact.fp8_able_flops == 2 * 16 * 24 * 6
    assert done.artifact.other_products == ()


LEFT_ALONE = {
    "kernel": ("Conv(x, w)", {"w": (24, 16, 3)}, 4, "its kernel is 3, not 1"),
    "groups": ("Conv<group=2>(x, w)", {"w": (24, 8, 1)}, 6, "it has group [2]"),
    "strides": ("Conv<strides=[2]>(x, w)", {"w": (24, 16, 1)}, 3, "it has strides [2]"),
    "padding": ("Conv<pads=[1, 1]>(x, w)", {"w": (24, 16, 1)}, 8, "it has pads [1, 1]"),
    "few": ("Conv(x, w)", {"w": (15, 16, 1)}, 6, "16 → 15 channels: FP8 products begin at 16"),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_others_are_left_alone_with_the_reason(case: str, tmp_path: Path) -> None:
    body, weights, positions, reason = LEFT_ALONE[case]
    channels = weights["w"][0]
    model = Case(
        f"y = {body}", weights, "float[batch,16,6] x", outputs=f"float[batch,{channels},{positions}] y"
    )
    found = match(model.model(), ConvToMatMul(), tmp_path)
    assert found.matches == ()
    assert [each.reason for each in found.declined] == [reason]


def test_a_computed_weight_stays(tmp_path: Path) -> None:
    model = Case("s = Relu(w) y = Conv(x, v)", {"w": (24, 16, 1)}, "float[batch,16,6] x, float[24,16,1] v")
    found = match(model.model(), ConvToMatMul(), tmp_path)
    assert [each.reason for each in found.declined] == ["its weight or its bias is computed"]

"""Which biases move in front of a Split, and that the graph computes the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

from fusion_models import BATCH, BF16, RANDOM, Model, bf16, fused, ops, unchanged

from loka_onnx.engines.inductor.fusions import DOMAIN

TOKENS, WIDTH, PARTS = 6, 32, (16, 32)


def merged(
    *,
    axis: int = -1,
    bias: tuple[int, ...] = (PARTS[1],),
    kept: str = "",
    leads: bool = True,
    bare: bool = False,
) -> Model:
    """Two linears merged into one product; the bias of the second one is of a given shape."""
    model = Model((TOKENS, WIDTH)).constant("w", bf16(WIDTH, sum(PARTS), scale=0.2))
    sizes = PARTS if axis in {-1, 2} else (2, 4)
    model.constant("sizes", np.array(sizes, np.int64))
    model.add("MatMul", ["x", "w"], "all", name="project").add(
        "Split", ["all", "sizes"], "a b", "parts", axis=axis
    )
    width = sum(PARTS) if axis == 1 else PARTS[0]
    model.constant("ba", bf16(width)).constant("bb", bf16(*bias))
    model.add("Add", ["a", "ba"] if leads else ["ba", "a"], "ya").add("Add", ["b", "bb"], "yb")
    model.outputs = ("ya", "yb", *([kept] if kept else []))
    if bare:
        model.nodes.pop()
        model.outputs = ("ya", "b")
    return model


def numbers() -> np.ndarray:
    return RANDOM.standard_normal((BATCH, TOKENS, WIDTH)).astype(BF16).astype(np.float32)


@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.parametrize(("axis", "bias"), [(-1, (32,)), (2, (32,)), (-1, (1, 1, 32))], ids=str)
def test_biases_become_one_of_the_product(
    axis: int, bias: tuple[int, ...], leads: bool, tmp_path: Path
) -> None:
    model = merged(axis=axis, bias=bias, leads=leads)
    graph, report = fused(model, tmp_path)
    assert [place.name for place in report.fused["merged-bias"]] == ["parts/biased"]
    left = ops(graph)
    assert left.count(f"{DOMAIN}::HalfProduct") == left.count("Split") == 1
    assert "Add" not in left
    unchanged(model, tmp_path, numbers())


@pytest.mark.parametrize(
    "model",
    [
        merged(axis=1, bias=(sum(PARTS),)),
        merged(bias=(1,)),
        merged(bias=(TOKENS, 32)),
        merged(kept="b"),
        merged(kept="all"),
        merged(bare=True),
    ],
    ids=["other axis", "one number", "of tokens", "part is an output", "product is an output", "no bias"],
)
def test_other_sums_stay_where_they_are(model: Model, tmp_path: Path) -> None:
    assert "merged-bias" not in unchanged(model, tmp_path, numbers()).fused


def test_a_split_that_leaves_an_output_out_keeps_its_biases(tmp_path: Path) -> None:
    """Their widths would be of other columns."""
    model = (
        Model((TOKENS, WIDTH)).constant("w", bf16(WIDTH, 2, scale=0.2)).constant("sizes", np.array([1, 1]))
    )
    model.add("MatMul", ["x", "w"], "all", name="project").add("Split", ["all", "sizes"], "a b", axis=-1)
    model.nodes[-1].output[0] = ""
    model.constant("bb", bf16(1)).add("Add", ["b", "bb"], "y")
    _, report = fused(model, tmp_path)
    assert "merged-bias" not in report.fused

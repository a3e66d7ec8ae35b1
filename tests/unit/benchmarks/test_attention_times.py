"""What `benchmarks.engines.attention_times` compares, and what it concludes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.engines.attention_times import (  # noqa: E402
    FARTHEST,
    FORMS,
    FUSED,
    SHAPES,
    WRITTEN,
    Shape,
    crossover,
    drawn,
    exact,
    figures_of,
    graph_of,
    verdict,
)
from loka_onnx.engines.inductor.fusions import fuse  # noqa: E402
from loka_onnx.engines.inductor.fusions.attention import LEAST, OP  # noqa: E402
from loka_onnx.engines.inductor.fusions.planned import PlannedGraph  # noqa: E402
from loka_onnx.engines.inductor.lowering.model import lower  # noqa: E402


def measured(shape: Shape, fused_us: float, written_us: float) -> dict[str, Any]:
    times = {
        form: {"median_us": us, "low_us": us - 1.0, "high_us": us + 1.0}
        for form, us in ((FUSED, fused_us), (WRITTEN, written_us))
    }
    return {"products": shape.products, "times": times, "fused is": verdict(times)}


def test_shapes_lie_on_both_sides_of_the_threshold() -> None:
    heads = {shape.head for shape in SHAPES}
    assert len(SHAPES) <= 13
    for head in heads:
        products = [shape.products for shape in SHAPES if shape.head == head]
        assert min(products) < LEAST <= max(products)


def test_interformer_is_among_them() -> None:
    assert {Shape(1024, 8, 104, 104, 16), Shape(1024, 8, 2, 100, 16)} <= set(SHAPES)


@pytest.mark.parametrize("form", FORMS)
def test_both_forms_compute_attention(form: str, tmp_path: Path) -> None:
    shape = Shape(3, 2, 4, 6, 8)
    onnx.save(graph_of(shape, form), os.fspath(tmp_path / "model.onnx"))
    inputs = drawn(shape, torch.device("cpu"))
    (found,) = lower(tmp_path / "model.onnx")(*inputs)
    right = exact(shape, inputs)
    off = (found.double() - right).square().mean().sqrt() / right.square().mean().sqrt()
    assert found.shape == (3, 4, 16)
    assert off < FARTHEST
    q, k, v = inputs
    assert (exact(shape, (q, k.roll(1, 0), v)) - right).square().mean() > (FARTHEST * right).square().mean()


def test_the_fusion_makes_the_one_of_the_other(tmp_path: Path) -> None:
    shape = Shape(2, 2, 60, 60, 8)
    for form in FORMS:
        onnx.save(graph_of(shape, form), os.fspath(tmp_path / f"{form}.onnx"))
    graph = PlannedGraph.load(tmp_path / f"{WRITTEN}.onnx")
    assert "attention" in fuse(graph).fused
    made, wanted = (
        {(node.domain, node.op, tuple(t.name for t in node.inputs if t)) for node in each.live_nodes()}
        for each in (graph, PlannedGraph.load(tmp_path / f"{FUSED}.onnx"))
    )
    assert made == wanted
    (scale,) = (node.attrs["scale"] for node in graph.nodes if node.op == OP.rpartition("::")[2])
    assert scale == pytest.approx(8**-0.5, rel=2.0**-8)


def test_even_is_not_faster() -> None:
    few, some, many = (Shape(1, 1, n, 100, 8) for n in (10, 20, 40))
    found = [measured(few, 9.0, 20.0), measured(some, 20.0, 20.5), measured(many, 20.0, 30.0)]
    assert [each["fused is"] for each in found] == ["faster", "even", "faster"]
    assert crossover(found) == {"not faster up to": 2000, "faster from": 4000}
    assert crossover(found[2:]) == {"not faster up to": None, "faster from": 4000}
    assert crossover(found[1:2]) == {"not faster up to": 2000, "faster from": None}


def test_where_the_threshold_is_wrong() -> None:
    few, many = Shape(1, 1, 5, 300, 8), Shape(1, 1, 40, 300, 8)
    right = {few: measured(few, 30.0, 20.0), many: measured(many, 20.0, 30.0)}
    wrong = {few: measured(few, 20.0, 30.0), many: measured(many, 30.0, 20.0)}
    assert figures_of(right)["slower form chosen"] == []
    assert [each["queries"] for each in figures_of(wrong)["slower form chosen"]] == [5, 40]

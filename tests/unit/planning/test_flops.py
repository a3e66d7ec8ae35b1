"""Zeros that mods put into weights are no arithmetic of the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.sites import find_sites
from loka_onnx.planning.costs import useful_flops

TEXT = """<ir_version: 10, opset_import: ["" : 21]> g (float[batch,32] x, float[batch,2,32] z)
=> (float[batch,48] y, float[batch,2,48] u) {
[fc] y = Gemm<transB=1>(x, wt)
[towers] u = MatMul(z, w)
}"""


def flops(w: np.ndarray, tmp_path: Path) -> dict[str, int]:  # type: ignore[type-arg]
    model = onnx.parser.parse_model(TEXT)
    for name, values in (("w", w), ("wt", np.ascontiguousarray(w.T))):
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    onnx.save(model, tmp_path / "m.onnx")
    graph = GraphModel.load(tmp_path / "m.onnx")
    return {site.name: useful_flops(graph, site) for site in find_sites(graph)}


def test_rows_and_columns_of_zeros_do_not_count(tmp_path: Path) -> None:
    w = np.ones((32, 48), np.float32)
    assert flops(w, tmp_path) == {"fc": 2 * 32 * 48, "towers": 2 * 2 * 32 * 48}
    w[5, 7] = 0
    assert flops(w, tmp_path)["fc"] == 2 * 32 * 48
    w[16:] = 0
    assert flops(w, tmp_path) == {"fc": 2 * 16 * 48, "towers": 2 * 2 * 16 * 48}
    w[:, 40:] = 0
    assert flops(w, tmp_path) == {"fc": 2 * 16 * 40, "towers": 2 * 2 * 16 * 40}

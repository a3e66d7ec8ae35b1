"""Sums in front of norms on the CPU: not fused, with the same values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from loka_onnx.engines.onnxruntime.norm_sums import write_norm_sums
from loka_onnx.engines.onnxruntime.providers import CPU
from loka_onnx.engines.onnxruntime.site_precision import dump_optimized
from loka_onnx.sessions.onnx_session import OnnxSession

pytest.importorskip("onnxruntime")


def test_a_sum_and_its_norm_stay_two_nodes(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[b,4,32] x, float[b,4,32] z) => (float[b,4,32] y, float[b,4,32] other)
        <float[32] gain = {GAIN}> {
            s = Add(x, z)
            y = LayerNormalization(s, gain)
            other = Add(y, z)
        }""".replace("GAIN", ", ".join(["1.5"] * 32))
    )
    path, written = tmp_path / "m.onnx", tmp_path / "w.onnx"
    onnx.save(model, path)
    onnx.save(model, written)
    assert write_norm_sums(written) == 1
    assert write_norm_sums(written) == 0
    for file, norm in ((path, "SkipLayerNormalization"), (written, "LayerNormalization")):
        dump_optimized(file, tmp_path / "o.onnx", CPU, keeps_float8=False)
        assert norm in {node.op_type for node in onnx.load(tmp_path / "o.onnx").graph.node}
    random = np.random.default_rng(0)
    inputs = {name: random.standard_normal((5, 4, 32)).astype(np.float32) for name in "xz"}
    before, after = (OnnxSession(file).run(inputs) for file in (path, written))
    for name, values in before.items():
        np.testing.assert_allclose(after[name], values, atol=2e-6)

"""TensorRT for RTX parses and builds every graph that the mods make: one engine for each kind of cases.

Not one engine for all: its compiler (1.7.1) fails on some pairs of graphs that have nothing to do with each
other, also before any mod (a Reshape and Relu beside a Transpose and two products).
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx.compose
import pytest
from norm_models import Exporter, fused, taken_in
from rewrite_models import artifact, named, parse
from shape_cases import MODS
from shape_models import feeds

from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.graph.model import GraphModel
from loka_onnx.sessions.onnx_session import OnnxSession
from loka_onnx.transforms.norms.fuse import RMS_OPSET
from loka_onnx.transforms.precision.explicit_casts import cast_to_base
from loka_onnx.transforms.sequence import apply_mods

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def together(models: Mapping[str, onnx.ModelProto]) -> onnx.ModelProto:
    """Models side by side in one graph, at the operator set of RMSNormalization."""
    graph = onnx.GraphProto(name="together")
    for name, model in models.items():
        one = onnx.compose.add_prefix(model, f"{name}/").graph
        for field in ("node", "initializer", "input", "output", "value_info"):
            getattr(graph, field).extend(getattr(one, field))
    opsets = [onnx.helper.make_opsetid("", max(m.opset_import[0].version for m in models.values()))]
    joined = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=11)
    onnx.checker.check_model(joined)
    return joined


def build(model: onnx.ModelProto, folder: Path) -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="needs tensorrt_rtx")
    from loka_onnx.core.job import BatchSizes
    from loka_onnx.engines.tensorrt.build import BuildSettings, build_engine

    onnx.save(model, folder / "together.onnx")
    settings = BuildSettings("sm89", BatchSizes(1, 8, 16))
    build_engine(trt, folder / "together.onnx", settings, folder / "engine.trt")
    assert (folder / "engine.trt").stat().st_size > 0


@pytest.mark.parametrize("kind", MODS)
def test_every_result_of_the_shape_mods_is_built(kind, tmp_path):
    made, cases = MODS[kind]
    models = {}
    for name, case in cases.items():
        # Engines have one dynamic axis, the batch.
        if "steps" not in case.inputs:
            source = artifact(case.model(), tmp_path / name / "before.onnx")
            result = apply_mods(source, [feeds(case.model())], tmp_path / name / "after.onnx", [made()])
            assert result.log.records[0].applied
            models[name] = onnx.load(result.model.path)
    build(together(models), tmp_path)


def test_every_result_of_the_norm_mods_is_built(tmp_path):
    pytest.importorskip("torch", reason="needs torch")
    import test_norm_exporters as exporters

    models = {}
    for name in (*exporters.FUSED, *exporters.MIXED):
        source = taken_in(exporters.exported(name, Exporter("torchscript", 20)), tmp_path / name)
        outcome = fused(source, tmp_path / name)
        outputs = OnnxSession(outcome.path).run(feeds(outcome.after))
        assert all(np.isfinite(value).all() for value in outputs.values()), name
        models[name] = outcome.after
    build(together(models), tmp_path)


@pytest.mark.parametrize("op", ["HardSwish", "Mish"])
def test_the_operator_set_of_rms_norm_brings_no_type_that_engines_lack(op, tmp_path):
    """Operator set 22 gave them BF16, which TensorRT for RTX 1.7.1 refuses."""
    model = parse(f"[norm] n = RMSNormalization<axis=-1>(x, gain) h = {op}(n) [fc] y = MatMul(h, w)",
        {"gain": np.ones(8), "w": np.eye(8)}, opset=RMS_OPSET)  # fmt: skip
    onnx.save(model, tmp_path / "m.onnx")
    graph = GraphModel.load(tmp_path / "m.onnx")
    cast_to_base(graph, Precision.BF16, PrecisionPlan("bf16", "digest", Precision.BF16, (), {}, 0.0))
    graph.save(tmp_path / "cast.onnx")
    cast = onnx.load(tmp_path / "cast.onnx")
    inferred = onnx.shape_inference.infer_shapes(cast).graph.value_info
    types = {info.name: info.type.tensor_type.elem_type for info in inferred}
    # The norm itself runs in BF16: it came with BF16, and takes its statistics in FP32.
    assert types[named(cast, "norm").output[0]] == onnx.TensorProto.BFLOAT16
    assert types[named(cast, "block/h").output[0]] == onnx.TensorProto.FLOAT
    build(cast, tmp_path)

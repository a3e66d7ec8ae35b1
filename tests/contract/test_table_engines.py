"""CPU engines with embedding tables in INT8: one engine, smaller, whose tables and remarks are read back."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from tiny_models import GraphWriter, TinyModel, make_plan, request_for

from loka_onnx.core.engine import EngineArtifact
from loka_onnx.core.formats import Precision
from loka_onnx.core.site import SiteKind
from loka_onnx.engines.onnxruntime.backend import OnnxRuntimeBackend
from loka_onnx.graph.storage import model_files

pytestmark = pytest.mark.slow

ROWS, WIDTH = 2000, 16


def lookup_and_product(folder: Path, *, quantized: bool) -> TinyModel:
    """A table beside the model, behind one lookup, and a product in FP8 (simulated) or FP32."""
    folder.mkdir()
    w = GraphWriter(Precision.FP32)
    table = w.constant("table", np.random.default_rng(0).normal(size=(ROWS, WIDTH)))
    narrow = w.constant("narrow", np.ones((ROWS, 1)))
    index = w.op("Cast", ["ids"], "to_index", to=7)
    rows = w.op("Flatten", [w.op("Gather", [table, index], "lookup")], "rows", axis=1)
    first = w.op("Flatten", [w.op("Gather", [narrow, index], "first")], "first_rows", axis=1)
    x = w.op("Concat", [rows, first], "joined", axis=1)
    k = 3 * (WIDTH + 1)
    left = w.quantized(x, "fc/x", 8.0) if quantized else x
    weight = w.narrow_weight("fc", (k, 8), 1) if quantized else w.weight("fc", (k, 8))
    y = w.op("MatMul", [left, weight], "fc")
    w.site("fc", SiteKind.LINEAR, k, 8, y)
    w.leave(y)
    path = w.save(folder / "model.onnx", {"ids": (3,)}, external=True)
    sites = tuple(w.sites)
    plan = make_plan(sites, base=Precision.FP32, fp8=("fc",) if quantized else (), per_channel=("fc",))
    sample = folder / "sample.npz"
    np.savez(sample, ids=np.random.default_rng(1).integers(0, ROWS, (16, 3)).astype(np.float32))
    return TinyModel(path, plan, sites, sample)


def build(model: TinyModel, output: Path, tables: int) -> EngineArtifact:
    engine = OnnxRuntimeBackend().build(request_for(model, output, options={"int8_tables": tables}))
    assert engine.path is not None, engine.detail
    return engine


def size_of(engine: EngineArtifact, output: Path) -> int:
    assert engine.path is not None
    return sum(file.stat().st_size for file in model_files(output / engine.path))


def test_the_engine_shrinks_and_its_rows_move_by_half_a_step(tmp_path: Path) -> None:
    model = lookup_and_product(tmp_path / "model", quantized=True)
    exact, narrow = (build(model, tmp_path / str(tables), tables) for tables in (0, 1))
    table, whole = ROWS * WIDTH * 4, size_of(exact, tmp_path / "0")
    saved = whole - size_of(narrow, tmp_path / "1")
    assert table * 0.65 < saved < table * 0.69
    assert [site.engaged for site in narrow.sites] == [site.engaged for site in exact.sites] == [True]
    assert len(narrow.remarks) == 1
    assert narrow.remarks[0].startswith("embedding table 'narrow' stays in FP32: ")
    assert exact.remarks == ()
    assert not [file for file in (tmp_path / "1").rglob("*.data") if file.stat().st_size >= table]
    runs = []
    for name, engine in (("0", exact), ("1", narrow)):
        assert engine.path is not None
        with OnnxRuntimeBackend().load(tmp_path / name / engine.path, "cpu") as runner:
            runs.append(runner.run(model.rows(16))["out"])
    # 48 values of a row move by at most half of amax / 127 (4 / 127 for normal values), by weights of 1 / 7.
    change = np.abs(runs[0] - runs[1])
    assert 0 < change.max() < 0.25


def test_the_fp32_engine_keeps_its_tables(tmp_path: Path) -> None:
    model = lookup_and_product(tmp_path / "model", quantized=False)
    engine = build(model, tmp_path / "e", 1)
    assert engine.path is not None
    stored = onnx.load(tmp_path / "e" / engine.path, load_external_data=False).graph.initializer
    assert {tensor.name: tensor.data_type for tensor in stored}["table"] == onnx.TensorProto.FLOAT

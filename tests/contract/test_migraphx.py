"""What MIGraphX does with the dialect, wherever it is installed: on its reference target, GPU or not.

The backend's own suite is `test_backends`; here, what the facts behind the dialect rest on.
"""

from pathlib import Path

import numpy as np
import onnx
import pytest
from tiny_models import GraphWriter, MlpShape, TinyModel, make_plan, mlp, request_for, write_sample

from loka_onnx.core.formats import Precision
from loka_onnx.core.job import BatchSizes
from loka_onnx.core.site import SiteKind
from loka_onnx.engines.migraphx.api import (
    compile_program,
    import_migraphx,
    parameters_of,
    parse_onnx,
    reread_float8,
    run_program,
)
from loka_onnx.engines.migraphx.backend import MigraphxBackend
from loka_onnx.engines.migraphx.dialect import Float8Form, write_dialect
from loka_onnx.engines.migraphx.session import open_migraphx
from loka_onnx.engines.migraphx.site_precision import parse_program, products_of, site_precisions
from loka_onnx.errors import MissingPackage, ModelError

try:
    migraphx = import_migraphx()
except MissingPackage as error:
    pytest.skip(f"needs migraphx: {error.evidence}", allow_module_level=True)

ROWS = 16


@pytest.fixture(params=[(), ("mlp.fc0", "mlp.fc1")], ids=["per tensor", "per channel"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> TinyModel:
    return mlp(tmp_path, Precision.FP32, Precision.FP32, fp8=True, shape=MlpShape(per_channel=request.param))


def parsed(model: TinyModel, form: Float8Form):
    proto = write_dialect(onnx.load(model.path), model.path.parent, form)
    path = model.path.with_name(f"{form}.onnx")
    onnx.save(proto, path)
    return parse_onnx(migraphx, path, {"x": (ROWS, 64)})


def run(model: TinyModel, program) -> np.ndarray:
    (result,) = run_program(migraphx, program, model.rows(ROWS))
    return result


@pytest.mark.parametrize("form", Float8Form)
def test_both_forms_compute_the_planned_model(model: TinyModel, form: Float8Form) -> None:
    program = parsed(model, form)
    if form is Float8Form.CARRIER:
        program = reread_float8(migraphx, program)
    compile_program(migraphx, program, "ref")
    # FP32 sums of 64 and 128 terms of order one differ by their order only; an FP8 step is 0.03.
    np.testing.assert_allclose(run(model, program), model.expected(ROWS), atol=2e-5)


def test_the_carrier_reaches_the_program_as_e4m3fn(model: TinyModel) -> None:
    before = parsed(model, Float8Form.CARRIER)
    after = reread_float8(migraphx, before)
    assert "fp8e4m3fn" not in parse_program(str(before)).types
    assert "fp8e4m3fnuz" not in parse_program(str(after)).types
    assert "fp8e4m3fn" in parse_program(str(after)).types
    assert parameters_of(before) == parameters_of(after)


def test_e4m3fn_does_not_parse(model: TinyModel) -> None:
    """Why there is a dialect: when this fails, a newer release may do without it."""
    with pytest.raises(ModelError, match="data type 17"):
        parse_onnx(migraphx, model.path, {"x": (ROWS, 64)})


def test_the_printed_program_is_read(model: TinyModel) -> None:
    program = parsed(model, Float8Form.FNUZ)
    compile_program(migraphx, program, "ref")
    text = parse_program(str(program))
    assert [product.is_simulated for product in products_of(text)] == [True, True]
    found = site_precisions([text], [(site, Precision.FP8) for site in model.sites])
    assert all(site.engaged for site in found), [site.evidence for site in found]


def test_an_engine_serves_every_size(model: TinyModel, tmp_path: Path) -> None:
    batch, into = BatchSizes(1, 4, 16, (4, 8)), tmp_path / "engine"
    into.mkdir()
    engine = MigraphxBackend().compile(request_for(model, into, batch=batch), into)
    with open_migraphx(engine, "cpu") as session:
        for rows in (1, 4, 7, 13, 16):
            got = session.run(model.rows(rows))["out"]
            np.testing.assert_allclose(got, model.expected(rows), atol=2e-5)


@pytest.mark.parametrize("base", [Precision.BF16, Precision.FP16])
def test_a_residual_norm_in_16_bits(tmp_path: Path, base: Precision) -> None:
    w = GraphWriter(base)
    x = w.enter("x")
    norm = w.op(
        "LayerNormalization", [x, w.constant("g", np.ones(64)), w.constant("b", np.zeros(64))], "norm"
    )
    y = w.op("MatMul", [w.quantized(norm, "fc/x"), w.narrow_weight("fc", (64, 64), 1)], "fc")
    w.site("fc", SiteKind.LINEAR, 64, 64, y)
    w.leave(w.op("Add", [y, norm], "residual"))
    path = w.save(tmp_path / "model.onnx", {"x": (64,)})
    sites = tuple(w.sites)
    sample = write_sample(tmp_path / "sample.npz", {"x": (64,)})
    model = TinyModel(path, make_plan(sites, base=base, fp8=("fc",)), sites, sample)
    program = parsed(model, Float8Form.FNUZ)
    compile_program(migraphx, program, "ref")
    # The norm's rounding moves a value of up to 4 by an FP8 step, ¼, times a weight of ⅛; two of 64 at once.
    np.testing.assert_allclose(run(model, program), model.expected(ROWS), atol=2.0**-3)

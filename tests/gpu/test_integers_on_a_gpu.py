"""INT8 products of the `inductor` backend against sums of int64 in NumPy, in kernels and in whole engines.

On the CPU the same graph and lowering run with sums in FP64.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")
pytest.importorskip("triton", reason="needs triton: pip install --group dev")

sys.path.append(str(Path(__file__).parents[1] / "unit" / "engines" / "inductor"))

from built_engines import DEVICES  # noqa: E402
from kernel_cases import ENDS, Draw, Product  # noqa: E402
from test_inductor import architecture_of  # noqa: E402
from test_integer_engines import ACTIVATIONS, plan_of, rows  # noqa: E402
from tiny_models import TinyModel, request_for  # noqa: E402

from loka_onnx.core.engine import BuildStatus  # noqa: E402
from loka_onnx.core.formats import INT8, Precision  # noqa: E402
from loka_onnx.core.job import BatchSizes  # noqa: E402
from loka_onnx.engines.inductor.backend import InductorBackend  # noqa: E402
from loka_onnx.engines.inductor.choosing import SPLIT_TILES, TILES  # noqa: E402
from loka_onnx.engines.inductor.kernels.triton_product import product  # noqa: E402
from loka_onnx.engines.inductor.lowering.strategies import Epilogue, Factors, ScaledMatMul, Tile  # noqa: E402
from loka_onnx.sessions.backends import fusions_of  # noqa: E402
from loka_onnx.transforms.precision.apply_plan import PlanForm, apply_plan  # noqa: E402

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def marked(*params: Any) -> list[Any]:
    return [pytest.param(each, marks=on_gpu, id=str(each)) for each in params]


def integer_case(shape: tuple[int, int, int], ends: str) -> tuple[Product, Any]:
    """A product whose results are in FP32, and its sums in int64 times the scales."""
    torch.manual_seed(5)
    case = Product.of(Draw(torch.float32), shape, ends, integer=True)
    a, b = (each.cpu().numpy().astype(np.int64) for each in case.arguments[:2])
    return case, (a @ b.T) * case.arguments[2].cpu().numpy().astype(np.float64)


@pytest.mark.parametrize("tile", marked(*TILES, *SPLIT_TILES))
@pytest.mark.parametrize("shape", [(21, 48, 80), (300, 272, 3456), (1, 16, 32)], ids=str)
def test_tiles_add_up_exactly(shape: tuple[int, int, int], tile: Tile) -> None:
    from triton.runtime.errors import OutOfResources

    case, exact = integer_case(shape, "plain")
    try:
        wide, narrow = case.run(product, tile.numbers(), 40.0, narrow=torch.int8)
    except OutOfResources as error:
        pytest.skip(f"needs a GPU with more shared memory: {error}")
    # The sum and the product with its scale are each rounded to FP32.
    np.testing.assert_allclose(wide.double().cpu().numpy(), exact, rtol=2.0**-22)
    steps = np.clip(np.rint(wide.double().cpu().numpy() * 40.0), -128, 127)
    assert narrow.dtype is torch.int8
    off = np.abs(narrow.cpu().numpy().astype(np.float64) - steps)
    # A tie may fall the other way where the compiler contracts multiplications.
    assert off.max() <= 1 and (off > 0).mean() < 0.001


@pytest.mark.parametrize("ends", marked(*ENDS))
def test_what_follows_a_product(ends: str) -> None:
    case, _ = integer_case((513, 256, 1024), ends)
    wide, narrow = case.run(product, TILES[-2].numbers(), 40.0, narrow=torch.int8)
    torch.testing.assert_close(wide.double(), case.exact, rtol=1e-6, atol=1e-5)
    assert (narrow.double() - (case.exact * 40).round().clamp(-128, 127)).abs().max() <= 1
    assert narrow.unique().numel() > 100


@pytest.mark.parametrize("m", marked(1, 16, 17, 512))
@pytest.mark.parametrize("sizes", [(48, 80), (24, 40), (512, 1024)], ids=str)
def test_the_library_adds_up_exactly(sizes: tuple[int, int], m: int) -> None:
    case, exact = integer_case((m, *sizes), "plain")
    a, b, scale, *_ = case.arguments
    one = torch.ones((), device="cuda")
    factors = Factors("fc", a, one, b.t(), scale, None, torch.float32)
    found = ScaledMatMul().multiply(factors, Epilogue())
    assert (found.site.kernel, found.site.engaged) == ("int_mm", True)
    np.testing.assert_allclose(found.values.double().cpu().numpy(), exact, rtol=2.0**-22)


@pytest.mark.parametrize("static", [0, 1], ids=["dynamic", "static"])
@pytest.mark.parametrize("base", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("device", DEVICES)
def test_an_engine_multiplies_every_planned_site_in_int8(
    device: str, base: Precision, static: int, tmp_path: Path
) -> None:
    planned = plan_of(tmp_path, format=INT8)
    plan = replace(planned.plan, base=base)
    decisions = (d if d.precision is Precision.INT8 else replace(d, precision=base) for d in plan.decisions)
    plan = replace(plan, decisions=tuple(decisions))
    form = PlanForm(base, fusions_of("inductor"))
    written = apply_plan(planned.model, plan, form, tmp_path / "planned" / "m.onnx")
    np.savez(tmp_path / "sample.npz", x=rows(64))
    model = TinyModel(written.path, plan, written.sites, tmp_path / "sample.npz")
    batch, backend = BatchSizes(1, 64, 64, (8, 64)), InductorBackend()
    more = {"batch": batch, "relative_to": tmp_path, "options": {"static": static}}
    engine = backend.build(request_for(model, tmp_path / "e", architecture_of(device), **more))
    assert engine.status is BuildStatus.READY, engine.detail
    assert engine.fallbacks == ()
    assert [site.operands for site in engine.sites[:3]] == [("int8", "int8")] * 3
    assert engine.simulated == (device == "cpu")
    assert engine.path is not None
    x = rows(64)
    with backend.open(engine, tmp_path / engine.path) as runner:
        got = runner.run({"x": x})["y"]
    want = planned.reference(x)
    # A step of fc3's input, the largest change that a tie which falls the other way makes.
    outer = np.abs(planned.weights["w3"]).max() * np.abs(planned.weights["w4"]).sum(axis=0).max()
    step = ACTIVATIONS[INT8]["fc3"][0] * outer
    if base is Precision.BF16:
        # Rounding of hidden values and weights moves others by a step too.
        assert np.abs(got - want).mean() <= 2.0**-6 * np.abs(want).max()
        return
    off = np.abs(got - want)
    assert off.max() <= step
    assert (off > 1e-5 * np.abs(want).max()).any(axis=1).mean() < 0.3

"""FP8 products by other packages, on the GPU of this host: against float64, timed, and in an engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

sys.path.append(str(Path(__file__).parents[1] / "unit" / "engines" / "inductor"))

from packaged_engines import compiled, expected, two_linears  # noqa: E402

from loka_onnx.core.formats import Precision  # noqa: E402
from loka_onnx.engines.inductor.choosing import LARGEST_ERROR, Chooser  # noqa: E402
from loka_onnx.engines.inductor.kernels.products import PackageProduct  # noqa: E402
from loka_onnx.engines.inductor.lowering.strategies import Epilogue, FloatProduct  # noqa: E402
from loka_onnx.engines.inductor.operator_packages import (  # noqa: E402
    PACKAGES,
    FoundPackage,
    OperatorPackage,
    find_packages,
)
from loka_onnx.engines.inductor.session import open_inductor  # noqa: E402
from loka_onnx.engines.inductor.site_precision import read_site_precisions  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("float8_gpu")]

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16


@pytest.fixture(params=PACKAGES, ids=[package.namespace for package in PACKAGES])
def found(request: pytest.FixtureRequest, float8_gpu: None) -> Iterator[FoundPackage]:
    package: OperatorPackage = request.param
    here = find_packages(torch.__version__, [package])
    if not here:
        pytest.skip(f"needs a GPU host with {package.distributions[0]}")
    if here[0].obstacle:
        pytest.skip(f"needs a GPU host whose package can be used: {here[0].obstacle}")
    major, minor = torch.cuda.get_device_capability()
    if all(10 * major + minor not in each.capabilities for each in package.operators):
        pytest.skip(f"needs a GPU that {package.distributions[0]} has kernels for")
    yield here[0]


def product(rows: int, k: int, n: int, *, channels: bool) -> FloatProduct:
    a, b = (torch.randn(*shape, device="cuda").to(FP8) for shape in ((rows, k), (n, k)))
    scale = torch.rand(n, device="cuda") + 0.5 if channels else torch.tensor(0.375, device="cuda")
    bias = torch.randn(n, device="cuda").to(BF16)
    return FloatProduct("fc", a, torch.tensor(0.75, device="cuda"), b.t(), scale, bias, BF16)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(("rows", "k", "n"), [(5, 32, 24), (256, 512, 384), (2048, 3456, 1024)])
def test_products_are_those_of_float64(
    found: FoundPackage, rows: int, k: int, n: int, fast: bool, channels: bool
) -> None:
    given = product(rows, k, n, channels=channels)
    exact = (given.a.double() * given.scale_a) @ (given.b.double() * given.scale_b)
    for operator in found.package.operators:
        strategy = PackageProduct(found, operator, fast)
        if strategy.why_not(given):
            continue
        values = strategy.multiply(given).values.double() - given.bias.double()  # type: ignore[union-attr]
        error = float((values - exact).norm() / exact.norm())
        # Rounding to BF16 makes up to 2⁻⁹ of it, once more where the bias is added behind; fast accumulation
        # keeps about 14 bits, and made .0068 at K = 3456 in our kernel (`choosing.LONG_K`).
        assert error < (2.0**-6 if fast else 2.0**-7), operator.name


def test_candidates_are_timed_in_a_graph(found: FoundPackage) -> None:
    given = product(256, 512, 384, channels=False)
    made = Chooser(256, (256,), packages=(found,)).choose({"fc": (given, Epilogue(bias=given.bias))})
    measured = [each for each in made.measured if each.kernel.startswith(f"{found.package.namespace}::")]
    able = [each for each in measured if "has kernels for" not in each.obstacle]
    assert able
    for each in able:
        assert not each.obstacle or each.obstacle.startswith("slower"), each
        assert each.error < LARGEST_ERROR


@pytest.mark.slow
def test_an_engine_calls_the_operator(found: FoundPackage, tmp_path: Path) -> None:
    model = two_linears(tmp_path / "model")
    major, minor = torch.cuda.get_device_capability()
    rows = found.package.operators[0]
    choices: Any = {name: PackageProduct(found, rows, False) for name in ("fc0", "fc1")}
    engine = compiled(model, tmp_path / "engines" / "e", f"sm{10 * major + minor}", choices)
    sites = read_site_precisions(engine, [(site, Precision.FP8) for site in model.sites])
    assert [site.evidence for site in sites] == [f"exported program: {choices['fc0'].name}"] * 2
    x = np.load(model.sample)["x"]
    with open_inductor(engine, f"sm{10 * major + minor}") as session:
        for size in (3, 8):
            answer, exact = session.run({"x": x[:size]})["out"], expected(model, x[:size])
            # A value of FP8 may be rounded the other way, by an eighth of it.
            assert np.linalg.norm(answer - exact) < 0.02 * np.linalg.norm(exact)

"""FP8 products by operators of other packages: all but the kernels, which a stand-in computes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

from packaged_operators import FBGEMM, FITTING, FOUND, calls, installed, write_distribution  # noqa: E402
from test_backend_exported import engine_of, site  # noqa: E402

from loka_onnx.cli import diagnosis  # noqa: E402
from loka_onnx.core.formats import Precision  # noqa: E402
from loka_onnx.engines.inductor import choosing  # noqa: E402
from loka_onnx.engines.inductor.choosing import Chooser  # noqa: E402
from loka_onnx.engines.inductor.exported import marked, products_of  # noqa: E402
from loka_onnx.engines.inductor.kernels.products import PackageProduct, TiledProduct  # noqa: E402
from loka_onnx.engines.inductor.lowering.strategies import (  # noqa: E402
    Epilogue,
    FloatProduct,
    ProductStrategy,
    ScaledMatMul,
)
from loka_onnx.engines.inductor.operator_packages import (  # noqa: E402
    FoundPackage,
    find_packages,
    needed_packages,
)
from loka_onnx.engines.inductor.package import (  # noqa: E402
    CompiledSite,
    InductorEngine,
    NeededPackage,
    Product,
)
from loka_onnx.engines.inductor.site_precision import product_calls, site_precisions  # noqa: E402

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
ROWS, TENSOR = FBGEMM.operators
E4M3 = "float8_e4m3fn"
HERE = NeededPackage("fbgemm-gpu-genai", f"{FITTING}.0", FBGEMM.module)
EXPORTED = "fbgemm.f8f8bf16_rowwise.default"


@pytest.fixture
def fbgemm(tmp_path: Path) -> Iterator[None]:
    with installed(write_distribution(tmp_path / "site", f"{FITTING}.0")):
        assert find_packages(torch.__version__) == (FOUND,)
        yield


def product(
    *lead: int, n: int = 24, k: int = 32, channels: bool = True, bias: bool = True, seed: int = 0
) -> FloatProduct:
    random = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(*shape, generator=random).to(FP8) for shape in ((*(lead or (5,)), k), (n, k)))
    scale = torch.rand(n, generator=random) + 0.5 if channels else torch.tensor(0.375)
    added = torch.randn(n, generator=random).to(BF16) if bias else None
    return FloatProduct("fc", a, torch.tensor(0.75), b.t(), scale, added, BF16)


def exact(given: FloatProduct) -> Any:
    scale_a = given.scale_a.double()
    a = given.a.double() * (scale_a[:, None] if scale_a.dim() else scale_a)
    made = a @ (given.b.double() * given.scale_b.double())
    return made if given.bias is None else made + given.bias.double()


# Arguments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scales", ["columns", "rows and columns", "one", "one by its own operator"])
@pytest.mark.parametrize("lead", [(5,), (2, 3)])
def test_products_with_every_kind_of_scale(
    fbgemm: None, lead: tuple[int, ...], scales: str, bias: bool, fast: bool
) -> None:
    # Scales for rows are those of a matrix, not of a stack.
    lead = (5,) if "rows" in scales else lead
    given = product(*lead, channels="columns" in scales, bias=bias)
    if "rows" in scales:
        given = replace(given, scale_a=torch.linspace(0.25, 2.0, 5))
    operator = TENSOR if "own" in scales else ROWS
    done = PackageProduct(FOUND, operator, fast).multiply(given)
    assert done.values.shape == (*lead, 24)
    assert (done.values.dtype, done.kernel, done.engaged) == (BF16, f"fbgemm::{operator.name}", True)
    assert done.operands == (E4M3, E4M3)
    # The result is rounded to BF16, and once more where a bias is added to that.
    tolerance = (1 + (bias and operator is TENSOR)) * torch.finfo(BF16).eps
    torch.testing.assert_close(done.values.double(), exact(given), rtol=tolerance, atol=tolerance)
    assert calls() == [(operator.name, fast)]


def refused() -> dict[str, tuple[Any, FloatProduct]]:
    plain = product()
    stack = replace(plain, b=plain.b.expand(5, 32, 24), a=plain.a.reshape(5, 1, 32))
    e5m2 = replace(plain, a=plain.a.to(torch.float32).to(torch.float8_e5m2))
    return {
        "multiplies by a matrix, of ranks 3 and 3": (ROWS, stack),
        "multiplies E4M3FN only": (ROWS, e5m2),
        "gives BF16, the result is float16": (ROWS, replace(plain, dtype=torch.float16, bias=None)),
        "gives BF16, the result is float32": (TENSOR, replace(plain, dtype=torch.float32, bias=None)),
        "K 24 is no multiple of 16, or N 24 none of 8": (ROWS, product(k=24)),
        "K 32 is no multiple of 16, or N 12 none of 8": (ROWS, product(n=12)),
        "fbgemm::f8f8bf16 takes one scale for each factor": (TENSOR, plain),
        "takes a scale for each row of a matrix, not of a stack": (
            ROWS,
            replace(product(5, 3), scale_a=torch.ones(3)),
        ),
    }


@pytest.mark.parametrize("reason", refused())
def test_what_an_operator_does_not_take_the_library_computes(fbgemm: None, reason: str) -> None:
    operator, given = refused()[reason]
    strategy = PackageProduct(FOUND, operator, False)
    assert reason in strategy.why_not(given)
    done = strategy.multiply(given)
    assert done.kernel in ("scaled_mm", "dequantized")
    assert calls() == []


@pytest.mark.parametrize(
    ("operator", "capability", "reason"),
    [
        (ROWS, (9, 0), ""),
        (ROWS, (10, 0), ""),
        (ROWS, (8, 9), "fbgemm::f8f8bf16_rowwise has kernels for sm90, sm100, here is sm89"),
        (ROWS, (12, 0), "fbgemm::f8f8bf16_rowwise has kernels for sm90, sm100, here is sm120"),
        (TENSOR, (9, 0), ""),
        (TENSOR, (10, 0), "fbgemm::f8f8bf16 has kernels for sm90, here is sm100"),
    ],
)
def test_a_gpu_that_it_has_no_kernels_for(
    operator: Any, capability: tuple[int, int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    given: Any = SimpleNamespace(a=SimpleNamespace(is_cuda=True, device="cuda:0"))
    assert PackageProduct(FOUND, operator, True)._why_not_device(given) == reason


# Which are here ---------------------------------------------------------------------------------------


def test_what_is_not_installed_is_no_candidate() -> None:
    assert find_packages(torch.__version__) == ()
    assert FBGEMM.module not in sys.modules
    doctor = {package.name: package for package in map(diagnosis._operator_package, (FBGEMM,))}
    assert doctor["fbgemm"].version == ""
    assert doctor["fbgemm"].remedy.startswith("pip install fbgemm-gpu-genai")


def test_a_package_for_another_pytorch_is_not_even_imported(tmp_path: Path) -> None:
    with installed(write_distribution(tmp_path, "1.4.2+cu126", "raise AssertionError")):
        (found,) = find_packages("2.10.1")
        assert found.obstacle == "fbgemm-gpu-genai 1.4.2+cu126 is built for PyTorch 2.9, here is 2.10.1"
        assert FBGEMM.module not in sys.modules
        assert PackageProduct(found, ROWS, False).why_not(product()) == found.obstacle
        assert diagnosis._operator_package(FBGEMM).remedy.startswith("fbgemm-gpu-genai 1.4.2+cu126 is built")


def test_a_package_whose_libraries_do_not_load(tmp_path: Path) -> None:
    # A release that no table has is tried.
    with installed(write_distribution(tmp_path, "9.1.0", "raise OSError('undefined symbol: _ZN3c10')")):
        (found,) = find_packages(torch.__version__)
        assert found.obstacle == "fbgemm-gpu-genai 9.1.0 does not import: undefined symbol: _ZN3c10"


def test_doctor_shows_what_can_be_used(fbgemm: None) -> None:
    shown = diagnosis._operator_package(FBGEMM)
    assert (shown.name, shown.version, shown.remedy) == ("fbgemm", f"{FITTING}.0", "")


# Choice -----------------------------------------------------------------------------------------------


def test_each_operator_is_a_candidate_with_and_without_fast_accumulation() -> None:
    names = ["fbgemm::f8f8bf16_rowwise", "fbgemm::f8f8bf16"]
    both = Chooser(5, (5,), packages=(FOUND,)).candidates(product())
    added = [name for name in both if name not in Chooser(5, (5,)).candidates(product())]
    assert sorted(added) == sorted([*names, *(f"{name}-fast" for name in names)])
    assert both[names[0]] == PackageProduct(FOUND, ROWS, False)
    assert both[f"{names[1]}-fast"] == PackageProduct(FOUND, TENSOR, True)
    slow = Chooser(5, (5,), fast_accumulation=False, packages=(FOUND,)).candidates(product())
    assert [name for name in slow if "fbgemm" in name] == names
    half = replace(product(), a=torch.ones(5, 32, dtype=BF16), b=torch.ones(32, 24, dtype=BF16))
    assert not any("fbgemm" in name for name in Chooser(5, (5,), packages=(FOUND,)).candidates(half))


def chosen(monkeypatch: pytest.MonkeyPatch, given: FloatProduct, found: FoundPackage = FOUND) -> Any:
    """Measurements; only the clock is replaced, which needs a GPU."""
    monkeypatch.setattr(
        choosing, "_time_product", lambda case: 1.0 if isinstance(case.strategy, PackageProduct) else 9.0
    )
    monkeypatch.setattr(choosing, "_time_behind", lambda case: 0.5)
    return Chooser(5, (5,), packages=(found,)).choose({"fc": (given, Epilogue(relu=True))})


def test_the_fastest_is_compiled_in(fbgemm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made = chosen(monkeypatch, product())
    measured = {each.kernel: each for each in made.measured}
    assert measured["fbgemm::f8f8bf16_rowwise"].us == {5: 1.5}
    assert measured["fbgemm::f8f8bf16_rowwise"].error < 1e-6
    assert measured["fbgemm::f8f8bf16-fast"].obstacle == "fbgemm::f8f8bf16 takes one scale for each factor"
    assert made.products((5,)).choices == {"fc": PackageProduct(FOUND, ROWS, False)}


def test_what_is_in_the_way_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = FoundPackage(FBGEMM, "fbgemm-gpu-genai 1.8.0 does not import: libcudart")
    made = chosen(monkeypatch, product(), found)
    told = [each for each in made.measured if "fbgemm" in each.kernel]
    assert len(told) == 4
    assert {each.obstacle for each in told} == {found.obstacle}
    strategy: ProductStrategy = made.products((5,)).choices["fc"]
    assert isinstance(strategy, ScaledMatMul | TiledProduct)


# What the engine says of itself -----------------------------------------------------------------------


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("operator", [ROWS, TENSOR])
def test_an_exported_program_has_the_product_with_its_flag(fbgemm: None, operator: Any, fast: bool) -> None:
    given = product(channels=False)

    class Module(torch.nn.Module):
        def forward(self, a: Any, b: Any) -> Any:
            read = replace(given, a=a, b=b)
            return marked("fc", PackageProduct(FOUND, operator, fast).multiply, read).values

    with torch.fx.traceback.preserve_node_meta():
        graph = torch.export.export(Module(), (given.a, given.b), strict=False).graph
    name = f"fbgemm.{operator.name}.default"
    assert products_of(graph) == (Product("fc", name, (E4M3, E4M3), fast),)


def engine(*products: Product) -> InductorEngine:
    site = CompiledSite("fc", "fbgemm::f8f8bf16_rowwise", (E4M3, E4M3), True)
    return engine_of(site, *products)


def test_a_package_is_needed_where_a_program_calls_it(fbgemm: None) -> None:
    assert needed_packages(engine(Product("fc", EXPORTED, (E4M3, E4M3))).programs) == (HERE,)
    assert needed_packages(engine(Product("fc", "aten.mm.default", (E4M3, E4M3))).programs) == ()


CODE = """
    AOTIProxyExecutorHandle proxy_executor,
    aoti_torch_proxy_executor_call_function(proxy_executor, 1, 0, std::array<int64_t, 0>{}.data(), 6, ts);
    aoti_torch_proxy_executor_call_function(proxy_executor, 0, 0, std::array<int64_t, 0>{}.data(), 6, ts);
    aoti_torch_proxy_executor_call_function(proxy_executor, 2, 0, std::array<int64_t, 0>{}.data(), 6, ts);
"""


def test_calls_by_name_are_counted() -> None:
    named = ["fbgemm::f8f8bf16_rowwise", "fbgemm::f8f8bf16_rowwise", "aten::sort"]
    assert +product_calls([CODE], named) == {EXPORTED: 2}
    assert +product_calls([CODE], named[:1]) == {EXPORTED: 1}
    assert +product_calls([CODE]) == {}


@pytest.mark.parametrize(("fast", "said"), [(False, ""), (True, " with fast accumulation")])
def test_a_site_counts_as_fp8_where_the_code_calls_the_operator(fast: bool, said: str) -> None:
    made = engine(Product("fc", EXPORTED, (E4M3, E4M3), fast))
    (found,) = site_precisions(made, {"rows": {EXPORTED: 1}}, [(site("fc"), Precision.FP8)])
    assert (found.engaged, found.evidence) == (True, f"exported program: fbgemm::f8f8bf16_rowwise{said}")
    (gone,) = site_precisions(made, {"rows": {}}, [(site("fc"), Precision.FP8)])
    assert not gone.engaged
    assert gone.evidence == (
        f"program 'rows': the generated code calls 0 kernels of '{EXPORTED}', the exported program has 1"
    )

"""What exported programs multiply, read from their graphs, and what that makes of the planned sites."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loka_onnx.core.formats import Precision
from loka_onnx.core.site import Operand, Site, SiteKind
from loka_onnx.engines.inductor import kernels
from loka_onnx.engines.inductor.exported import (
    PRODUCT_KERNEL,
    SCALED,
    entering_types,
    marked,
    output_types,
    products_of,
)
from loka_onnx.engines.inductor.package import CompiledSite, InductorEngine, Product, Program
from loka_onnx.engines.inductor.site_precision import product_calls, site_precisions

torch = pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

from loka_onnx.engines.inductor.choosing import TILES  # noqa: E402

E4M3, BF16 = "float8_e4m3fn", "bfloat16"


def export(forward: Callable[..., Any], *inputs: Any) -> Any:
    class Module(torch.nn.Module):
        def forward(self, *values: Any) -> Any:
            return forward(*values)

    with torch.fx.traceback.preserve_node_meta():
        return torch.export.export(Module(), inputs, strict=False).graph


def test_products_carry_their_node_and_their_types() -> None:
    def forward(x: Any, w: Any) -> Any:
        one = torch.ones(())
        a = marked(
            "fc8", lambda: torch._scaled_mm(x, w.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
        )
        b = marked("fc16", torch.matmul, a, a.t())
        stack = b.reshape(1, 32, 32)
        c = marked("dot", torch.einsum, "bij,bjk->bik", [stack, stack])
        return c, torch.nn.functional.linear(b.float(), b.float())

    values = [torch.zeros(32, 32).to(torch.float8_e4m3fn) for _ in range(2)]
    graph = export(forward, *values)
    assert products_of(graph) == (
        Product("fc8", SCALED, (E4M3, E4M3), True),
        Product("fc16", "aten.matmul.default", (BF16, BF16)),
        Product("dot", "aten.einsum.default", (BF16, BF16)),
        Product("", "aten.linear.default", ("float32", "float32")),
    )
    assert output_types(graph) == (BF16, "float32")


def test_an_operator_of_this_project_counts_as_a_product() -> None:
    @torch.library.custom_op("loka::test_product", mutates_args=())
    def product(a: torch.Tensor, scale: float, b: torch.Tensor) -> torch.Tensor:
        return (a @ b) * scale

    @product.register_fake
    def _(a: torch.Tensor, scale: float, b: torch.Tensor) -> torch.Tensor:
        return a.new_empty((a.shape[0], b.shape[1]))

    graph = export(lambda x: marked("fused", product, x, 2.0, x), torch.zeros(4, 4))
    assert products_of(graph) == (Product("fused", "loka.test_product.default", ("float32", "float32")),)


@pytest.mark.parametrize("is_exact", [True, False])
def test_an_exact_tile_keeps_its_sums(is_exact: bool) -> None:
    class OurProduct:
        """Stands for the operator, which is there where Triton is."""

        def __call__(self, *_: Any) -> Any:
            raise AssertionError

        def __str__(self) -> str:
            return PRODUCT_KERNEL

    graph = torch.fx.Graph()
    factors = [graph.placeholder(name) for name in ("a", "b")]
    for factor in factors:
        factor.meta["val"] = torch.zeros(2, 2).to(torch.float8_e4m3fn)
    tile = replace(TILES[0], is_exact=is_exact).numbers()
    graph.create_node("call_function", OurProduct(), (*factors, None, tile), name="product")
    assert [found.fast_accumulation for found in products_of(graph)] == [not is_exact]


def test_a_node_is_told_by_what_it_reads_from_outside() -> None:
    def norm(x: Any, gain: Any) -> Any:
        wide = x.to(torch.float32)
        return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * gain

    graph = export(
        lambda x, gain, ids: marked("norm", norm, x.relu(), gain)[ids],
        torch.zeros(4, 4, dtype=torch.bfloat16),
        torch.ones(4, dtype=torch.float16),
        torch.arange(2),
    )
    assert entering_types(graph, {"norm", "absent"}) == {"norm": (BF16, "float16")}


SOURCE = """
static inline void call_triton_tem_fused__scaled_mm_0(const A& a, const B& b) {
    launchKernel(kernels.triton_tem_fused__scaled_mm_0, grid);
}
template <typename in_type_0_, typename in_type_1_>
static __attribute__((noinline)) void call__loka_product_kernel_0(
    const in_type_0_& a, const in_type_1_& b) {
    kernels_._loka_product_kernel_0 = loadKernel("c.cubin", "_loka_product_kernel_0", 0, cubin_dir_);
}
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cuda__scaled_mm_out(buf1, buf0, w, s, t, 0, 0, &t1, 0));
    call_triton_tem_fused__scaled_mm_0(buf1, buf2, stream);
    call_triton_poi_fused__scaled_mm_relu_1(buf2, buf3, stream);
    call__loka_product_kernel_0(buf1, w, s, b, a, a, a, buf3, 4L, 8L, 2L, 0.5, this->device_idx_, stream);
    call__loka_product_kernel_12(buf3, w, a, b, a, a, buf4, a, 4L, 8L, 2L, 0.0, this->device_idx_, stream);
    call__loka_concat_quantize_kernel_1(buf1, buf2, buf3, buf4, 4L, 0.5, this->device_idx_, stream);
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_addmm_out(buf1, buf0, w, 1, 1));
    aoti_torch_cpu__scaled_mm_v2(buf1, buf0);
"""


OWN, CONCAT = "loka.product.default", "loka.concat_quantize.default"


def test_calls_of_products_are_counted_in_generated_code() -> None:
    assert product_calls([SOURCE]) == {SCALED: 3, OWN: 2, CONCAT: 1}
    assert product_calls([SOURCE, SOURCE]) == {SCALED: 6, OWN: 4, CONCAT: 2}
    assert product_calls(["aoti_torch_cuda_bmm_out(a)"]).total() == 0


def test_kernels_are_named_after_their_operators() -> None:
    """What is counted in generated code is a name that Inductor makes of the function's."""
    folder = Path(kernels.__file__).parent
    for path in folder.glob("triton_*.py"):
        source = path.read_text()
        operators = re.findall(r'@triton_op\("loka::(\w+)"', source)
        launched = re.findall(r"wrap_triton\((\w+)\)", source)
        assert [n for n in launched if n.startswith("_loka_")] == [f"_loka_{n}_kernel" for n in operators]
        assert set(re.findall(r"^def (_loka_\w+)\(", source, re.M)) == {
            f"_loka_{n}_kernel" for n in operators
        }


def site(name: str, kind: SiteKind = SiteKind.LINEAR) -> Site:
    return Site(name, kind, "Gemm", (Operand("x", 0, False, 1, (None, 32)),), "y", 32, 32, 1)


FC = CompiledSite("fc", "scaled_mm", (E4M3, E4M3), True)
ENGINE = InductorEngine(
    torch="2.13.0",
    architecture="cpu",
    instruction_sets=(),
    inputs=(),
    outputs=(),
    minimum=1,
    maximum=8,
    sizes=(8,),
    programs=(Program("rows", 1, 8, (Product("fc", SCALED, (E4M3, E4M3)),), {"norm": (BF16, "float32")}),),
    sites=(FC,),
)


def read(
    engine: InductorEngine,
    planned: Precision = Precision.FP8,
    calls: int = 1,
    name: str = "fc",
    own: int = 0,
) -> Any:
    kind = SiteKind.NORM if name == "norm" else SiteKind.LINEAR
    counted = {program.name: {SCALED: calls, OWN: own} for program in engine.programs}
    (found,) = site_precisions(engine, counted, [(site(name, kind), planned)])
    return found


def with_products(*products: Product) -> InductorEngine:
    return replace(ENGINE, programs=(replace(ENGINE.programs[0], products=products),))


def test_fp8_counts_where_all_readings_agree() -> None:
    found = read(ENGINE)
    assert (found.engaged, found.operands, found.planned) == (True, (E4M3, E4M3), "fp8")
    assert found.evidence == "exported program: scaled_mm"
    fast = with_products(Product("fc", SCALED, (E4M3, E4M3), True))
    assert read(fast).evidence == "exported program: scaled_mm with fast accumulation"


@pytest.mark.parametrize(
    ("engine", "calls", "said"),
    [
        (ENGINE, 0, "program 'rows': the generated code calls 0 FP8 products, the exported program has 1"),
        (with_products(), 1, "program 'rows': the exported program has no product of this site"),
        (
            with_products(Product("fc", "aten.mm.default", (E4M3, BF16))),
            1,
            "program 'rows': the exported program multiplies float8_e4m3fn by bfloat16 there",
        ),
        (replace(ENGINE, sites=()), 1, "nothing of that name in the lowered graph"),
        (
            replace(ENGINE, sites=(replace(FC, engaged=False, kernel="dequantized", reason="K 24 is odd"),)),
            1,
            "lowered to dequantized: K 24 is odd",
        ),
    ],
)
def test_a_site_that_is_not_fp8_in_one_reading_is_a_fallback(
    engine: InductorEngine, calls: int, said: str
) -> None:
    found = read(engine, calls=calls)
    assert not found.engaged
    assert found.evidence == said


def test_every_program_must_run_a_site_in_fp8() -> None:
    wide = Program("rows4", 4, 4, (Product("fc", "aten.mm.default", (BF16, BF16)),))
    engine = replace(ENGINE, programs=(*ENGINE.programs, wide))
    assert "program 'rows4': " in read(engine).evidence


def test_an_own_operator_is_no_call_of_a_library_and_must_be_called_itself() -> None:
    fused = CompiledSite("fc", "triton 128x128", (E4M3, E4M3), True, "with the next Q in its epilogue")
    own = Product("fc", "loka.product.default", (E4M3, E4M3))
    found = read(replace(with_products(own), sites=(fused,)), calls=0, own=1)
    assert found.engaged
    assert found.evidence == "exported program: triton 128x128; with the next Q in its epilogue"
    gone = read(replace(with_products(own), sites=(fused,)), calls=1)
    assert (gone.engaged, gone.evidence) == (
        False,
        "program 'rows': the generated code calls 0 kernels of 'loka.product.default', "
        "the exported program has 1",
    )
    wide = replace(own, operands=(BF16, E4M3))
    assert not read(replace(with_products(wide), sites=(fused,)), calls=0, own=1).engaged


def test_an_own_kernel_of_a_wide_product_must_be_called_as_well() -> None:
    fused = CompiledSite("fc", "triton 128x128", (BF16, BF16), False)
    engine = replace(with_products(Product("fc", OWN, (BF16, BF16))), sites=(fused,))
    assert read(engine, Precision.BF16, own=1).engaged
    assert not read(engine, Precision.FP16, own=1).engaged
    assert "calls 0 kernels of" in read(engine, Precision.BF16).evidence
    assert not read(engine, Precision.BF16).engaged
    # A library's product of wide factors may be fused away into what the compiler makes: its type counts.
    dense = replace(with_products(Product("fc", "aten.mm.default", (BF16, BF16))), sites=(fused,))
    assert read(dense, Precision.BF16, calls=0).engaged


@pytest.mark.parametrize(
    ("operands", "planned", "engaged"),
    [
        ((BF16, BF16), Precision.BF16, True),
        (("float32", "float32"), Precision.BF16, False),
        (("float32", "float32"), Precision.FP32, True),
        (("float16", "float16"), Precision.FP16, True),
        ((BF16, "float32"), Precision.BF16, False),
        ((), Precision.BF16, False),
    ],
)
def test_other_products_run_in_what_they_multiply(
    operands: tuple[str, ...], planned: Precision, engaged: bool
) -> None:
    dense = CompiledSite("fc", "dense", operands, False)
    found = read(replace(ENGINE, sites=(dense,)), planned)
    assert (found.engaged, found.operands) == (engaged, operands)


def test_a_norm_runs_in_what_it_reads() -> None:
    assert read(ENGINE, Precision.BF16, name="norm").engaged
    assert not read(ENGINE, Precision.FP16, name="norm").engaged
    gone = replace(ENGINE, programs=(replace(ENGINE.programs[0], entering={}),))
    found = read(gone, Precision.BF16, name="norm")
    assert (found.engaged, found.evidence) == (False, "nothing of that name in the exported program")
    narrow = replace(ENGINE.programs[0], entering={"norm": (BF16, E4M3)})
    assert not read(replace(ENGINE, programs=(narrow,)), Precision.BF16, name="norm").engaged


def test_a_missing_product_is_no_precision() -> None:
    found = read(replace(ENGINE, sites=()), Precision.BF16)
    assert (found.engaged, found.operands) == (False, ())

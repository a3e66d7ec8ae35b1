"""What exported programs multiply, read from their graphs, and what that makes of the planned sites."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loka_onnx.core.formats import Precision
from loka_onnx.core.site import Operand, Site, SiteKind
from loka_onnx.engines.inductor import kernels
from loka_onnx.engines.inductor.package import CompiledSite, InductorEngine, Product, Program
from loka_onnx.engines.inductor.site_precision import (
    MARK,
    PRODUCT_KERNEL,
    SCALED,
    entering_types,
    output_types,
    product_calls,
    products_of,
    site_precisions,
)

torch = pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

from loka_onnx.engines.inductor.choosing import TILES  # noqa: E402

E4M3, BF16 = "float8_e4m3fn", "bfloat16"


def marked(name: str, lower: Callable[..., Any], *arguments: Any) -> Any:
    with torch.fx.traceback.annotate({MARK: name}):
        return lower(*arguments)


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
    val = torch.zeros(2, 2).to(torch.float8_e4m3fn)
    factors = [SimpleNamespace(meta={"val": val}) for _ in "ab"]
    tile = replace(TILES[0], is_exact=is_exact).numbers()
    # The operator itself is there only where Triton is.
    call = SimpleNamespace(op="call_function", target=PRODUCT_KERNEL, args=(*factors, None, tile), meta={})
    (found,) = products_of(SimpleNamespace(nodes=[call]))
    assert found.fast_accumulation is not is_exact


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
        for pattern in (r"wrap_triton\((_loka_\w+)\)", r"^def (_loka_\w+)\("):
            assert re.findall(pattern, source, re.M) == [f"_loka_{name}_kernel" for name in operators]


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


def engine_of(site: CompiledSite, *products: Product, **program: Any) -> InductorEngine:
    program |= {"products": products}
    return replace(ENGINE, sites=(site,), programs=(replace(ENGINE.programs[0], **program),))


def dense(*operands: str) -> InductorEngine:
    return replace(ENGINE, sites=(CompiledSite("fc", "dense", operands, False),))


def multiplied(operator: str, *operands: str, fast: bool = False) -> Product:
    return Product("fc", operator, operands, fast)


TILE = CompiledSite("fc", "triton 128x128", (E4M3, E4M3), True, "with the next Q in its epilogue")
WIDE_TILE = CompiledSite("fc", "triton 128x128", (BF16, BF16), False)
MATRICES = multiplied("aten.mm.default", BF16, BF16)
OWN_FP8 = engine_of(TILE, multiplied(OWN, E4M3, E4M3))
OWN_WIDE = engine_of(WIDE_TILE, multiplied(OWN, BF16, BF16))
NOTHING, FLOAT = replace(ENGINE, sites=()), dense("float32", "float32")
ODD = engine_of(replace(FC, engaged=False, kernel="dequantized", reason="K 24 is odd"))
TWO = replace(ENGINE, programs=(*ENGINE.programs, Program("rows4", 4, 4, (MATRICES,))))
FP8, FP16, FP32, HALF = Precision.FP8, Precision.FP16, Precision.FP32, Precision.BF16
CALLED, OWN_CALLED = {SCALED: 1}, {OWN: 1}
ABSENT, LOWERED = "nothing of that name in the lowered graph", "lowered to triton 128x128"
AS_TILE = "exported program: triton 128x128; with the next Q in its epilogue"
ENGAGED = [
    (ENGINE, FP8, CALLED, "exported program: scaled_mm"),
    (
        engine_of(FC, multiplied(SCALED, E4M3, E4M3, fast=True)),
        FP8,
        CALLED,
        "scaled_mm with fast accumulation",
    ),
    # An own operator is no call of a library.
    (OWN_FP8, FP8, OWN_CALLED, AS_TILE),
    # An own kernel of a wide product must be called as well.
    (OWN_WIDE, HALF, OWN_CALLED, LOWERED),
    # A library's product of wide factors may be fused away into what the compiler makes: its type counts.
    (engine_of(WIDE_TILE, MATRICES), HALF, {}, LOWERED),
    (dense(BF16, BF16), HALF, CALLED, "lowered to dense"),
    (FLOAT, FP32, CALLED, "lowered to dense"),
    (dense("float16", "float16"), FP16, CALLED, "lowered to dense"),
]
NOT_ENGAGED = [
    # One reading is another.
    (ENGINE, FP8, {}, "'rows': the generated code calls 0 FP8 products, the exported program has 1"),
    (engine_of(FC), FP8, CALLED, "'rows': the exported program has no product of this site"),
    (engine_of(FC, multiplied("aten.mm.default", E4M3, BF16)), FP8, CALLED, f"multiplies {E4M3} by {BF16}"),
    (NOTHING, FP8, CALLED, ABSENT),
    (ODD, FP8, CALLED, "lowered to dequantized: K 24 is odd"),
    (TWO, FP8, CALLED, "'rows4': the exported program multiplies bfloat16 by bfloat16 there"),
    (
        OWN_FP8,
        FP8,
        CALLED,
        "'rows': the generated code calls 0 kernels of 'loka.product.default', the exported",
    ),
    (engine_of(TILE, multiplied(OWN, BF16, E4M3)), FP8, OWN_CALLED, "bfloat16 by"),
    (OWN_WIDE, FP16, OWN_CALLED, LOWERED),
    (OWN_WIDE, HALF, {}, "calls 0 kernels of"),
    (FLOAT, HALF, CALLED, "lowered to dense"),
    (dense(BF16, "float32"), HALF, CALLED, "lowered to dense"),
    (dense(), HALF, CALLED, "lowered to dense"),
    (NOTHING, HALF, CALLED, ABSENT),
]
READINGS = [(*reading, True) for reading in ENGAGED] + [(*reading, False) for reading in NOT_ENGAGED]


@pytest.mark.parametrize(("engine", "planned", "calls", "said", "engaged"), READINGS)
def test_a_site_runs_as_planned_where_all_readings_agree(
    engine: InductorEngine, planned: Precision, calls: dict[str, int], said: str, engaged: bool
) -> None:
    counted = {program.name: calls for program in engine.programs}
    (found,) = site_precisions(engine, counted, [(site("fc"), planned)])
    assert (found.engaged, found.planned) == (engaged, planned)
    assert said in found.evidence
    assert found.operands == (engine.sites[0].operands if engine.sites else ())


@pytest.mark.parametrize(
    ("entering", "planned", "engaged"),
    [
        ((BF16, "float32"), HALF, True),
        ((BF16, "float32"), FP16, False),
        ((BF16, E4M3), HALF, False),
        (None, HALF, False),
    ],
)
def test_a_norm_runs_in_what_it_reads(entering: Any, planned: Precision, engaged: bool) -> None:
    engine = engine_of(FC, entering={} if entering is None else {"norm": entering})
    (found,) = site_precisions(engine, {}, [(site("norm", SiteKind.NORM), planned)])
    assert found.engaged is engaged
    if entering is None:
        assert found.evidence == "nothing of that name in the exported program"

"""The inductor backend before a build, and what exported programs and packages make of the planned sites."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

from planned import plan_of_one  # noqa: E402

from loka_onnx.core.formats import E5M2, Precision  # noqa: E402
from loka_onnx.core.job import BatchSizes  # noqa: E402
from loka_onnx.core.recipe import PER_TENSOR, Recipe  # noqa: E402
from loka_onnx.core.site import Operand, Site, SiteKind  # noqa: E402
from loka_onnx.engines.inductor import backend as backend_module  # noqa: E402
from loka_onnx.engines.inductor import kernels  # noqa: E402
from loka_onnx.engines.inductor.backend import Compilers, InductorBackend, Settings, compile_workers  # noqa: E402
from loka_onnx.engines.inductor.choosing import TILES  # noqa: E402
from loka_onnx.engines.inductor.compile import (  # noqa: E402
    batch_programs,
    example_rows,
    inductor_options,
    input_ports,
    output_ports,
)
from loka_onnx.engines.inductor.package import (  # noqa: E402
    CompiledSite,
    InductorEngine,
    InputPort,
    OutputPort,
    Product,
    Program,
)
from loka_onnx.engines.inductor.site_precision import (  # noqa: E402
    MARK,
    PRODUCT_KERNEL,
    SCALED,
    entering_types,
    output_types,
    product_calls,
    products_of,
    site_precisions,
)
from loka_onnx.engines.request import BuildRequest  # noqa: E402
from loka_onnx.errors import DataError, ModelError  # noqa: E402
from loka_onnx.sessions.cuda import CudaDevice  # noqa: E402

NOWHERE = ("/nowhere/g++", "/nowhere/gcc")


def graph_of(text: str) -> onnx.GraphProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}').graph


def test_plans_that_no_device_of_an_architecture_runs_are_declined() -> None:
    backend = InductorBackend()
    fp8, e5m2 = plan_of_one(recipe=PER_TENSOR), plan_of_one(recipe=Recipe.of(E5M2))
    assert backend.decline(fp8, "sm80") == "sm80 has no FP8 products (sm89 is the first that has)"
    for architecture in ("cpu", "sm89", "sm90", "sm120"):
        assert backend.decline(fp8, architecture) is None
    for base in (Precision.FP32, Precision.BF16, Precision.FP16):
        assert backend.decline(plan_of_one(base), "sm80") is None
    assert backend.decline(e5m2, "cpu") == "site 'fc' asks for E5M2; inductor takes E4M3FN, INT8 only"


def test_a_gpu_is_built_for_where_it_is_and_nothing_without_a_compiler(monkeypatch):
    backend = InductorBackend()
    monkeypatch.setattr(backend_module, "list_cuda_devices", lambda: (CudaDevice(0, "H100", "sm90"),))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert backend.build_blocker("sm90") == ""
    assert backend.build_blocker("cpu") == ""
    assert "on a host with that GPU, and this one has H100 (sm90)" in backend.build_blocker("sm89")
    assert backend.availability().devices == ("cpu", "H100 (sm90)")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "this one has no GPU that PyTorch uses" in backend.build_blocker("sm90")
    monkeypatch.setattr(Compilers, "find", lambda: None)
    availability = InductorBackend().availability()
    assert (availability.can_build, availability.can_run) == (False, True)
    assert availability.reason == "there is no C++ compiler, which Inductor needs"
    assert availability.remedy == "install g++ and gcc"


def test_the_compiler_of_the_system_is_preferred_to_the_environment(tmp_path, monkeypatch) -> None:
    for name in ("g++", "gcc", "weird++", "weird"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    for name, value in {"CXX": tmp_path / "weird++", "CC": tmp_path / "weird", "PATH": tmp_path}.items():
        monkeypatch.setenv(name, str(value))
    system = (str(tmp_path / "g++"), str(tmp_path / "gcc"))
    assert Compilers.find(system) == Compilers(*system)
    assert Compilers.find(NOWHERE) == Compilers(str(tmp_path / "weird++"), str(tmp_path / "weird"))
    monkeypatch.setenv("CXX", "/nowhere/c++ -O2")
    assert Compilers.find(NOWHERE) == Compilers(*system)
    monkeypatch.setenv("PATH", "/nowhere")
    assert Compilers.find(NOWHERE) is None


def request(architecture: str = "cpu", sizes=(8, 32), options=None) -> BuildRequest:
    """A request of which nothing but the batch sizes, the architecture and the options is read."""
    nowhere, batch = Path("nowhere"), BatchSizes(1, max(sizes), max(sizes), sizes)
    given = (nowhere, plan_of_one(), (), "device", architecture, batch, nowhere, nowhere)
    return BuildRequest(*given, options=options or {})


def test_programs_for_batch_sizes() -> None:
    assert Settings.of(request("sm90")).static
    others = [request("cpu"), request("sm90", options={"static": 0})]
    others += [request("sm90", sizes) for sizes in ((64,), (1, 8, 64, 512))]
    assert not any(Settings.of(each).static for each in others)
    batch = BatchSizes(1, 8, 64, (8, 32))
    assert batch_programs(batch, static=False) == (Program("rows", 1, 64),)
    assert batch_programs(batch, static=True) == (Program("rows8", 8, 8), Program("rows32", 32, 32))
    assert batch_programs(BatchSizes(16, 16, 16), static=False) == (Program("rows16", 16, 16),)


def test_options_become_settings() -> None:
    assert Settings.of(request()) == Settings()
    for name, values in InductorBackend.options.items():
        for value in values:
            settings = Settings.of(request(options={name: value}))
            assert settings == Settings(**{**vars(Settings()), name: bool(value)})
    given = (Compilers("/x/g++", "/x/gcc"), Path("/scratch/rows"))
    told = inductor_options(Settings(max_autotune=True), *given)
    assert (told["max_autotune"], told["cpp.cxx"]) == (True, (None, "/x/g++"))
    assert told["aot_inductor.output_path"] == "/scratch/rows"
    assert told["cpp.vec_isa_ok"] is None
    # Beside a GPU nobody asks for the processor's vector instructions.
    assert inductor_options(Settings(), *given, "sm90")["cpp.vec_isa_ok"] is False
    # A misspelt option would be refused by PyTorch only while it compiles.
    assert set(told) <= set(torch._inductor.config.get_config_copy())


def test_ports_are_read_from_the_graph() -> None:
    inputs = "float[batch, 3, 4] x, int64[batch] ids"
    graph = graph_of(f"g ({inputs}) => (float[batch, 2] out, float[7] table, float[n] y) {{}}")
    ports = (InputPort("x", "float32", (3, 4)), InputPort("ids", "int64", ()))
    assert input_ports(graph, {"ids": (None,)}) == ports
    assert output_ports(graph) == (OutputPort("out", True), OutputPort("table", False), OutputPort("y", True))
    for kind, code in (("float[batch, tokens]", "E0811"), ("bfloat16[batch, 2]", "E0812")):
        with pytest.raises(ModelError) as caught:
            input_ports(graph_of(f"g ({kind} x) => ({kind} y) {{}}"), {})
        assert caught.value.code == code


@pytest.mark.parametrize(
    ("bounds", "fits"),
    [
        ([range(-9, 9), range(0, 2**31)], True),
        ([range(-(2**31), 5)] * 2, True),
        ([range(9), None], False),
        ([range(9), range(2**31 + 1)], False),
        ([range(-(2**31) - 1, 9), range(9)], False),
        ([], False),
    ],
)
def test_ids_fit_int32_where_the_tables_of_every_column_do(bounds: list[Any], fits: bool) -> None:
    for kind in ("int64", "int32", "float"):
        graph = graph_of(f"g ({kind}[batch, 2] x) => ({kind}[batch, 2] y) {{}}")
        (port,) = input_ports(graph, {"x": bounds})
        assert port.fits_int32 == (fits and kind == "int64")


def test_examples_are_rows_of_the_sample_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "sample.npz"
    np.savez(path, x=np.arange(6.0).reshape(3, 2), ids=np.array([5, 6, 7]))
    x, ids = example_rows(path, (InputPort("x", "float32", (2,)), InputPort("ids", "int64", ())), 5)
    assert ids.tolist() == [5, 6, 7, 5, 6]
    assert x.dtype is torch.float32
    assert x[:, 0].tolist() == [0, 2, 4, 0, 2]
    with pytest.raises(DataError) as caught:
        example_rows(path, (InputPort("y", "float32", (2,)),), 5)
    assert caught.value.code == "E0814"


# Exported programs and packages ------------------------------------------------------------------------

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
        one, how = torch.ones(()), {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        a = marked("fc8", lambda: torch._scaled_mm(x, w.t(), one, one, **how))
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
    factors = [SimpleNamespace(meta={"val": val}, target=name) for name in "ab"]
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
    # What is counted in generated code is a name that Inductor makes of the function's.
    folder = Path(kernels.__file__).parent
    for path in folder.glob("triton_*.py"):
        source = path.read_text()
        operators = re.findall(r'@triton_op\("loka::(\w+)"', source)
        for pattern in (r"wrap_triton\((_loka_\w+)\)", r"^def (_loka_\w+)\("):
            assert re.findall(pattern, source, re.M) == [f"_loka_{name}_kernel" for name in operators]


def site(name: str, kind: SiteKind = SiteKind.LINEAR) -> Site:
    return Site(name, kind, "Gemm", (Operand("x", 0, False, 1, (None, 32)),), "y", 32, 32, 1)


FC = CompiledSite("fc", "scaled_mm", (E4M3, E4M3), True)
ROWS = Program("rows", 1, 8, (Product("fc", SCALED, (E4M3, E4M3)),), {"norm": (BF16, "float32")})
ENGINE = InductorEngine("2.13.0", "cpu", (), (), (), 1, 8, (8,), (ROWS,), (FC,))


def engine_of(site: CompiledSite, *products: Product, **program: Any) -> InductorEngine:
    return replace(ENGINE, sites=(site,), programs=(replace(ROWS, products=products, **program),))


def dense(*operands: str) -> InductorEngine:
    return replace(ENGINE, sites=(CompiledSite("fc", "dense", operands, False),))


TILE = CompiledSite("fc", "triton 128x128", (E4M3, E4M3), True, "with the next Q in its epilogue")
WIDE_TILE = CompiledSite("fc", "triton 128x128", (BF16, BF16), False)
FAST = engine_of(FC, Product("fc", SCALED, (E4M3, E4M3), True))
MATRICES = Product("fc", "aten.mm.default", (BF16, BF16))
OWN_FP8 = engine_of(TILE, Product("fc", OWN, (E4M3, E4M3)))
OWN_WIDE = engine_of(WIDE_TILE, Product("fc", OWN, (BF16, BF16)))
NOTHING, FLOAT = replace(ENGINE, sites=()), dense("float32", "float32")
ODD = engine_of(replace(FC, engaged=False, kernel="dequantized", reason="K 24 is odd"))
TWO = replace(ENGINE, programs=(*ENGINE.programs, Program("rows4", 4, 4, (MATRICES,))))
FP8, FP16, FP32, HALF = Precision.FP8, Precision.FP16, Precision.FP32, Precision.BF16
CALLED, OWN_CALLED = {SCALED: 1}, {OWN: 1}
ABSENT, LOWERED = "nothing of that name in the lowered graph", "lowered to triton 128x128"
AS_TILE = "exported program: triton 128x128; with the next Q in its epilogue"
ENGAGED = [
    (ENGINE, FP8, CALLED, "exported program: scaled_mm"),
    (FAST, FP8, CALLED, "exported program: scaled_mm with fast accumulation"),
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
    (engine_of(FC, Product("fc", "aten.mm.default", (E4M3, BF16))), FP8, CALLED, f"{E4M3} by {BF16}"),
    (NOTHING, FP8, CALLED, ABSENT),
    (ODD, FP8, CALLED, "lowered to dequantized: K 24 is odd"),
    (TWO, FP8, CALLED, "'rows4': the exported program multiplies bfloat16 by bfloat16 there"),
    (OWN_FP8, FP8, CALLED, "'rows': the generated code calls 0 kernels of 'loka.product.default', the"),
    (engine_of(TILE, Product("fc", OWN, (BF16, E4M3))), FP8, OWN_CALLED, "bfloat16 by"),
    (OWN_WIDE, FP16, OWN_CALLED, LOWERED),
    (OWN_WIDE, HALF, {}, "calls 0 kernels of"),
    (FLOAT, HALF, CALLED, "lowered to dense"),
    (dense(BF16, "float32"), HALF, CALLED, "lowered to dense"),
    (dense(), HALF, CALLED, "lowered to dense"),
    (NOTHING, HALF, CALLED, ABSENT),
]
READINGS = [(*reading, True) for reading in ENGAGED] + [(*reading, False) for reading in NOT_ENGAGED]


@pytest.mark.parametrize(("engine", "planned", "calls", "said", "engaged"), READINGS)
def test_a_site_runs_as_planned_where_all_readings_agree(engine, planned, calls, said, engaged) -> None:
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


@pytest.mark.parametrize(
    ("memory_gb", "cores", "workers"), [(16, 16, 7), (16, 2, 2), (1, 64, 1), (200, 64, 64)]
)
def test_workers_fit_the_memory_limit_of_a_build(memory_gb, cores, workers, monkeypatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    assert compile_workers(memory_gb * 10**9) == workers

"""MIGraphX's printed programs, read back.

`PERF_TEST`, `FUSED` and `NAMED` are what releases 2.15.0 and 2.16 printed on GPUs, `MERGED` what a BERT
quantized to FP8 printed there (public logs of ``migraphx-driver``; ROCm/AMDMIGraphX issue 3598). `REFERENCE`
is in the form of 2.16's reference target, which prints every operator as ``ref::`` and its name
(``src/targets/ref/lowering.cpp``); its line @5 is one that was seen. No GPU has printed `FLOAT8` and
`DROPPED`: their lines are of the same kinds. `INT8` is `FLOAT8` in the types of ``op::quant_dot`` for INT8;
public summaries call INT8 products ``mlir_quant_dot`` and ``gpu::quant_gemm`` (issues 2566 and 2903 there).
"""

import pytest

from loka_onnx.core.engine import SitePrecision
from loka_onnx.core.formats import Precision
from loka_onnx.core.site import Operand, Site, SiteKind
from loka_onnx.engines.migraphx.site_precision import parse_program, products_of, site_precisions

PERF_TEST = """\
module: "main"
@0 = check_context::migraphx::gpu::context -> float_type, {}, {}
main:#output_0 = @param:main:#output_0 -> float_type, {4, 3}, {3, 1}
b = @param:b -> float_type, {5, 3}, {3, 1}
a = @param:a -> float_type, {4, 5}, {5, 1}
@4 = gpu::code_object[code_object=4656,symbol_name=mlir_dot,global=256,local=256,output_arg=2,]\
(a,b,main:#output_0) -> float_type, {4, 3}, {3, 1}

"""
FUSED = (
    "@5 = gpu::code_object[code_object=4832,symbol_name=mlir_dot_add,global=128,local=128,output_arg=3,]"
    "(x,@2,@1,main:#output_0) -> float_type, {1, 3}, {3, 1}\n"
)
NAMED = (
    "    @16 = load[offset=0,end=1024](@1) -> float_type, {1, 16, 4, 4}, {256, 16, 4, 1}\n"
    "    @19 = gpu::code_object[code_object=6176,symbol_name=mlir_reshape_dot_add,global=64,local=64,"
    "output_arg=3,](@17,@3,@2,main:#output_0) -> float_type, {1, 10}, {10, 1} # Plus214, Times212\n"
)
REFERENCE = """\
module: "main"
@0 = @literal{ ... } -> fp8e4m3fnuz_type, {64, 32}, {32, 1}
@1 = @literal{0.0078125} -> float_type, {1}, {0}
x = @param:x -> float_type, {16, 64}, {64, 1}
@4 = ref::multibroadcast[out_lens={16, 64},out_dyn_dims={}](@1) -> float_type, {16, 64}, {0, 0}
@3 = ref::quantizelinear[out_type=nullopt](x,@4) -> fp8e4m3fnuz_type, {16, 64}, {64, 1}
@5 = ref::dequantizelinear(@3,@4) -> float_type, {16, 64}, {64, 1}
@6 = ref::multibroadcast[out_lens={64, 32},out_dyn_dims={}](@1) -> float_type, {64, 32}, {0, 0}
@7 = ref::dequantizelinear(@0,@6) -> float_type, {64, 32}, {32, 1}
@8 = ref::dot(@5,@7) -> float_type, {16, 32}, {32, 1}
@9 = @return(@8)
"""
MERGED = """\
@18 = @param:x -> half_type, {64, 384, 768}, {294912, 768, 1}
@21 = hip::hip_copy_literal[id=main:@literal:3] -> fp8e4m3fnuz_type, {768, 2304}, {2304, 1}
@22 = load[offset=150994944,end=603979776](@1) -> half_type, {64, 384, 2304}, {884736, 2304, 1}
@24 = gpu::code_object[code_object=8920,symbol_name=mlir_quantizelinear_quant_dot_dequantizelinear_add_add,\
global=1769472,local=256,](@18,@21,@23,@15,@22) -> half_type, {64, 384, 2304}, {884736, 2304, 1}
@25 = load[offset=603979776,end=622854144](@1) -> fp8e4m3fnuz_type, {64, 12, 64, 384}, {294912, 24576, 384, 1}
@26 = slice[axes={2},starts={768},ends={1536}](@24) -> half_type, {64, 384, 768}, {884736, 2304, 1}
@27 = reshape_lazy[dims={64, 384, 12, 64}](@26) -> half_type, {64, 384, 12, 64}, {884736, 2304, 64, 1}
@28 = transpose[permutation={0, 2, 3, 1}](@27) -> half_type, {64, 12, 64, 384}, {884736, 64, 1, 2304}
@29 = gpu::code_object[code_object=6816,symbol_name=quantizelinear_kernel,global=1179648,local=256,]\
(@28,@25) -> fp8e4m3fnuz_type, {64, 12, 64, 384}, {294912, 24576, 384, 1}
@30 = load[offset=150994944,end=603979776](@1) -> float_type, {64, 12, 384, 384}, {1769472, 147456, 384, 1}
@31 = gpu::code_object[code_object=7000,symbol_name=mlir_slice_reshape_transpose_quantizelinear_quant_dot,\
global=3538944,local=256,](@24,@29,@30) -> float_type, {64, 12, 384, 384}, {1769472, 147456, 384, 1}
"""
"""Lines @24 to @31 of the issue; the first three are what they read."""
FLOAT8 = """\
module: "main"
@0 = check_context::migraphx::gpu::context -> float_type, {}, {}
@1 = hip::hip_copy_literal[id=main:@literal:0] -> fp8e4m3fnuz_type, {64, 32}, {32, 1}
@2 = hip::hip_copy_literal[id=main:@literal:1] -> fp8e4m3fnuz_type, {2048, 512}, {512, 1}
@3 = hip::hip_allocate_memory[shape=int8_type, {65536}, {1},id=main:scratch] -> int8_type, {65536}, {1}
x = @param:x -> float_type, {8, 64}, {64, 1}
@5 = load[offset=0,end=512](@3) -> fp8e4m3fnuz_type, {8, 64}, {64, 1}
@6 = gpu::code_object[code_object=4832,symbol_name=mul_quantizelinear_kernel,global=128,local=128,](x,@5) \
-> fp8e4m3fnuz_type, {8, 64}, {64, 1}
@7 = load[offset=512,end=1536](@3) -> float_type, {8, 32}, {32, 1}
@8 = gpu::code_object[code_object=4832,symbol_name=mlir_quant_dot_dequantizelinear_add,global=128,local=128,\
output_arg=2,](@6,@1,@7) -> float_type, {8, 32}, {32, 1}, target_id=0
@9 = load[offset=1536,end=17920](@3) -> fp8e4m3fnuz_type, {8, 2048}, {2048, 1}
@10 = load[offset=17920,end=34304](@3) -> float_type, {8, 512}, {512, 1}
@11 = gpu::hip_quant_gemm[alpha=1,beta=0,trans_batch=0,solution_idx=0]\
(@9,@2,@3,@10) -> float_type, {8, 512}, {512, 1}
@12 = @return(@8,@11), target_id=0
"""
INT8 = FLOAT8.replace("fp8e4m3fnuz", "int8").replace("@10) -> float_type", "@10) -> int32_type")
DROPPED = """\
module: "main"
x = @param:x -> half_type, {8, 64}, {64, 1}
@1 = hip::hip_copy_literal[id=main:@literal:0] -> half_type, {64, 32}, {32, 1}
@2 = hip::hip_copy_literal[id=main:@literal:1] -> fp8e4m3fn_type, {64, 32}, {32, 1}
@3 = load[offset=0,end=512](@9) -> fp8e4m3fn_type, {8, 64}, {64, 1}
main:#output_0 = @param:main:#output_0 -> half_type, {8, 32}, {32, 1}
@5 = gpu::code_object[code_object=4656,symbol_name=mlir_dot_add,global=256,local=256,output_arg=2,]\
(x,@1,main:#output_0) -> half_type, {8, 32}, {32, 1}
@6 = gpu::code_object[code_object=4656,symbol_name=mlir_quant_dot,global=256,local=256,output_arg=2,]\
(@3,@2,main:#output_0) -> float_type, {8, 32}, {32, 1}
"""


def site(name: str, k: int, n: int, kind: SiteKind = SiteKind.LINEAR, reads: str = "x") -> Site:
    activation, weight = Operand(reads, 0, False, 1, ()), Operand(f"{name}.w", 1, True, 0, (k, n))
    operands = (activation, weight) if kind is SiteKind.LINEAR else (activation,)
    return Site(name, kind, "MatMul", operands, "y", k, n, 1)


def read(text: str, *sites: Site, precision: Precision = Precision.FP8) -> tuple[SitePrecision, ...]:
    return site_precisions([parse_program(text)], [(each, precision) for each in sites])


class TestProducts:
    def test_the_format_is_that_of_the_factors(self) -> None:
        """Memory of bytes, which a kernel reads too, is no INT8 factor."""
        assert {p.format for p in products_of(parse_program(FLOAT8))} == {Precision.FP8}
        assert {p.format for p in products_of(parse_program(INT8))} == {Precision.INT8}
        plain = FLOAT8.replace("fp8e4m3fnuz", "half").replace("quant_dot", "dot").replace("quant_g", "g")
        assert {p.format for p in products_of(parse_program(plain))} == {None}
        (simulated,) = products_of(parse_program(REFERENCE.replace("fp8e4m3fnuz", "int8")))
        assert (simulated.format, simulated.is_simulated) == (Precision.INT8, True)

    @pytest.mark.parametrize("bias", ["@2", "@9"])
    def test_a_bias_is_no_weight(self, bias: str) -> None:
        text = """\
x = @param:x -> float_type, {64, 16}, {16, 1}
@1 = hip::hip_copy_literal[id=0] -> float_type, {16, 32}, {32, 1}
@2 = @literal{ ... } -> float_type, {32}, {1}
@9 = multibroadcast[out_lens={64, 32}](@2) -> float_type, {64, 32}, {0, 1}
out = @param:out -> float_type, {64, 32}, {32, 1}
@3 = gpu::code_object[symbol_name=mlir_dot_add,](x,BIAS,@1,out) -> float_type, {64, 32}, {32, 1}
"""
        (product,) = products_of(parse_program(text.replace("BIAS", bias)))
        assert product.weight == (16, 32)

    @pytest.mark.parametrize(
        ("first", "second", "stored", "result", "size"),
        [
            ((8, 64), (64, 32), 1, (8, 32), (64, 32)),
            # The kernel transposes: the weight is N × K.
            ((8, 64), (32, 64), 1, (8, 32), (64, 32)),
            ((64, 64), (32, 64), 1, (64, 32), (64, 32)),
            # On the left it is N × K.
            ((32, 64), (4, 64, 8), 0, (4, 32, 8), (64, 32)),
            ((32, 64), (4, 64, 32), 0, (4, 32, 32), (64, 32)),
        ],
    )
    def test_size_of_a_stored_factor(self, first, second, stored: int, result, size) -> None:
        makers = ["@param:x", "@param:x", "@param:out", "gpu::code_object[symbol_name=mlir_dot,](@0,@1,@2)"]
        makers[stored] = "hip::hip_copy_literal[id=0]"
        shapes = (", ".join(map(str, shape)) for shape in (first, second, (1,), result))
        made = enumerate(zip(makers, shapes, strict=True))
        text = "\n".join(f"@{i} = {maker} -> float_type, {{{shape}}}, {{1}}" for i, (maker, shape) in made)
        (product,) = products_of(parse_program(text))
        assert product.weight == size

    @pytest.mark.parametrize(("k", "n", "fits"), [(16, 32, True), (24, 32, False), (32, 16, False)])
    def test_a_product_of_two_activations_has_a_size_too(self, k: int, n: int, fits: bool) -> None:
        text = """\
x = @param:x -> float_type, {4, 8, 16}, {128, 16, 1}
y = @param:y -> float_type, {4, 16, 32}, {512, 32, 1}
out = @param:out -> float_type, {4, 8, 32}, {256, 32, 1}
@3 = gpu::code_object[symbol_name=mlir_dot,](x,y,out) -> float_type, {4, 8, 32}, {256, 32, 1}
"""
        (product,) = products_of(parse_program(text))
        assert product.weight is None
        assert product.fits(site("dot", k, n, SiteKind.INTERACTION)) is fits

    def test_half_a_pair_is_no_simulation(self) -> None:
        text = REFERENCE.replace("ref::dot(@5,@7)", "ref::dot(x,@7)")
        (product,) = products_of(parse_program(text))
        assert product.factors == ("float", "fp8e4m3fnuz")
        assert not product.is_simulated


class TestSites:
    @pytest.mark.parametrize(("text", "runs"), [(FLOAT8, Precision.FP8), (INT8, Precision.INT8)])
    @pytest.mark.parametrize("planned", [Precision.FP8, Precision.INT8])
    def test_a_site_runs_in_the_format_of_its_product(self, text: str, runs: str, planned: Precision) -> None:
        for found in read(text, site("fc0", 64, 32), site("fc1", 2048, 512), precision=planned):
            assert found.engaged is (runs is planned) and found.planned == planned
            assert {kind[:3] for kind in found.operands} == {runs[:3]}

    def test_sites_of_a_mixed_plan_are_not_confused(self) -> None:
        """Of one size, one in each format; with both products in INT8, the FP8 site fell back."""
        fp8, int8 = "(@3,@2,main:#output_0) -> float_type", "(@13,@12,main:#output_0) -> int32_type"
        line = next(line for line in DROPPED.splitlines() if fp8 in line)
        text = DROPPED.replace("mlir_dot_add", "mlir_reshape") + "".join(
            f"{other}\n"
            for other in (
                "@12 = hip::hip_copy_literal[id=main:@literal:2] -> int8_type, {64, 32}, {32, 1}",
                "@13 = load[offset=0,end=512](@9) -> int8_type, {8, 64}, {64, 1}",
                line.replace("@6 =", "@16 =").replace(fp8, int8),
            )
        )
        planned = [(site("fc0", 64, 32), Precision.FP8), (site("fc1", 64, 32), Precision.INT8)]
        both = site_precisions([parse_program(text)], planned)
        assert [(each.engaged, each.operands[0]) for each in both] == [(True, "fp8e4m3fn"), (True, "int8")]
        both = site_precisions([parse_program(text.replace("fp8e4m3fn", "int8"))], planned)
        assert [each.engaged for each in both] == [False, True]
        assert "0 FP8 products of 64 × 32 for 1 planned sites" in both[0].evidence

    def test_a_site_without_its_product_fell_back(self) -> None:
        (found,) = read(FLOAT8, site("fc2", 64, 48))
        assert (found.engaged, found.operands) == (False, ())
        assert found.evidence == "compiled program: 0 FP8 products of 64 × 48 for 1 planned sites"

    def test_a_dropped_pair_shows_as_a_plain_dot(self) -> None:
        text = "\n".join(line for line in DROPPED.splitlines() if "quant_dot" not in line)
        (found,) = read(text, site("fc0", 64, 32))
        assert (found.engaged, found.operands) == (False, ("half", "half"))
        assert "mlir_dot_add @5 multiplies half by half" in found.evidence

    def test_of_two_sites_of_one_size_with_one_product_neither_is_believed(self) -> None:
        sites = site("fc0", 64, 32), site("fc1", 64, 32)
        both = read(DROPPED, *sites)
        assert [each.engaged for each in both] == [False, False]
        assert "1 FP8 products of 64 × 32 for 2 planned sites, and it does not say which" in both[0].evidence
        twice = DROPPED.replace("mlir_dot_add", "mlir_quant_dot_add").replace("half", "fp8e4m3fn")
        both = read(twice, *sites)
        assert [each.engaged for each in both] == [True, True]
        assert "one of 2 FP8 products of 64 × 32 for 2 sites" in both[0].evidence

    def test_rows_as_many_as_columns_make_no_weight_of_an_activation(self) -> None:
        """x of 32 rows × 64 columns is no weight of 64 × 32."""
        other = FLOAT8.replace("{8, 64}", "{32, 64}").replace("{8, 32}", "{32, 48}")
        text = other.replace("{64, 32}", "{64, 48}") + (
            "@20 = hip::hip_copy_literal[id=main:@literal:9] -> float_type, {64, 32}, {32, 1}\n"
            "out = @param:out -> float_type, {32, 32}, {32, 1}\n"
            "@21 = gpu::code_object[symbol_name=mlir_dot,](x,@20,out) -> float_type, {32, 32}, {32, 1}\n"
        )
        fc0, fc1 = read(text, site("fc0", 64, 32), site("fc1", 64, 48))
        assert (fc0.engaged, fc0.operands, fc1.engaged) == (False, ("float", "float"), True)

    def test_products_that_were_merged_are_found_by_their_columns(self) -> None:
        heads = [site(name, 768, 768, reads="tokens") for name in ("query", "key", "value")]
        found = read(MERGED, *heads)
        assert [each.engaged for each in found] == [True] * 3
        assert all("dequantizelinear_add_add @24" in each.evidence for each in found)

    @pytest.mark.parametrize(
        ("sites", "engaged"),
        [
            # A fourth site over the same K fell back: the columns do not add up.
            ([("a", 768, "x"), ("b", 768, "x"), ("c", 768, "x"), ("d", 768, "y")], False),
            # Either the large one, or the two of one tensor: nothing says which.
            ([("a", 1152, "x"), ("b", 1152, "x"), ("c", 2304, "y")], False),
            ([("a", 2304, "x")], True),
            ([("a", 1536, "x"), ("b", 768, "x")], True),
        ],
    )
    def test_columns_that_do_not_add_up_are_no_evidence(self, sites, engaged):
        found = read(MERGED, *[site(name, 768, n, reads=reads) for name, n, reads in sites])
        assert [each.engaged for each in found] == [engaged] * len(sites)

    def test_a_name_is_believed_before_a_size(self) -> None:
        end = "_type, {8, 32}, {32, 1}\n"
        named = DROPPED.replace(f"output_0) -> half{end}", f"output_0) -> half{end[:-1]} # fc0\n")
        named = named.replace(f"float{end}", f"float{end[:-1]} # fc1\n")
        fc0, fc1 = read(named, site("fc0", 64, 32), site("fc1", 64, 32))
        assert (fc0.engaged, fc1.engaged) == (False, True)
        assert fc0.evidence.endswith("named after the site, multiplies half by half")

    def test_the_least_of_several_programs_is_what_counts(self) -> None:
        programs = [parse_program(text) for text in (FLOAT8, PERF_TEST)]
        (found,) = site_precisions(programs, [(site("fc0", 64, 32), Precision.FP8)])
        assert not found.engaged

    def test_the_reference_target_simulates(self) -> None:
        (found,) = read(REFERENCE, site("fc0", 64, 32))
        assert found.engaged
        assert found.evidence.endswith("simulated: FP8 Q/DQ around a product in the base precision")
        text = REFERENCE.replace("fp8e4m3fnuz", "int8")
        (found,) = read(text, site("fc0", 64, 32), precision=Precision.INT8)
        assert found.engaged
        assert found.evidence.endswith("simulated: INT8 Q/DQ around a product in the base precision")

    def test_the_base_precision_of_a_site(self) -> None:
        fc = site("fc0", 64, 32)
        for precision in (Precision.FP16, Precision.BF16):
            (found,) = read(DROPPED, fc, precision=precision)
            assert (found.engaged, found.operands) == (precision is Precision.FP16, ("half", "half"))
        (merged,) = read(DROPPED, site("fc3", 64, 16), precision=Precision.FP16)
        assert merged.engaged
        assert merged.evidence.endswith("none of 64 × 16: merged or fused with others")
        (none,) = read("", fc, precision=Precision.FP16)
        assert (none.engaged, none.evidence) == (False, "compiled program: it has no product")

    def test_a_norm_has_its_type_somewhere(self) -> None:
        norm = site("norm", 64, 0, SiteKind.NORM)
        (half,), (bf16,) = (read(DROPPED, norm, precision=p) for p in (Precision.FP16, Precision.BF16))
        assert (half.engaged, bf16.engaged) == (True, False)
        assert "bf16 is nowhere" in bf16.evidence

"""MIGraphX's printed programs, read back.

`PERF_TEST`, `FUSED` and `NAMED` are what releases 2.15.0 and 2.16 printed on GPUs (public logs of
``migraphx-driver``); `REFERENCE` and `FLOAT8` are put together from the same kinds of lines, FP8 in them.
"""

from __future__ import annotations

import pytest

from loka_onnx.core.formats import Precision
from loka_onnx.core.site import Operand, Site, SiteKind
from loka_onnx.engines.migraphx.program_text import parse_program
from loka_onnx.engines.migraphx.site_precision import PlannedSite, products_of, site_precisions

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
x = @param:x -> float_type, {8, 64}, {64, 1}
@1 = @literal{0.0078125} -> float_type, {1}, {0}
@2 = @literal{0} -> fp8e4m3fnuz_type, {1}, {0}
@3 = @literal{ ... } -> fp8e4m3fnuz_type, {64, 32}, {32, 1}
@4 = multibroadcast[out_lens={8, 64},out_dyn_dims={}](@1) -> float_type, {8, 64}, {0, 0}
@5 = multibroadcast[out_lens={8, 64},out_dyn_dims={}](@2) -> fp8e4m3fnuz_type, {8, 64}, {0, 0}
@6 = quantizelinear[out_type=nullopt](x,@4,@5) -> fp8e4m3fnuz_type, {8, 64}, {64, 1}
@7 = dequantizelinear(@6,@4,@5) -> float_type, {8, 64}, {64, 1}
@8 = multibroadcast[out_lens={64, 32},out_dyn_dims={}](@1) -> float_type, {64, 32}, {0, 0}
@9 = multibroadcast[out_lens={64, 32},out_dyn_dims={}](@2) -> fp8e4m3fnuz_type, {64, 32}, {0, 0}
@10 = dequantizelinear(@3,@8,@9) -> float_type, {64, 32}, {32, 1}
@11 = ref::dot(@7,@10) -> float_type, {8, 32}, {32, 1}
@12 = @return(@11)
"""
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


def site(name: str, k: int, n: int, kind: SiteKind = SiteKind.LINEAR) -> Site:
    return Site(name, kind, "MatMul", (Operand("x", 0, False, 1, ()),), "y", k, n, 1)


def planned(*sites: Site, precision: Precision = Precision.FP8) -> list[PlannedSite]:
    return [PlannedSite(each, precision) for each in sites]


class TestLines:
    def test_parameters_and_kernels_of_2_15(self) -> None:
        program = parse_program(PERF_TEST)
        assert list(program.instructions) == ["@0", "main:#output_0", "b", "a", "@4"]
        parameter, kernel = program.instructions["b"], program.instructions["@4"]
        assert (parameter.operation, parameter.type, parameter.shape) == ("@param:b", "float", (5, 3))
        assert (kernel.operation, kernel.kernel) == ("gpu::code_object", "mlir_dot")
        assert kernel.inputs == ("a", "b", "main:#output_0")
        assert kernel.shape == (4, 3)
        assert program.instructions["@0"].shape == ()
        assert [each.name for each in program.inputs_of(kernel)] == ["a", "b", "main:#output_0"]
        assert program.types == {"float"}

    def test_fused_kernels(self) -> None:
        (kernel,) = parse_program(FUSED).instructions.values()
        assert (kernel.kernel, kernel.inputs[-1], kernel.label) == (
            "mlir_dot_add",
            "main:#output_0",
            "mlir_dot_add @5",
        )

    def test_names_of_onnx_nodes(self) -> None:
        load, kernel = parse_program(NAMED).instructions.values()
        assert (load.operation, load.attributes, load.inputs) == ("load", "[offset=0,end=1024]", ("@1",))
        assert kernel.symbols == ("Plus214", "Times212")
        assert (kernel.type, kernel.shape) == ("float", (1, 10))

    def test_literals_attributes_with_braces_and_returns(self) -> None:
        program = parse_program(REFERENCE)
        literal, spread = program.instructions["@1"], program.instructions["@4"]
        assert (literal.operation, literal.inputs, literal.shape) == ("@literal", (), (1,))
        assert (spread.operation, spread.inputs, spread.shape) == ("multibroadcast", ("@1",), (8, 64))
        assert program.instructions["@6"].inputs == ("x", "@4", "@5")
        returned = program.instructions["@12"]
        assert (returned.operation, returned.inputs, returned.type) == ("@return", ("@11",), "")

    def test_targets_behind_a_shape(self) -> None:
        program = parse_program(FLOAT8)
        assert program.instructions["@8"].shape == (8, 32)
        assert program.instructions["@3"].shape == (65536,)

    @pytest.mark.parametrize(
        "line", ["", 'module: "main"', "Compiling ... ", "Summary:", "no assignment here"]
    )
    def test_other_lines_are_passed_over(self, line: str) -> None:
        assert parse_program(line).instructions == {}


class TestProducts:
    def test_kernels_that_multiply(self) -> None:
        found = {p.instruction.name: p.is_float8 for p in products_of(parse_program(FLOAT8))}
        assert found == {"@8": True, "@11": True}
        assert [p.instruction.name for p in products_of(parse_program(PERF_TEST))] == ["@4"]
        assert [p.instruction.name for p in products_of(parse_program(NAMED))] == ["@19"]

    def test_factors_are_followed_to_what_was_dequantized(self) -> None:
        (product,) = products_of(parse_program(REFERENCE))
        assert product.factors == ("fp8e4m3fnuz", "fp8e4m3fnuz")
        assert product.is_simulated

    def test_half_a_pair_is_no_simulation(self) -> None:
        text = REFERENCE.replace("ref::dot(@7,@10)", "ref::dot(x,@10)")
        (product,) = products_of(parse_program(text))
        assert product.factors == ("float", "fp8e4m3fnuz")
        assert not product.is_simulated


class TestSites:
    def test_quant_dot_of_the_size_is_fp8(self) -> None:
        small, large = site_precisions(
            [parse_program(FLOAT8)], planned(site("fc0", 64, 32), site("fc1", 2048, 512))
        )
        assert (small.site, small.planned, small.engaged) == ("fc0", "fp8", True)
        assert small.operands == ("fp8e4m3fnuz", "fp8e4m3fnuz")
        assert small.evidence == "compiled program: mlir_quant_dot_dequantizelinear_add @8"
        assert large.engaged
        assert "gpu::hip_quant_gemm @11" in large.evidence

    def test_a_site_without_its_product_fell_back(self) -> None:
        (found,) = site_precisions([parse_program(FLOAT8)], planned(site("fc2", 64, 48)))
        assert not found.engaged
        assert found.operands == ()
        assert found.evidence == "compiled program: 0 FP8 products of 64 × 48 for 1 planned sites"

    def test_a_dropped_pair_shows_as_a_plain_dot(self) -> None:
        text = "\n".join(line for line in DROPPED.splitlines() if "quant_dot" not in line)
        (found,) = site_precisions([parse_program(text)], planned(site("fc0", 64, 32)))
        assert not found.engaged
        assert found.operands == ("half", "half")
        assert "mlir_dot_add @5 multiplies half by half" in found.evidence

    def test_of_two_sites_of_one_size_with_one_product_neither_is_believed(self) -> None:
        sites = planned(site("fc0", 64, 32), site("fc1", 64, 32))
        both = site_precisions([parse_program(DROPPED)], sites)
        assert [each.engaged for each in both] == [False, False]
        assert "1 FP8 products of 64 × 32 for 2 planned sites, and it does not say which" in both[0].evidence
        twice = DROPPED.replace("mlir_dot_add", "mlir_quant_dot_add").replace("half", "fp8e4m3fn")
        both = site_precisions([parse_program(twice)], sites)
        assert [each.engaged for each in both] == [True, True]
        assert "one of 2 FP8 products of 64 × 32 for 2 sites" in both[0].evidence

    def test_a_name_is_believed_before_a_size(self) -> None:
        named = DROPPED.replace(
            "(x,@1,main:#output_0) -> half_type, {8, 32}, {32, 1}",
            "(x,@1,main:#output_0) -> half_type, {8, 32}, {32, 1} # fc0",
        )
        named = named.replace("float_type, {8, 32}, {32, 1}\n", "float_type, {8, 32}, {32, 1} # fc1\n")
        fc0, fc1 = site_precisions([parse_program(named)], planned(site("fc0", 64, 32), site("fc1", 64, 32)))
        assert (fc0.engaged, fc1.engaged) == (False, True)
        assert fc0.evidence.endswith("named after the site, multiplies half by half")

    def test_the_least_of_several_programs_is_what_counts(self) -> None:
        (found,) = site_precisions(
            [parse_program(FLOAT8), parse_program(PERF_TEST)], planned(site("fc0", 64, 32))
        )
        assert not found.engaged

    def test_the_reference_target_simulates(self) -> None:
        (found,) = site_precisions([parse_program(REFERENCE)], planned(site("fc0", 64, 32)))
        assert found.engaged
        assert found.evidence.endswith("simulated: FP8 Q/DQ around a product in the base precision")

    def test_the_base_precision_of_a_site(self) -> None:
        fc = site("fc0", 64, 32)
        (half,) = site_precisions([parse_program(DROPPED)], planned(fc, precision=Precision.FP16))
        assert (half.engaged, half.operands) == (True, ("half", "half"))
        (bf16,) = site_precisions([parse_program(DROPPED)], planned(fc, precision=Precision.BF16))
        assert (bf16.engaged, bf16.operands) == (False, ("half", "half"))
        (merged,) = site_precisions(
            [parse_program(DROPPED)], planned(site("fc3", 64, 16), precision=Precision.FP16)
        )
        assert merged.engaged
        assert merged.evidence.endswith("none of 64 × 16: merged or fused with others")
        (none,) = site_precisions([parse_program("")], planned(fc, precision=Precision.FP16))
        assert (none.engaged, none.evidence) == (False, "no product in the compiled program")

    def test_a_norm_has_its_type_somewhere(self) -> None:
        norm = site("norm", 64, 0, SiteKind.NORM)
        (half,) = site_precisions([parse_program(DROPPED)], planned(norm, precision=Precision.FP16))
        (bf16,) = site_precisions([parse_program(DROPPED)], planned(norm, precision=Precision.BF16))
        assert (half.engaged, bf16.engaged) == (True, False)
        assert "bf16 is nowhere" in bf16.evidence

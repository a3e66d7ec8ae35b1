"""The reader of compiled graphs, on text as TensorRT for RTX 1.7.1 writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from loka_onnx.core.engine import SitePrecision
from loka_onnx.core.formats import Precision
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.engines.tensorrt.compiled_graph import (
    CompiledGraph,
    parse_compiled_graph,
    read_compiled_graphs,
)
from loka_onnx.engines.tensorrt.site_precision import site_precisions
from loka_onnx.errors import EngineError

TEXT = (Path(__file__).parent / "samples" / "compiled_graph.txt").read_text(encoding="latin-1")


@pytest.fixture
def graph() -> CompiledGraph:
    return parse_compiled_graph(TEXT)


def site(name: str, kind: SiteKind = SiteKind.LINEAR) -> Site:
    return Site(name, kind, "MatMul", (), f"{name}:0", 64, 256, 1)


def one(
    graph: CompiledGraph, name: str, precision: Precision, kind: SiteKind = SiteKind.LINEAR
) -> SitePrecision:
    return site_precisions([graph], [(site(name, kind), precision)])[0]


def test_it_reads_header_tensors_and_operations(graph: CompiledGraph) -> None:
    assert graph.architectures == ("sm89",)
    assert graph.settings["tf32"] == "0"
    assert graph.tensors["Wq"].constant_bytes == 16384
    assert graph.type_of("y.1_4") == "fp8_e4m3"
    assert graph.type_of("absent") == "unknown"
    assert (graph.type_of("q8^deref"), graph.base_of("q8^deref")) == ("fp8_e4m3", "q8")
    assert [o.kind for o in graph.operations] == [
        "shape_call",
        "function",
        "fully_connected",
        "fully_connected",
        "runtime_fusion",
        "function",
        "fully_connected",
        "function",
        "fully_connected",
        "copy",
    ]
    product = graph.operations[2]
    assert product.inputs == ("y.1_4", "Wq", "alpha")
    assert product.outputs == ("k",)
    assert product.layers == ("fc1", "fc1/dq", "a[0] = {b}")
    assert graph.operations[1].inputs == ("x.1",)


def test_an_engine_holds_several_graphs_among_binary(tmp_path: Path) -> None:
    engine = tmp_path / "engine.trt"
    text = TEXT.encode("latin-1")
    engine.write_bytes(b"\x00\xffptrt header {" + text + b"\x00\x02" + text.replace(b"sm89", b"*"))
    assert [g.architectures for g in read_compiled_graphs(engine)] == [("sm89",), ("*",)]
    engine.write_bytes(b"\x00\x01\x02 nothing to read")
    assert read_compiled_graphs(engine) == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TEXT[: TEXT.index('name="x.1"')], "breaks off"),
        (TEXT[: TEXT.index("descriptors")], "no section 'descriptors'"),
        ("", "no section 'header'"),
    ],
)
def test_unreadable_text_is_an_error(text: str, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        parse_compiled_graph(text)


def test_both_operands_in_fp8_engage(graph: CompiledGraph) -> None:
    found = one(graph, "fc1", Precision.FP8)
    assert found.engaged
    assert found.operands == ("fp8_e4m3", "fp8_e4m3")
    assert found.evidence == "compiled graph: fully_connected 'fc1'"


def test_a_converted_product_is_a_fallback(graph: CompiledGraph) -> None:
    found = one(graph, "fc2", Precision.FP8)
    assert not found.engaged
    assert found.operands == ("bf16", "bf16")
    assert "multiplies bf16 by bf16 where the plan says fp8_e4m3, inside runtime_fusion" in found.evidence
    assert one(graph, "fc2", Precision.BF16).engaged
    assert not one(graph, "fc2", Precision.FP32).engaged


def test_one_program_in_another_type_spoils_the_site(graph: CompiledGraph) -> None:
    other = parse_compiled_graph(TEXT.replace("const_payload_size=16384 ", "").replace("fp8_e4m3", "half"))
    found = site_precisions([graph, other], [(site("fc1"), Precision.FP8)])[0]
    assert not found.engaged
    assert found.operands == ("half", "half")


def test_a_name_that_begins_with_another_is_not_that_site(graph: CompiledGraph) -> None:
    found = one(graph, "fc", Precision.FP8)
    assert not found.engaged
    assert "nothing under its name" in found.evidence


def test_a_product_inside_a_fused_kernel(graph: CompiledGraph) -> None:
    assert one(graph, "dot", Precision.BF16, SiteKind.INTERACTION).engaged
    assert not one(graph, "dot", Precision.FP16, SiteKind.INTERACTION).engaged
    found = one(graph, "dot", Precision.FP8, SiteKind.INTERACTION)
    assert not found.engaged
    assert "function '_gemm_mha_v2' of bf16 and bf16 and bf16" in found.evidence


def test_a_norm_reports_what_enters_its_kernel(graph: CompiledGraph) -> None:
    found = one(graph, "ln", Precision.BF16, SiteKind.NORM)
    assert found.engaged
    assert found.operands == ("bf16",)


def test_a_second_rounding_of_merged_sites_is_told(graph: CompiledGraph) -> None:
    found = one(graph, "p", Precision.FP8)
    assert found.engaged
    assert "rounded to FP8 before the scales of the merged sites" in found.evidence


def test_tf32_is_not_fp32(graph: CompiledGraph) -> None:
    assert one(graph, "full", Precision.FP32).engaged
    loose = parse_compiled_graph(TEXT.replace("tf32=0", "tf32=1"))
    assert not one(loose, "full", Precision.FP32).engaged


def test_no_graph_means_no_claim() -> None:
    found = site_precisions([], [(site("fc1"), Precision.FP8)])[0]
    assert not found.engaged
    assert found.evidence == "the engine carries no compiled graph to read"

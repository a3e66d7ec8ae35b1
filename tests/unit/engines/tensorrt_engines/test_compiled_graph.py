"""TensorRT's compiled graphs as they are read, and the vendor's names that are used."""

import ast
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
from vendor_names import attributes

import loka_onnx
from loka_onnx.core.engine import SitePrecision
from loka_onnx.core.formats import Precision
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.engines.tensorrt.compiled_graph import parse_compiled_graph, read_compiled_graphs
from loka_onnx.engines.tensorrt.site_precision import site_precisions
from loka_onnx.errors import EngineError

TEXT = (Path(__file__).parent / "samples" / "compiled_graph.txt").read_text(encoding="latin-1")


GRAPH = parse_compiled_graph(TEXT)


def one(name: str, planned: Precision, kind: SiteKind = SiteKind.LINEAR, *graphs: Any) -> SitePrecision:
    site = Site(name, kind, "MatMul", (), f"{name}:0", 64, 256, 1)
    return site_precisions(graphs or [GRAPH], [(site, planned)])[0]


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


def test_both_operands_in_fp8_engage_and_a_converted_product_does_not() -> None:
    found = one("fc1", Precision.FP8)
    assert (found.engaged, found.operands) == (True, ("fp8_e4m3", "fp8_e4m3"))
    assert found.evidence == "compiled graph: fully_connected 'fc1'"
    found = one("fc2", Precision.FP8)
    assert (found.engaged, found.operands) == (False, ("bf16", "bf16"))
    assert "multiplies bf16 by bf16 where the plan says fp8_e4m3, inside runtime_fusion" in found.evidence
    assert one("fc2", Precision.BF16).engaged
    assert not one("fc2", Precision.FP32).engaged
    assert one("full", Precision.FP32).engaged
    loose = parse_compiled_graph(TEXT.replace("tf32=0", "tf32=1"))
    assert not one("full", Precision.FP32, SiteKind.LINEAR, loose).engaged


def test_one_program_in_another_type_no_graph_and_a_longer_name_are_no_claim() -> None:
    other = parse_compiled_graph(TEXT.replace("const_payload_size=16384 ", "").replace("fp8_e4m3", "half"))
    found = one("fc1", Precision.FP8, SiteKind.LINEAR, GRAPH, other)
    assert (found.engaged, found.operands) == (False, ("half", "half"))
    found = one("fc", Precision.FP8)
    assert not found.engaged
    assert "nothing under its name" in found.evidence
    (found,) = site_precisions([], [(Site("fc1", SiteKind.LINEAR, "", (), "", 64, 256, 1), Precision.FP8)])
    assert (found.engaged, found.evidence) == (False, "the engine carries no compiled graph to read")


def test_a_product_inside_a_fused_kernel_a_norm_and_a_second_rounding() -> None:
    assert one("dot", Precision.BF16, SiteKind.INTERACTION).engaged
    assert not one("dot", Precision.FP16, SiteKind.INTERACTION).engaged
    found = one("dot", Precision.FP8, SiteKind.INTERACTION)
    assert not found.engaged
    assert "function '_gemm_mha_v2' of bf16 and bf16 and bf16" in found.evidence
    found = one("ln", Precision.BF16, SiteKind.NORM)
    assert (found.engaged, found.operands) == (True, ("bf16",))
    found = one("p", Precision.FP8)
    assert found.engaged
    assert "rounded to eight bits before the scales of the merged sites" in found.evidence


PACKAGE = Path(loka_onnx.__file__).parent
FILES = sorted((PACKAGE / "engines" / "tensorrt").glob("*.py"))
LIBRARIES = {"tensorrt 10.16", "tensorrt 11.4", "tensorrt_rtx 1.7"}
LISTED: dict[str, list[str]] = json.loads((Path(__file__).parent / "names.json").read_text(encoding="utf-8"))
VALUES = {
    *("trt", "_trt", "builder", "network", "parser", "error", "config", "profile", "cache", "other"),
    *("engine", "_engine", "tensor", "runtime", "_runtime", "loaded", "context", "inspector"),
}
"""Names of variables that hold a value of the vendor's."""
OWN = {"attach", "keep", "inputs", "read_bytes", "open", "type", "elements", "data_type"}
"""Names of our own values under these names."""


def asked_for(tree: ast.AST) -> set[str]:
    """Names that `hasattr` and `getattr` are called with."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) > 1)
    return {
        str(call.args[1].value)
        for call in calls
        if getattr(call.func, "id", "") in {"hasattr", "getattr"} and isinstance(call.args[1], ast.Constant)
    } - {"__version__", "__path__", "__members__"}


def test_names_are_those_of_the_list_and_only_this_folder_uses_them() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in FILES]
    asked = set().union(*map(asked_for, trees))
    used = set().union(*(attributes(tree, VALUES) for tree in trees)) - OWN
    assert used | asked == set(LISTED)
    assert {name for name, libraries in LISTED.items() if set(libraries) < LIBRARIES} <= asked
    others = set(PACKAGE.rglob("*.py")) - set(FILES)
    assert not [path for path in others if re.search(r"\b_?trt\.|import tensorrt", path.read_text("utf-8"))]


def test_what_is_listed_for_rtx_is_in_the_module() -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="needs tensorrt_rtx")
    members = set(dir(trt)).union(*(dir(kind) for _, kind in inspect.getmembers(trt, inspect.isclass)))
    assert {name for name, libraries in LISTED.items() if "tensorrt_rtx 1.7" in libraries} <= members

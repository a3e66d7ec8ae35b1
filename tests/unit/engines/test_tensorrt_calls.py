"""Every TensorRT name that is used exists in TensorRT 10 and 11, or its absence is provided for.

`names/` holds the identifiers in the two bindings' binaries; short ones are missing from such a list.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from loka_onnx.engines.tensorrt_rtx import build
from loka_onnx.sessions import tensorrt_session

HERE = Path(__file__).parent
TOO_SHORT_TO_BE_LISTED = {
    "Logger",
    "Builder",
    "Runtime",
    "INPUT",
    "OUTPUT",
    "nptype",
    "num_errors",
    "desc",
    "log",
}
RTX_ONLY = {"ComputeCapability", "num_compute_capabilities", "set_compute_capability"}
"""Used behind `known_capabilities`, which is empty elsewhere."""
VENDOR_VALUES = {
    "trt",
    "builder",
    "network",
    "parser",
    "config",
    "profile",
    "error",
    "tensor",
    "_trt",
    "_engine",
    "_context",
    "_runtime",
}


def used_names(path: Path) -> set[str]:
    """Attributes taken of values that belong to the vendor module, however deep."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Attribute):
            continue
        root: ast.expr = node.value
        while isinstance(root, ast.Attribute) and root.attr not in VENDOR_VALUES:
            root = root.value
        name = root.id if isinstance(root, ast.Name) else root.attr if isinstance(root, ast.Attribute) else ""
        if name in VENDOR_VALUES and not node.attr.startswith("_") and node.attr not in {"name", "shape"}:
            found.add(node.attr)
    return found


@pytest.mark.parametrize("version", ["10.16", "11.4"])
@pytest.mark.parametrize("module", [build.__file__, tensorrt_session.__file__])
def test_names_exist(version: str, module: str) -> None:
    listed = set((HERE / "names" / f"tensorrt-{version}-names.txt").read_text(encoding="utf-8").split())
    used = used_names(Path(module))
    assert len(used) > 10
    assert used - listed - TOO_SHORT_TO_BE_LISTED - RTX_ONLY == set()


def test_the_list_would_catch_a_name_that_is_gone() -> None:
    names = {
        version: set((HERE / "names" / f"tensorrt-{version}-names.txt").read_text(encoding="utf-8").split())
        for version in ("10.16", "11.4")
    }
    assert "OBEY_PRECISION_CONSTRAINTS" in names["10.16"] - names["11.4"]

"""Every name that is taken of TensorRT exists in TensorRT 10 and 11 and in TensorRT for RTX, or is asked for.

`names.json` lists these names, and for each the libraries whose Python bindings hold it: TensorRT 10.16 and
11.4, read from the strings of the binaries in NVIDIA's wheels, and TensorRT for RTX 1.7, read from the
module. A name that is newly used has to be looked up and added.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path

import pytest

import loka_onnx

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


def attributes(tree: ast.AST) -> set[str]:
    """Attributes taken of a vendor's value, or of what such an attribute is or returns."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not node.attr.startswith("_"):
            root = node.value
            while isinstance(root, ast.Attribute | ast.Call) and getattr(root, "attr", "") not in VALUES:
                root = root.func if isinstance(root, ast.Call) else root.value
            if getattr(root, "id", getattr(root, "attr", "")) in VALUES:
                found.add(node.attr)
    return found - OWN


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
    assert set().union(*map(attributes, trees)) | asked == set(LISTED)
    assert {name for name, libraries in LISTED.items() if set(libraries) < LIBRARIES} <= asked
    others = set(PACKAGE.rglob("*.py")) - set(FILES)
    assert not [path for path in others if re.search(r"\b_?trt\.|import tensorrt", path.read_text("utf-8"))]


def test_what_is_listed_for_rtx_is_in_the_module() -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="needs tensorrt_rtx")
    members = set(dir(trt)).union(*(dir(kind) for _, kind in inspect.getmembers(trt, inspect.isclass)))
    assert {name for name, libraries in LISTED.items() if "tensorrt_rtx 1.7" in libraries} <= members

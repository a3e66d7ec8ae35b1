"""Every attribute that is used of MIGraphX's module is one that it has, and only `migraphx_api` uses any."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from loka_onnx.engines.migraphx import api as migraphx_api
from loka_onnx.engines.migraphx import backend
from loka_onnx.engines.migraphx import session as migraphx_session

NAMES = Path(__file__).parent / "migraphx-names.txt"
VENDOR_VALUES = {
    *("migraphx", "program", "result", "source", "main", "instruction", "each", "shape", "value"),
    *("loaded", "module", "_migraphx"),
}
DUNDERS = {"__doc__", "__version__", "__file__"}


def used_names(path: str) -> set[str]:
    """Attributes taken of values that belong to the module."""
    found = set()
    for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            root = node.value
            while isinstance(root, ast.Attribute | ast.Call) and not (
                isinstance(root, ast.Attribute) and root.attr in VENDOR_VALUES
            ):
                root = root.value if isinstance(root, ast.Attribute) else root.func
            name = root.id if isinstance(root, ast.Name) else getattr(root, "attr", "")
            if name in VENDOR_VALUES:
                found.add(node.attr)
    return found - DUNDERS


def listed() -> set[str]:
    lines = NAMES.read_text(encoding="utf-8").splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def test_names_exist() -> None:
    assert used_names(migraphx_api.__file__) == listed()


@pytest.mark.parametrize("module", [backend, migraphx_session], ids=lambda m: m.__name__)
def test_others_hand_the_module_on_and_call_nothing(module) -> None:
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    names = {getattr(value, "id", getattr(value, "attr", "")) for value in values}
    assert not names & {"migraphx", "_migraphx"}

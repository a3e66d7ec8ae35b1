"""Every name that is taken of TensorRT exists in TensorRT 10 and 11 and in TensorRT for RTX, or is asked
for.

`names.json` lists these names, and for each the libraries whose Python bindings hold it: TensorRT 10.16 and
11.4, read from the strings of the binaries in NVIDIA's wheels, where a name may also be the end of a longer
one (linkers share the ends of strings), and TensorRT for RTX 1.7, read from the module. A name that is newly
used has to be looked up and added.
"""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from types import ModuleType

import pytest
from vendor_names import Names, names_in

import loka_onnx

PACKAGE = Path(loka_onnx.__file__).parent
FILES = (
    "engines/tensorrt/backend.py",
    "engines/tensorrt/build.py",
    "engines/tensorrt/inspector.py",
    "engines/tensorrt/timing_cache.py",
    "engines/tensorrt/first_opening.py",
    "engines/tensorrt/session.py",
    "engines/tensorrt/spec.py",
)
"""The files that talk to TensorRT."""
LIBRARIES = {"tensorrt 10.16", "tensorrt 11.4", "tensorrt_rtx 1.7"}
LISTED: dict[str, list[str]] = json.loads((Path(__file__).parent / "names.json").read_text(encoding="utf-8"))


def complaints(names: Names, listed: dict[str, list[str]]) -> list[str]:
    """What is wrong with the names that a file takes."""
    unknown = [f"{name}: in no library" for name in sorted(names.used - set(listed))]
    missing = [
        f"{name}: not in {', '.join(sorted(LIBRARIES - set(listed[name])))}, and not asked for"
        for name in sorted(names.unguarded & set(listed))
        if LIBRARIES - set(listed[name])
    ]
    return unknown + missing


@pytest.mark.parametrize("file", FILES)
def test_names_exist(file: str) -> None:
    assert complaints(names_in((PACKAGE / file).read_text(encoding="utf-8")), LISTED) == []


def test_the_list_holds_what_is_used_and_no_more() -> None:
    used = [names_in((PACKAGE / file).read_text(encoding="utf-8")).used for file in FILES]
    assert sorted(set().union(*used)) == list(LISTED)
    assert min(map(len, (used[1], used[2], used[5]))) > 8


def test_no_other_file_talks_to_tensorrt() -> None:
    """A parameter or variable named ``trt`` is the vendor module."""
    talking = []
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "trt" not in text:
            continue
        tree = ast.parse(text)
        arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        imported = {
            alias.name.partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        if "trt" in arguments | names or imported & {"tensorrt", "tensorrt_rtx"}:
            talking.append(path.relative_to(PACKAGE).as_posix())
    assert set(talking) <= set(FILES)


def test_what_is_listed_for_rtx_is_in_the_module() -> None:
    trt: ModuleType = pytest.importorskip("tensorrt_rtx", reason="needs tensorrt_rtx")
    members = set(dir(trt))
    for _, kind in inspect.getmembers(trt, inspect.isclass):
        members |= set(dir(kind))
    listed = {name for name, libraries in LISTED.items() if "tensorrt_rtx 1.7" in libraries}
    # What is not in the module is a keyword of a call.
    assert listed - members == set()
    assert set(LISTED) - members == set()

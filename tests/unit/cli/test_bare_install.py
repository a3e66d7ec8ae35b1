"""What works without any optional package, and what `import loka_onnx` costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import loka_onnx

HEAVY = (
    "torch", "triton", "onnxruntime", "tensorrt_rtx", "tensorrt", "recbole", "safetensors", "onnxscript",
    "onnx_ir",
)  # fmt: skip
# The lowering to PyTorch and the kernels: the backend imports them when it builds.
NEED_TORCH = ("loka_onnx.engines.inductor.", "loka_onnx.export.checkpoint")

BLOCK = f"""
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""

IMPORT_ALL = """
import importlib, json, pkgutil, loka_onnx
failed = {}
for module in pkgutil.walk_packages(loka_onnx.__path__, "loka_onnx.", onerror=lambda name: None):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        failed[module.name] = error.name
print(json.dumps(failed))
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def bare(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, without optional packages."""
    return python(f"{BLOCK}\nfrom loka_onnx.cli.main import main\nmain({list(arguments)!r})")


@pytest.mark.slow
def test_every_module_imports() -> None:
    done = python(BLOCK + IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    failed = json.loads(done.stdout)
    assert set(failed.values()) <= {"torch", "triton"}
    assert all(name.startswith(NEED_TORCH) for name in failed)
    declared = {name for name in failed if name.endswith((".spec", ".backend", ".session"))}
    assert declared == set(), "what is needed without building imports no compiler"


@pytest.mark.slow
def test_doctor_says_what_is_missing() -> None:
    done = bare("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.strip() for line in done.stdout.splitlines()]
    at = lines.index("✗ onnxruntime          missing      does not build, does not run")
    assert lines[at + 1 : at + 3] == [
        "ONNX Runtime is not installed",
        "→ pip install 'loka-onnx[cpu]' (or [nvidia], [amd]: exactly one of them)",
    ]


@pytest.mark.slow
def test_doctor_in_json() -> None:
    done = bare("doctor", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["machine"]["loka_onnx"] == loka_onnx.__version__
    assert not told["backends"]["onnxruntime"]["can_build"]
    assert {package["name"] for package in told["packages"] if package["version"]} <= {"recbole"}


@pytest.mark.slow
def test_other_verbs_that_need_nothing() -> None:
    assert json.loads(bare("schema").stdout)["title"] == "loka-onnx run file"
    assert bare("--version").stdout == f"loka-onnx {loka_onnx.__version__}\n"
    assert "evaluate" in bare("--help").stdout


@pytest.mark.slow
def test_the_demo_says_what_it_needs(tmp_path: Path) -> None:
    done = bare("demo", "--output", str(tmp_path / "runs" / "demo"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: PyTorch is not installed\n")
    assert "  remedy: pip install 'loka-onnx[export]'\n" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_import_is_light() -> None:
    done = python(
        "import sys, loka_onnx; dir(loka_onnx); print(*sorted({n.partition('.')[0] for n in sys.modules}))"
    )
    assert done.returncode == 0
    loaded = set(done.stdout.split())
    assert "loka_onnx" in loaded
    assert not loaded & {*HEAVY, "onnx", "numpy", "plotly", "pyarrow", "pydantic", "scipy", "rich", "typer"}


@pytest.mark.parametrize("name", loka_onnx.__all__)
def test_public_names_resolve(name: str) -> None:
    value = getattr(loka_onnx, name)
    assert value.__name__ == name
    assert value.__doc__


def test_public_names_shadow_no_package() -> None:
    packages = {path.name.removesuffix(".py") for path in Path(loka_onnx.__path__[0]).iterdir()}
    assert not packages & set(loka_onnx.__all__)
    assert set(loka_onnx.__all__) == set(loka_onnx._MODULES)
    assert set(loka_onnx.__all__) <= set(dir(loka_onnx))


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'loka_onnx' has no attribute 'quantise'"):
        _ = loka_onnx.quantise

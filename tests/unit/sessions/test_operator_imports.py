"""Engines whose programs call operators of other packages: these are imported first, or missed by name."""

from __future__ import annotations

import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from test_inductor_session import DYNAMIC, package

from loka_onnx.engines.inductor import session as inductor_session
from loka_onnx.engines.inductor.package import (
    OPERATOR_MODULES,
    NeededPackage,
    instruction_sets,
    read_called_operators,
    read_engine,
)
from loka_onnx.engines.inductor.session import import_packages, open_inductor
from loka_onnx.errors import EngineError, MissingPackage

torch = pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

NEEDED = NeededPackage("loka-test-gemm", "1.8.0", "loka_test_gemm.ops")
ENGINE = replace(DYNAMIC, packages=(NEEDED,))
PACKAGE = Path("bundle/e.pt2")
REMEDY = r"remedy: pip install loka-test-gemm==1\.8\.0, or build the engine again without it"


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {**OPERATOR_MODULES, NEEDED.module: (NEEDED.distribution,)}
    monkeypatch.setattr(inductor_session, "OPERATOR_MODULES", modules)


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, version: str, source: str = "") -> None:
    (folder / "loka_test_gemm").mkdir()
    (folder / "loka_test_gemm" / "__init__.py").touch()
    (folder / "loka_test_gemm" / "ops.py").write_text(source)
    facts = folder / f"loka_test_gemm-{version}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: loka-test-gemm\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(folder))
    for name in ("loka_test_gemm", NEEDED.module):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_package_keeps_what_it_needs(tmp_path: Path) -> None:
    assert read_engine(package(tmp_path / "e.pt2", ENGINE)) == ENGINE


def test_an_engine_needs_nothing_unless_it_says_so() -> None:
    before = set(sys.modules)
    import_packages(DYNAMIC, PACKAGE)
    assert DYNAMIC.packages == () and set(sys.modules) == before


@pytest.mark.parametrize("version", ["1.8.0", "1.8.3+cu130"])
def test_operators_are_registered_before_programs_are_loaded(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, monkeypatch, version)
    import_packages(ENGINE, PACKAGE)
    assert NEEDED.module in sys.modules


@pytest.mark.parametrize(
    ("distribution", "module"),
    [("loka-test-gemm", "loka_test_gemm.other"), ("loka-test-gemm", "mslk.gemm"), ("mslk", NEEDED.module)],
)
def test_nothing_is_imported_because_a_document_names_it(
    distribution: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, monkeypatch, "1.8.0", "raise AssertionError")
    (tmp_path / "loka_test_gemm" / "other.py").write_text("raise AssertionError")
    needed = (NeededPackage(distribution, "1.8.0", module),)
    said = r"^bundle/e\.pt2: the engine asks for a module that no engine needs\n"
    evidence = rf"  evidence: '{module}' of {distribution}; known are fbgemm_gpu\.experimental\.gen_ai, "
    with pytest.raises(EngineError, match=said + evidence):
        import_packages(replace(ENGINE, packages=needed), PACKAGE)


def test_what_is_not_installed_is_named_with_its_version() -> None:
    said = r"^bundle/e\.pt2: the engine calls operators of a package that is not installed\n"
    with pytest.raises(
        MissingPackage, match=said + rf"  evidence: compiled with loka-test-gemm 1\.8\.0\n  {REMEDY}$"
    ):
        import_packages(ENGINE, PACKAGE)


def test_another_release_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch, "1.9.0", "raise AssertionError")
    said = r"^bundle/e\.pt2: the engine was compiled with another release of a package\n"
    evidence = r"  evidence: compiled with loka-test-gemm 1\.8\.0, this host has 1\.9\.0\n"
    with pytest.raises(EngineError, match=said + evidence + rf"  {REMEDY}$"):
        import_packages(ENGINE, PACKAGE)


def test_libraries_that_do_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch, "1.8.0", "raise OSError('libcudart.so.13: cannot open')")
    said = r"^bundle/e\.pt2: the engine calls operators of a package that does not import\n"
    evidence = (
        r"  evidence: 'loka_test_gemm\.ops' of loka-test-gemm 1\.8\.0: libcudart\.so\.13: cannot open\n"
    )
    with pytest.raises(MissingPackage, match=said + evidence + rf"  {REMEDY}$"):
        import_packages(ENGINE, PACKAGE)


def test_an_engine_is_not_loaded_without_them(tmp_path: Path) -> None:
    here = replace(ENGINE, torch=str(torch.__version__), instruction_sets=instruction_sets())
    with pytest.raises(MissingPackage, match="a package that is not installed"):
        open_inductor(package(tmp_path / "e.pt2", here), "cpu")


def test_operators_that_a_program_calls_by_name(tmp_path: Path) -> None:
    path = package(tmp_path / "e.pt2", ENGINE)
    nodes = '{"nodes": [{"node": {"target": "fbgemm::f8f8bf16"}}, {"node": {"target": "aten::sort"}}]}'
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("engine/data/aotinductor/rows4/a.wrapper.json", nodes)
        archive.writestr("engine/data/aotinductor/rows4/a.wrapper_metadata.json", '{"nodes": "no list"}')
        archive.writestr("engine/data/aotinductor/rows4/b.kernel.json", "{}")
    assert read_called_operators(path, "rows4") == ("fbgemm::f8f8bf16", "aten::sort")
    assert read_called_operators(path, "rows40") == ()

"""An engine of MIGraphX is a document and the programs beside it: all are shipped, and vouched for."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from sample_run import make_run

from loka_onnx import runtime
from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.bundle.writer import write_bundle
from loka_onnx.core import serde
from loka_onnx.core.digests import digest_files
from loka_onnx.engines.migraphx.session import (
    MigraphxEngine,
    ProgramFile,
    ProgramInput,
    ProgramOutput,
    programs_beside,
)
from loka_onnx.errors import BundleError, BundleInvalid


@pytest.fixture
def contents(tmp_path: Path):
    run = make_run(tmp_path / "run")
    folder = run.contents.root / "engines" / "mi300x"
    folder.mkdir(parents=True)
    programs = (ProgramFile(8, "rows-8.mxr"), ProgramFile(64, "rows-64.mxr"))
    inputs, outputs = (ProgramInput("x", "float32", (4,)),), (ProgramOutput("y", True),)
    serde.write(MigraphxEngine("gfx942", "2.15.0", programs, inputs, outputs), folder / "engine.json")
    for program in programs:
        (folder / program.file).write_bytes(program.file.encode())
    files = [folder / "engine.json", *(folder / program.file for program in programs)]
    (first, *_) = run.contents.engines
    artifact = replace(
        first.artifact,
        backend="migraphx",
        architecture="gfx942",
        backend_version="2.15.0",
        path=Path("engines/mi300x/engine.json"),
        bytes=sum(file.stat().st_size for file in files),
        digest=digest_files(files),
    )
    return replace(run.contents, engines=(replace(first, artifact=artifact),))


def test_the_programs_are_shipped_with_their_document(contents, tmp_path: Path) -> None:
    bundle = write_bundle(contents, tmp_path / "bundle")
    (entry,) = verify_bundle(bundle).engines
    assert entry.path.endswith("/engine.json")
    assert programs_beside(bundle / entry.path) == ("rows-8.mxr", "rows-64.mxr")
    folder = (bundle / entry.path).parent
    assert (folder / "rows-64.mxr").read_bytes() == b"rows-64.mxr"
    (folder / "rows-64.mxr").write_bytes(b"rows-46.mxr")
    with pytest.raises(BundleInvalid, match="was altered"):
        verify_bundle(bundle)


def test_a_program_that_was_altered_since_the_build_is_not_shipped(contents, tmp_path: Path) -> None:
    (contents.root / "engines" / "mi300x" / "rows-8.mxr").write_bytes(b"other")
    with pytest.raises(BundleError, match="altered since it was built"):
        write_bundle(contents, tmp_path / "bundle")


def test_it_is_a_program_that_somebody_has_to_vouch_for(
    contents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "migraphx", None)
    bundle = write_bundle(contents, tmp_path / "bundle")
    (skipped,) = runtime.load(bundle).skipped
    assert "this engine of migraphx on gfx942 is a program" in skipped.reason
    (skipped,) = runtime.load(bundle, trust=True).skipped
    assert "MIGraphX is not installed" in skipped.reason


def test_other_files_have_no_programs_beside_them(tmp_path: Path) -> None:
    assert programs_beside(tmp_path / "engine.trt") == ()

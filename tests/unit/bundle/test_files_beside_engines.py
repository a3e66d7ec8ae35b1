"""Documents, settings and compiled programs beside an engine: all are shipped, and vouched for."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from altered import engine_of
from sample_run import make_run

from loka_onnx import runtime
from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.bundle.writer import BundleContents, write_bundle
from loka_onnx.core import serde
from loka_onnx.engines.migraphx.session import MigraphxEngine, ProgramFile, ProgramInput, ProgramOutput
from loka_onnx.engines.onnxruntime.io_binding_settings import PROGRAMS, SETTINGS_FILE, IoBindingSettings
from loka_onnx.errors import BundleError, BundleInvalid
from loka_onnx.sessions.backends import get_spec

BESIDE = {
    "migraphx": ("gfx942", ("rows-8.mxr", "rows-64.mxr")),
    "onnxruntime_tensorrt": ("sm90", (SETTINGS_FILE, f"{PROGRAMS}/a.engine", f"{PROGRAMS}/b/c.profile")),
}


@pytest.fixture(params=BESIDE)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def contents(tmp_path: Path, backend: str) -> BundleContents:
    run = make_run(tmp_path / "run")
    architecture, beside = BESIDE[backend]
    files = {name: name.encode() for name in beside}
    if backend == "migraphx":
        programs = (ProgramFile(8, beside[0]), ProgramFile(64, beside[1]))
        inputs, outputs = (ProgramInput("x", "float32", (4,)),), (ProgramOutput("y", True),)
        document = MigraphxEngine("gfx942", "2.15.0", programs, inputs, outputs)
        files = {"engine.json": serde.dumps(document).encode()} | files
    else:
        settings = IoBindingSettings("tensorrt", "1.31.1", sizes=(8,), programs=True)
        model = (run.contents.root / run.contents.model.path).read_bytes()
        files = {"engine.onnx": model} | files | {SETTINGS_FILE: serde.dumps(settings).encode()}
    return replace(run.contents, engines=(engine_of(run, backend, architecture, files),))


def test_they_are_shipped_and_verified(contents, backend, tmp_path):
    bundle = write_bundle(contents, tmp_path / "bundle")
    (entry,) = verify_bundle(bundle).engines
    beside = BESIDE[backend][1]
    assert get_spec(backend).files_beside(bundle / entry.path) == beside
    last = (bundle / entry.path).parent / beside[-1]
    assert last.read_bytes() == beside[-1].encode()
    last.write_bytes(last.read_bytes()[::-1])
    with pytest.raises(BundleInvalid, match="was altered"):
        verify_bundle(bundle)


def test_one_that_was_altered_since_the_build_is_not_shipped(contents, backend, tmp_path):
    (contents.root / "engines/e" / BESIDE[backend][1][-1]).write_bytes(b"other")
    with pytest.raises(BundleError, match="altered since it was built"):
        write_bundle(contents, tmp_path / "bundle")


def test_somebody_has_to_vouch_for_programs(contents, backend, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "migraphx", None)
    bundle = write_bundle(contents, tmp_path / "bundle")
    (skipped,) = runtime.load(bundle).skipped
    assert f"this engine of {backend} on {BESIDE[backend][0]} is a program" in skipped.reason
    (skipped,) = runtime.load(bundle, trust=True).skipped
    assert "is a program" not in skipped.reason


def test_other_files_have_nothing_beside_them(tmp_path):
    (programs, settings) = (get_spec(name).files_beside for name in BESIDE)
    assert programs(tmp_path / "engine.trt") == ()
    assert settings(tmp_path / "engine.onnx") == ()
    (tmp_path / SETTINGS_FILE).write_text("{}", encoding="utf-8")
    assert settings(tmp_path / "engine.trt") == ()

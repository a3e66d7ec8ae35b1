"""An engine of ONNX Runtime for a GPU is a graph, its settings and what was compiled: all are shipped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from sample_run import make_run

from loka_onnx import runtime
from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.bundle.writer import write_bundle
from loka_onnx.core import serde
from loka_onnx.core.digests import digest_files
from loka_onnx.engines.onnxruntime.io_binding_settings import (
    PROGRAMS,
    SETTINGS_FILE,
    BoundSettings,
    settings_beside,
)
from loka_onnx.errors import BundleError, BundleInvalid

FILES = (SETTINGS_FILE, f"{PROGRAMS}/a.engine", f"{PROGRAMS}/b/c.profile")


@pytest.fixture
def contents(tmp_path: Path):
    run = make_run(tmp_path / "run")
    (first, *_) = run.contents.engines
    folder = run.contents.root / "engines" / "h100"
    (folder / PROGRAMS / "b").mkdir(parents=True)
    source = run.contents.root / run.contents.model.path
    (folder / "engine.onnx").write_bytes(source.read_bytes())
    settings = BoundSettings("tensorrt", "1.31.1", sizes=(8,), programs=True)
    serde.write(settings, folder / SETTINGS_FILE)
    for name in FILES[1:]:
        (folder / name).write_bytes(name.encode())
    files = [folder / "engine.onnx", *(folder / name for name in FILES)]
    artifact = replace(
        first.artifact,
        backend="onnxruntime_tensorrt",
        architecture="sm90",
        backend_version="1.31.1",
        path=Path("engines/h100/engine.onnx"),
        bytes=sum(file.stat().st_size for file in files),
        digest=digest_files(files),
    )
    return replace(run.contents, engines=(replace(first, artifact=artifact),))


def test_settings_and_programs_are_shipped_with_their_graph(contents, tmp_path: Path) -> None:
    bundle = write_bundle(contents, tmp_path / "bundle")
    (entry,) = verify_bundle(bundle).engines
    assert settings_beside(bundle / entry.path) == FILES
    folder = (bundle / entry.path).parent
    assert (folder / FILES[2]).read_bytes() == FILES[2].encode()
    (folder / SETTINGS_FILE).write_text("{}", encoding="utf-8")
    with pytest.raises(BundleInvalid, match=r"settings\.json' has another size"):
        verify_bundle(bundle)


def test_settings_that_were_altered_since_the_build_are_not_shipped(contents, tmp_path: Path) -> None:
    settings = contents.root / "engines" / "h100" / SETTINGS_FILE
    settings.write_text(settings.read_text(encoding="utf-8").replace("8", "16"), encoding="utf-8")
    with pytest.raises(BundleError, match="altered since it was built"):
        write_bundle(contents, tmp_path / "bundle")


def test_what_was_compiled_needs_somebody_to_vouch_for_it(contents, tmp_path: Path) -> None:
    bundle = write_bundle(contents, tmp_path / "bundle")
    (skipped,) = runtime.load(bundle).skipped
    assert "this engine of onnxruntime_tensorrt on sm90 is a program" in skipped.reason


def test_a_graph_alone_has_nothing_beside_it(tmp_path: Path) -> None:
    assert settings_beside(tmp_path / "engine.onnx") == ()
    (tmp_path / SETTINGS_FILE).write_text("{}", encoding="utf-8")
    assert settings_beside(tmp_path / "engine.trt") == ()

"""Writing of a bundle: what it lists and refuses, several architectures side by side, and equal bytes."""

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from altered import tree

from loka_onnx.bundle.format import replace
from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.bundle.writer import BundleContents, BundleEngine, requirements_of, write_bundle
from loka_onnx.core import serde
from loka_onnx.core.evaluation import Choice, TargetChoice
from loka_onnx.core.manifest import EngineEntry, Manifest
from loka_onnx.core.plan import PlanSet
from loka_onnx.core.serde import schema_id
from loka_onnx.errors import BundleError
from loka_onnx.runtime import load

DOCS = Path(__file__).parents[3] / "docs/bundle.md"


def with_artifact(contents: BundleContents, place: int = 0, **changes: Any) -> dict[str, Any]:
    """Changes of contents: one engine alone, of which something is otherwise."""
    engine = contents.engines[place]
    return {
        "engines": (dataclasses.replace(engine, artifact=dataclasses.replace(engine.artifact, **changes)),)
    }


def test_a_bundle_lists_every_file(sample, tmp_path):
    report = tmp_path / "report.md"
    report.write_text("# report\n")
    contents = dataclasses.replace(sample.contents, report=(report,))
    one = write_bundle(contents, tmp_path / "one")
    manifest = verify_bundle(one)
    files = {str(p.relative_to(one)) for p in one.rglob("*") if p.is_file()}
    assert {f.path for f in manifest.files} == files - {"manifest.json"}
    assert manifest.report == ("report/report.md",)
    assert manifest.total_bytes == sum((one / f.path).stat().st_size for f in manifest.files)
    text = (one / "manifest.json").read_text()
    assert not any(private in text for private in (str(tmp_path), str(sample.directory), os.uname().nodename))
    assert manifest == serde.read(Manifest, one / "manifest.json")
    assert serde.read(PlanSet, one / manifest.plans).plan("fp8-safe").fp8_sites == ("over_arch.fc0",)


@pytest.mark.parametrize("exchanges", [True, False])
def test_an_old_bundle_is_replaced_as_a_whole(bundle, sample, tmp_path, monkeypatch, exchanges):
    """Without the call that exchanges directories, the old one is moved away first."""
    if not exchanges:
        monkeypatch.setattr(replace, "_exchange", lambda one, other: False)
    fewer = dataclasses.replace(sample.contents, engines=sample.contents.engines[1:2])
    write_bundle(fewer, bundle)
    assert [e.id for e in verify_bundle(bundle).engines] == [fewer.engines[0].artifact.id]
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"]


def test_an_old_bundle_left_between_two_renames_comes_back(bundle, sample, tmp_path):
    away = tmp_path / ".bundle.staged-xyz"
    away.mkdir()
    bundle.rename(away / "bundle")
    broken = dataclasses.replace(sample.contents, plans=PlanSet(()))
    with pytest.raises(BundleError, match="an engine's plan is not among the plans"):
        write_bundle(broken, bundle)
    verify_bundle(bundle)
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"]


def test_a_failed_write_leaves_the_old_bundle_and_nothing_else(bundle, sample, tmp_path):
    before = tree(bundle)
    altered = dataclasses.replace(sample.contents, **with_artifact(sample.contents, digest="0" * 64))
    with pytest.raises(BundleError, match=r"was altered since it was built\n  evidence: sha256 "):
        write_bundle(altered, bundle)
    assert tree(bundle) == before
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"]


def test_a_running_writer_is_not_a_leftover(sample, tmp_path):
    with replace.staged_directory(tmp_path / "bundle") as stage:
        write_bundle(sample.contents, tmp_path / "bundle")
        assert stage.is_dir()
        (stage / "manifest.json").write_text("{}")
    assert (tmp_path / "bundle" / "manifest.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: {"sample": {}}, r"the sample do not fit the model"),
        (lambda c: {"sample": {"dense": np.zeros((8, 16))}}, r"float64\(8, 16\), the model has"),
        (lambda c: {"sample": {"dense": c.sample["dense"][:0]}}, r"\[0\] rows, batches of 1 to 4096"),
        (lambda c: {"sample": {"dense": c.sample["dense"] * np.float32(np.inf)}}, r"not finite"),
        (
            lambda c: {"fallback": dataclasses.replace(c.fallback, tolerance={"ctr": np.nan})},
            r"needs one finite tolerance for each output",
        ),
        (lambda c: {"engines": c.engines[:1] * 2}, r"two files of the bundle would be"),
        (lambda c: {"report": (Path("/nowhere/report.md"),)}, r"'/nowhere/report.md' is missing"),
        (lambda c: with_artifact(c, target="../x"), r"leaves or repeats a directory"),
        (lambda c: with_artifact(c, path=None, detail="it crashed"), r"has no file .*\n.*it crashed"),
    ],
)
def test_contents_that_contradict_themselves_are_refused(sample, tmp_path, change, message):
    with np.errstate(invalid="ignore"):
        contents = dataclasses.replace(sample.contents, **change(sample.contents))
    with pytest.raises(BundleError, match=message):
        write_bundle(contents, tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


def test_engines_of_several_architectures_stand_side_by_side(sample, tmp_path):
    """One target that holds several architectures, then an engine that runs here for the same target."""
    architectures = ("sm89", "sm90", "sm120")
    engines = (
        *(
            with_artifact(sample.contents, target="fleet", architecture=a)["engines"][0]
            for a in architectures
        ),
        *with_artifact(sample.contents, 2, target="fleet")["engines"],
    )
    choice = TargetChoice("fleet", engines[0].artifact.id, "fp8-safe", "the fastest", "measured", ())
    place = write_bundle(
        dataclasses.replace(sample.contents, engines=engines, choice=Choice((choice,))), tmp_path / "bundle"
    )
    manifest = verify_bundle(place)
    assert manifest.architectures == (*architectures, "cpu")
    ids = [entry.id for entry in manifest.engines]
    assert ids[:3] == [f"fleet-tensorrt_rtx-{a}-fp8-safe" for a in architectures]
    assert {entry.target for entry in manifest.engines} == {"fleet"}
    assert len({entry.path for entry in manifest.engines}) == 4
    # Tried in their order; the first that runs here is taken, and each one before it says why it does not.
    with load(place, trust=True) as engine:
        assert engine.entry.id == ids[3]
        assert [skipped.engine for skipped in engine.skipped] == ids[:3]


@pytest.mark.parametrize(
    ("backend", "version", "architecture", "expected"),
    [
        ("inductor", "2.13.0+cu130", "sm90", "PyTorch 2.13 (…); NVIDIA driver at least 580"),
        ("inductor", "2.10.0+cu128", "sm90", "PyTorch 2.10 (…); NVIDIA driver at least 525.60.13"),
        ("inductor", "2.13.0+cpu", "cpu", "PyTorch 2.13 (…)"),
        ("tensorrt", "10.13.3", "sm90", "TensorRT exactly 10.13.3; NVIDIA driver (?)"),
        ("migraphx", "2.15.0", "gfx942", "MIGraphX exactly 2.15.0; AMD GPU driver (?)"),
        ("onnxruntime", "1.31.1", "cpu", "ONNX Runtime (?)"),
        ("onnxruntime_tensorrt", "1.3", "sm90", "ONNX Runtime exactly 1.3; NVIDIA driver (?)"),
        ("tensorrt", "", "sm90", "TensorRT (?); NVIDIA driver (?)"),
    ],
)
def test_what_an_engine_needs_is_what_its_session_checks(backend, version, architecture, expected):
    said = "; ".join(map(str, requirements_of(backend, version, architecture)))
    assert said == expected.replace("…", "same major and minor version").replace("?", "version not stated")


def test_equal_contents_give_equal_bytes(sample, tmp_path, monkeypatch):
    """At another time, in another place, under another umask, with arrays and versions in another order."""
    one = write_bundle(sample.contents, tmp_path / "one")

    def reordered(engine: BundleEngine) -> BundleEngine:
        outputs = {name: np.asfortranarray(value) for name, value in engine.expectation.outputs.items()}
        return dataclasses.replace(
            engine, expectation=dataclasses.replace(engine.expectation, outputs=outputs)
        )

    again = dataclasses.replace(
        sample.contents,
        engines=tuple(map(reordered, sample.contents.engines)),
        versions=dict(reversed(sample.contents.versions.items())),
    )
    monkeypatch.setattr(time, "time", lambda: 2e9)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000000000")
    umask = os.umask(0o077)
    try:
        two = write_bundle(again, tmp_path / "elsewhere" / "two")
    finally:
        os.umask(umask)
    assert tree(one) == tree(two)
    modes = [{str(p.relative_to(b)): p.stat().st_mode for p in b.rglob("*")} for b in (one, two)]
    assert modes[0] == modes[1]


def test_the_specification_lists_every_field():
    text = DOCS.read_text(encoding="utf-8")
    for name in (f.name for kind in (Manifest, EngineEntry) for f in dataclasses.fields(kind)):
        assert f"`{name}`" in text, name
    assert schema_id(Manifest) in text

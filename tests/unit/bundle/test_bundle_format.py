"""Bundle format 1: what the manifest says, several architectures side by side, and equal bytes."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import numpy as np
import pytest
from altered import tree
from sample_run import SampleRun

from loka_onnx.bundle.contents import BundleContents
from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.bundle.writer import requirements_of, write_bundle
from loka_onnx.core.evaluation import TargetChoice
from loka_onnx.core.manifest import EngineEntry, Manifest
from loka_onnx.core.serde import schema_id
from loka_onnx.runtime import load

DOCS = Path(__file__).parents[3] / "docs/bundle.md"


def with_architectures(contents: BundleContents, *architectures: str) -> BundleContents:
    """One target that holds several architectures, then an engine that runs here for the same target."""
    rtx, cpu = contents.engines[0], contents.engines[2]
    engines = [
        dataclasses.replace(rtx, artifact=dataclasses.replace(rtx.artifact, target="fleet", architecture=a))
        for a in architectures
    ]
    last = dataclasses.replace(cpu, artifact=dataclasses.replace(cpu.artifact, target="fleet"))
    choice = TargetChoice("fleet", engines[0].artifact.id, "fp8-safe", "the fastest", "measured", ())
    return dataclasses.replace(
        contents,
        engines=(*engines, last),
        choice=dataclasses.replace(contents.choice, targets=(choice,)),
    )


def test_engines_of_several_architectures_stand_side_by_side(sample: SampleRun, tmp_path: Path) -> None:
    contents = with_architectures(sample.contents, "sm89", "sm90", "sm120")
    place = write_bundle(contents, tmp_path / "bundle")
    manifest = verify_bundle(place)
    assert manifest.architectures == ("sm89", "sm90", "sm120", "cpu")
    ids = [entry.id for entry in manifest.engines]
    assert ids[:3] == [f"fleet-tensorrt_rtx-{a}-fp8-safe" for a in ("sm89", "sm90", "sm120")]
    assert {entry.target for entry in manifest.engines} == {"fleet"}
    assert len({entry.path for entry in manifest.engines}) == 4
    # Tried in their order; the first that runs here is taken, and each one before it says why it does not.
    engine = load(place, trust=True)
    assert engine.entry.id == ids[3]
    assert [skipped.engine for skipped in engine.skipped] == ids[:3]
    engine.close()


@pytest.mark.parametrize(
    ("backend", "version", "architecture", "expected"),
    [
        (
            "inductor",
            "2.13.0+cu130",
            "sm90",
            "PyTorch 2.13 (same major and minor version); NVIDIA driver at least 580",
        ),
        ("inductor", "2.10.0+cu128", "sm90", "PyTorch 2.10 (.*); NVIDIA driver at least 525.60.13"),
        ("inductor", "2.13.0+cpu", "cpu", "PyTorch 2.13 (same major and minor version)"),
        ("tensorrt", "10.13.3", "sm90", "TensorRT exactly 10.13.3; NVIDIA driver (version not stated)"),
        ("migraphx", "2.15.0", "gfx942", "MIGraphX exactly 2.15.0; AMD GPU driver (version not stated)"),
        ("onnxruntime", "1.31.1", "cpu", "ONNX Runtime (version not stated)"),
        (
            "onnxruntime_tensorrt",
            "1.31.1",
            "sm90",
            "ONNX Runtime exactly 1.31.1; NVIDIA driver (version not stated)",
        ),
        ("tensorrt", "", "sm90", "TensorRT (version not stated); NVIDIA driver (version not stated)"),
    ],
)
def test_what_an_engine_needs_is_what_its_session_checks(
    backend: str, version: str, architecture: str, expected: str
) -> None:
    said = "; ".join(map(str, requirements_of(backend, version, architecture)))
    assert said == expected.replace("(.*)", "(same major and minor version)")


def test_equal_contents_give_equal_bytes(
    sample: SampleRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At another time, in another place, under another umask, with arrays and tolerances in another order."""
    (tmp_path / "report.md").write_text("# report\n")
    contents = dataclasses.replace(sample.contents, report=(tmp_path / "report.md",))
    one = write_bundle(contents, tmp_path / "one")
    extra = {"dense": contents.sample["dense"].copy()}
    engines = tuple(
        dataclasses.replace(
            e,
            expectation=dataclasses.replace(
                e.expectation, outputs={n: np.asfortranarray(v) for n, v in e.expectation.outputs.items()}
            ),
        )
        for e in contents.engines
    )
    again = dataclasses.replace(
        contents,
        sample=extra,
        engines=engines,
        versions=dict(reversed(contents.versions.items())),
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


def test_nothing_of_the_host_is_in_a_manifest(sample: SampleRun, tmp_path: Path) -> None:
    place = write_bundle(sample.contents, tmp_path / "bundle")
    text = (place / "manifest.json").read_text()
    for private in (str(tmp_path), str(sample.directory), os.uname().nodename):
        assert private not in text


def test_the_specification_lists_every_field() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for name in (f.name for kind in (Manifest, EngineEntry) for f in dataclasses.fields(kind)):
        assert f"`{name}`" in text, name
    assert schema_id(Manifest) in text

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from sample_run import SampleRun, make_run

from loka_onnx.bundle.format import replace
from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.bundle.writer import write_bundle
from loka_onnx.core import serde
from loka_onnx.core.manifest import Manifest
from loka_onnx.core.plan import PlanSet
from loka_onnx.errors import BundleError


def test_a_bundle_lists_every_file_and_is_reproducible(sample: SampleRun, tmp_path):
    report = tmp_path / "report.md"
    report.write_text("# report\n")
    contents = dataclasses.replace(sample.contents, report=(report,))
    one, two = write_bundle(contents, tmp_path / "one"), write_bundle(contents, tmp_path / "two")
    manifest = verify_bundle(one)
    files = {str(p.relative_to(one)) for p in one.rglob("*") if p.is_file()}
    assert {f.path for f in manifest.files} == files - {"manifest.json"}
    assert manifest.report == ("report/report.md",)
    assert manifest.total_bytes == sum((one / f.path).stat().st_size for f in manifest.files)
    assert (one / "manifest.json").read_bytes() == (two / "manifest.json").read_bytes()
    assert manifest == serde.read(Manifest, one / "manifest.json")
    assert serde.read(PlanSet, one / manifest.plans).plan("fp8-safe").fp8_sites == ("over_arch.fc0",)


def test_external_data_stays_external(tmp_path):
    run = make_run(tmp_path / "run", external=True)
    bundle = write_bundle(run.contents, tmp_path / "bundle")
    assert (bundle / "fallback" / "model.onnx.data").stat().st_size > 1000
    assert verify_bundle(bundle).file("fallback/model.onnx.data").bytes > 1000


def test_an_old_bundle_is_replaced_as_a_whole(sample, tmp_path):
    place = tmp_path / "bundle"
    write_bundle(sample.contents, place)
    fewer = dataclasses.replace(sample.contents, engines=sample.contents.engines[1:2])
    write_bundle(fewer, place)
    assert [e.id for e in verify_bundle(place).engines] == [fewer.engines[0].artifact.id]
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"]


def test_without_the_exchange_call_the_old_bundle_is_moved_away(sample, tmp_path, monkeypatch):
    monkeypatch.setattr(replace, "_exchange", lambda one, other: False)
    place = tmp_path / "bundle"
    write_bundle(sample.contents, place)
    write_bundle(sample.contents, place)
    verify_bundle(place)
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"]


def test_an_old_bundle_left_between_two_renames_comes_back(sample, tmp_path):
    place = tmp_path / "bundle"
    write_bundle(sample.contents, place)
    away = tmp_path / ".bundle.staged-xyz"
    away.mkdir()
    place.rename(away / "bundle")
    broken = dataclasses.replace(sample.contents, plans=PlanSet(()))
    with pytest.raises(BundleError, match="an engine's plan is not among the plans"):
        write_bundle(broken, place)
    verify_bundle(place)
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"]


def test_a_failed_write_leaves_the_old_bundle_and_nothing_else(sample, tmp_path):
    place = write_bundle(sample.contents, tmp_path / "bundle")
    before = (place / "manifest.json").read_bytes()
    engine = sample.contents.engines[0]
    altered = dataclasses.replace(engine, artifact=dataclasses.replace(engine.artifact, digest="0" * 64))
    with pytest.raises(BundleError, match=r"was altered since it was built\n  evidence: sha256 "):
        write_bundle(dataclasses.replace(sample.contents, engines=(altered,)), place)
    assert (place / "manifest.json").read_bytes() == before
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
        (
            lambda c: {"sample": {"dense": c.sample["dense"].astype(np.float64)}},
            r"float64\(8, 16\), the model has",
        ),
        (lambda c: {"sample": {"dense": c.sample["dense"][:0]}}, r"\[0\] rows, batches of 1 to 4096"),
        (lambda c: {"sample": {"dense": c.sample["dense"] * np.float32(np.inf)}}, r"not finite"),
        (
            lambda c: {"fallback": dataclasses.replace(c.fallback, tolerance={"ctr": float("nan")})},
            r"needs one finite tolerance for each output",
        ),
        (lambda c: {"engines": c.engines[:1] * 2}, r"two files of the bundle would be"),
        (lambda c: {"report": (Path("/nowhere/report.md"),)}, r"'/nowhere/report.md' is missing"),
        (
            lambda c: {
                "engines": (
                    dataclasses.replace(
                        c.engines[0], artifact=dataclasses.replace(c.engines[0].artifact, target="../x")
                    ),
                )
            },
            r"leaves or repeats a directory",
        ),
        (
            lambda c: {
                "engines": (
                    dataclasses.replace(
                        c.engines[0],
                        artifact=dataclasses.replace(c.engines[0].artifact, path=None, detail="it crashed"),
                    ),
                )
            },
            r"has no file and cannot be shipped\n  evidence: .*it crashed",
        ),
    ],
)
def test_contents_that_contradict_themselves_are_refused(sample, tmp_path, change, message):
    with np.errstate(invalid="ignore"):
        contents = dataclasses.replace(sample.contents, **change(sample.contents))
    with pytest.raises(BundleError, match=message):
        write_bundle(contents, tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []

"""Bundles of a model that was cut at its embeddings."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from altered import edit, put
from cut_models import LOOKED_UP, TABLE, cut_contents, request
from sample_run import SampleRun

from loka_onnx.bundle.format.files import read_sample, verify_bundle
from loka_onnx.bundle.writer import write_bundle
from loka_onnx.core.artifact import TensorSpec
from loka_onnx.core.manifest import SparseCut
from loka_onnx.core.rewrite import Part
from loka_onnx.errors import BundleError, BundleInvalid
from loka_onnx.graph import storage


@pytest.fixture(scope="module")
def written(sample: SampleRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cut")
    return write_bundle(cut_contents(sample, root / "run"), root / "bundle")


@pytest.fixture
def bundle(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "bundle"))


def test_the_manifest_records_the_cut(written):
    manifest = verify_bundle(written)
    rows = TensorSpec(LOOKED_UP, "float32", (None, 4))
    assert manifest.cut == SparseCut("lookup/lookup.onnx", ("item",), ("x",), (rows,))
    assert [entry.part for entry in manifest.candidates] == [Part.DENSE, Part.WHOLE]
    assert manifest.inputs_of(Part.WHOLE) == manifest.inputs
    assert manifest.inputs_of(Part.DENSE) == (manifest.inputs[0], rows)
    assert json.loads((written / "manifest.json").read_text())["schema"] == "loka-onnx/bundle-format/1"
    sample = read_sample(written, manifest, manifest.engines[0])
    np.testing.assert_array_equal(sample.looked_up[LOOKED_UP], TABLE[sample.inputs["item"]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(cut=None), r"takes looked-up rows, and the manifest has no cut"),
        (lambda m: m["fallback"].update(part="dense"), r"the fallback is not the whole model"),
        (lambda m: m["cut"].update(lookup="lookup/other.onnx"), r"names lookup model 'lookup/other.onnx'"),
        (lambda m: m["cut"].update(lookup="../lookup.onnx"), r"names lookup model '../lookup.onnx'"),
        (lambda m: m["cut"].update(lookup="plans.json.onnx"), r"but does not list it"),
        (lambda m: m["cut"].update(passed=["nobody"]), r"the cut reads 'nobody', which is no input"),
        (lambda m: m["cut"].update(lookup_inputs=["nobody"]), r"the cut reads 'nobody', which is no input"),
        (lambda m: m["cut"].update(tensors=[]), r"the cut needs tensors whose names differ"),
        (lambda m: m["cut"]["tensors"].append(m["cut"]["tensors"][0]), r"two cut tensors of the manifest"),
        (lambda m: m["cut"]["tensors"][0].update(name="item"), r"from those of the inputs"),
        (lambda m: m.update(shared=["nobody"]), r"equal within a request are not among those of the model"),
        (lambda m: m["engines"][0].update(part="request"), r"equal within a request"),
        (lambda m: m["engines"][0].update(part="half"), r"is not a loka-onnx/bundle-format/1 document"),
    ],
)
def test_a_cut_that_contradicts_itself_is_refused(bundle, change, message):
    edit(bundle, change)
    with pytest.raises(BundleInvalid, match=message) as caught:
        verify_bundle(bundle)
    assert str(bundle) in str(caught.value)


def test_a_lookup_model_that_is_no_model_is_refused(bundle):
    put(bundle, "lookup/lookup.onnx", b"\xff\xff\xff\xff")
    with pytest.raises(BundleInvalid, match=r"the lookup model: 'lookup/lookup.onnx' is not an ONNX model"):
        verify_bundle(bundle)


def test_tables_are_in_a_bundle_once_and_listed(sample, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "TABLE_LIMIT_BYTES", 0)
    contents = cut_contents(sample, tmp_path / "run", is_external=True)
    place = write_bundle(contents, tmp_path / "bundle")
    lookup, fallback = place / "lookup/tables.bin", place / "fallback/tables.bin"
    assert lookup.samefile(fallback)
    assert not lookup.samefile(tmp_path / "run/model/tables.bin"), "the run may go on writing"
    assert TABLE.tobytes() in lookup.read_bytes()
    manifest = verify_bundle(place)
    assert manifest.file("lookup/tables.bin").sha256 == manifest.file("fallback/tables.bin").sha256
    lookup.unlink()
    with pytest.raises(BundleInvalid, match=r"file 'lookup/tables.bin' is missing"):
        verify_bundle(place)
    edit(place, lambda m: m.update(files=[f for f in m["files"] if f["path"] != "lookup/tables.bin"]))
    with pytest.raises(BundleInvalid, match="the lookup model reads weights from a file that is not listed"):
        verify_bundle(place)


def test_contents_that_contradict_themselves_are_refused(sample, tmp_path):
    contents = cut_contents(sample, tmp_path / "run")
    assert contents.lookup is not None
    few = replace(contents.lookup, looked_up={LOOKED_UP: TABLE[:3]})
    wrong = replace(contents.lookup, looked_up={LOOKED_UP: TABLE[request(8)["item"]][:, 0]})
    for lookup, message in (
        (None, r"an engine takes looked-up rows, and there is no lookup model to ship"),
        (few, r"the sample is not one batch that the engines accept\n  evidence: \[3, 8\] rows"),
        (wrong, r"array 'embeddings.item' of the looked-up rows of the sample does not fit the model"),
    ):
        with pytest.raises(BundleError, match=message):
            write_bundle(replace(contents, lookup=lookup), tmp_path / "bundle")

"""Models that read weights from files of the host, or from memory: refused wherever they name them."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from altered import put
from cut_models import cut_contents
from onnx import TensorProto, helper
from sample_run import SampleRun

from loka_onnx.bundle.format import files as bundle_files
from loka_onnx.bundle.format.archive import unpack, verify_path, write_archive
from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.bundle.writer import write_bundle
from loka_onnx.core.digests import seal
from loka_onnx.errors import BundleInvalid
from loka_onnx.runtime import load

LOCATIONS = ("../../secret.bin", "/etc/passwd", "*/_ORT_MEM_ADDR_/*", "secret.bin")
PLACES = (
    "initializer",
    "attribute",
    "attributes",
    "sparse initializer",
    "sparse attribute",
    "sparse attributes",
    "subgraph",
    "function body",
    "function default",
    "training",
)


def foreign(location: str) -> onnx.TensorProto:
    tensor = onnx.TensorProto(data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", "4096"), ("length", "16")):
        tensor.external_data.add(key=key, value=value)
    return tensor


def sparse(values: onnx.TensorProto) -> onnx.SparseTensorProto:
    indices = helper.make_tensor("", TensorProto.INT64, [4], [0, 1, 2, 3])
    return onnx.SparseTensorProto(values=values, indices=indices, dims=[4])


def attacked(model: onnx.ModelProto, place: str, location: str) -> bytes:
    """The model with a tensor in that place whose values are in a file of the host."""
    tensor = foreign(location)
    kinds = onnx.AttributeProto
    attribute = {
        "attribute": kinds(name="value", type=kinds.TENSOR, t=tensor),
        "attributes": kinds(name="values", type=kinds.TENSORS, tensors=[tensor]),
        "sparse attribute": kinds(
            name="sparse_value", type=kinds.SPARSE_TENSOR, sparse_tensor=sparse(tensor)
        ),
        "sparse attributes": kinds(name="all", type=kinds.SPARSE_TENSORS, sparse_tensors=[sparse(tensor)]),
        "subgraph": kinds(name="body", type=kinds.GRAPH, g=onnx.GraphProto(initializer=[tensor])),
    }.get(place)
    if attribute is not None:
        model.graph.node.append(onnx.NodeProto(op_type="Constant", output=["w"], attribute=[attribute]))
    elif place == "initializer":
        model.graph.initializer.append(tensor)
    elif place == "sparse initializer":
        model.graph.sparse_initializer.append(sparse(tensor))
    elif place == "training":
        model.training_info.append(onnx.TrainingInfoProto(algorithm=onnx.GraphProto(initializer=[tensor])))
    else:
        value = kinds(name="value", type=kinds.TENSOR, t=tensor)
        function = onnx.FunctionProto(name="F", domain="my", output=["w"])
        if place == "function default":
            function.attribute_proto.append(value)
        else:
            function.node.append(onnx.NodeProto(op_type="Constant", output=["w"], attribute=[value]))
        model.functions.append(function)
    return model.SerializeToString()


def refuses(bundle: Path, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every form, and before anything is loaded."""
    for attempt in (verify_bundle, verify_path, load):
        with pytest.raises(BundleInvalid, match=message):
            attempt(bundle)
    archive = bundle.parent / "b.loka"
    archive.unlink(missing_ok=True)
    with monkeypatch.context() as patch:
        patch.setattr(bundle_files, "check_models", lambda *arguments: None)
        write_archive(bundle, archive)
    for attempt in (verify_path, load, lambda path: unpack(path, bundle.parent / "back")):
        with pytest.raises(BundleInvalid, match=message):
            attempt(archive)
    assert not (bundle.parent / "back").exists()


@pytest.mark.parametrize("place", PLACES)
def test_a_tensor_outside_the_bundle_is_found_wherever_it_stands(
    bundle: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "fallback/model.onnx"
    data = (bundle / path).read_bytes()
    for location in LOCATIONS:
        put(bundle, path, attacked(onnx.load_from_string(data), place, location))
        with pytest.raises(BundleInvalid, match="reads weights from a file that is not listed") as caught:
            verify_bundle(bundle)
        assert repr(location) in str(caught.value)
    refuses(bundle, "reads weights from a file that is not listed", monkeypatch)


@pytest.mark.parametrize("name", ["model.ONNX", "model.bin", "model.onnx.bak", "model.ort", "model"])
def test_onnx_runtime_is_given_files_of_one_suffix_only(
    bundle: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = attacked(onnx.load(bundle / "fallback/model.onnx"), "initializer", "/etc/passwd")
    put(bundle, "fallback/model.onnx", data, f"fallback/{name}")
    refuses(bundle, rf"engine 'fallback-fp32' is not a file '\*\.onnx'\n.*'fallback/{name}'", monkeypatch)


def test_the_lookup_model_too(sample: SampleRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = write_bundle(cut_contents(sample, tmp_path / "run"), tmp_path / "bundle")
    data = (bundle / "lookup/lookup.onnx").read_bytes()
    put(bundle, "lookup/lookup.onnx", data, "lookup/lookup.bin")
    refuses(bundle, r"the lookup model is not a file '\*\.onnx'", monkeypatch)


@pytest.mark.parametrize("backend", ["onnxruntime", "onnxruntime_tensorrt", "onnxruntime_of_tomorrow"])
def test_every_backend_of_onnx_runtime(bundle: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())["value"]
    entry = next(e for e in manifest["engines"] if e["path"].endswith(".onnx"))
    document = (bundle / "manifest.json").read_text()
    (bundle / "manifest.json").write_text(
        seal(document.replace('"backend": "onnxruntime"', f'"backend": "{backend}"'))
    )
    put(bundle, entry["path"], (bundle / entry["path"]).read_bytes(), f"{entry['path']}.bin")
    refuses(bundle, rf"engine '{entry['id']}' is not a file '\*\.onnx'", monkeypatch)

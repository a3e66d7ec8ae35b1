"""Files beside an engine are shipped and vouched for; weights in files of the host are refused."""

import sys
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from altered import edit, engine_of, put
from cut_models import cut_contents
from onnx import TensorProto, helper
from sample_run import make_run

from loka_onnx import runtime
from loka_onnx.bundle.format import files as bundle_files
from loka_onnx.bundle.format.archive import unpack, verify_path, write_archive
from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.bundle.writer import BundleContents, write_bundle
from loka_onnx.core import serde
from loka_onnx.engines.migraphx.session import MigraphxEngine, ProgramFile, ProgramInput, ProgramOutput
from loka_onnx.engines.onnxruntime.io_binding_settings import PROGRAMS, SETTINGS_FILE, IoBindingSettings
from loka_onnx.errors import BundleError, BundleInvalid
from loka_onnx.runtime import load
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
    # One that was altered since the build is not shipped.
    (contents.root / "engines/e" / beside[-1]).write_bytes(b"other")
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


LOCATIONS = ("../../secret.bin", "/etc/passwd", "*/_ORT_MEM_ADDR_/*", "secret.bin")
PLACES = (
    *("initializer", "attribute", "attributes", "sparse initializer", "sparse attribute"),
    *("sparse attributes", "subgraph", "function body", "function default", "training"),
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
    tensor, kinds = foreign(location), onnx.AttributeProto
    function = onnx.FunctionProto(name="F", domain="my", output=["w"])
    value = kinds(name="value", type=kinds.TENSOR, t=tensor)
    attributes = {
        "attribute": value,
        "attributes": kinds(name="values", type=kinds.TENSORS, tensors=[tensor]),
        "sparse attribute": kinds(name="s", type=kinds.SPARSE_TENSOR, sparse_tensor=sparse(tensor)),
        "sparse attributes": kinds(name="all", type=kinds.SPARSE_TENSORS, sparse_tensors=[sparse(tensor)]),
        "subgraph": kinds(name="body", type=kinds.GRAPH, g=onnx.GraphProto(initializer=[tensor])),
        "function body": value,
    }
    if place in attributes:
        nodes = function.node if place == "function body" else model.graph.node
        nodes.append(onnx.NodeProto(op_type="Constant", output=["w"], attribute=[attributes[place]]))
    elif place == "initializer":
        model.graph.initializer.append(tensor)
    elif place == "sparse initializer":
        model.graph.sparse_initializer.append(sparse(tensor))
    elif place == "training":
        model.training_info.append(onnx.TrainingInfoProto(algorithm=onnx.GraphProto(initializer=[tensor])))
    else:
        function.attribute_proto.append(value)
    if place.startswith("function"):
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
def test_a_tensor_outside_the_bundle_is_found_wherever_it_stands(bundle, place, monkeypatch):
    path = "fallback/model.onnx"
    data = (bundle / path).read_bytes()
    for location in LOCATIONS:
        put(bundle, path, attacked(onnx.load_from_string(data), place, location))
        with pytest.raises(BundleInvalid, match="reads weights from a file that is not listed") as caught:
            verify_bundle(bundle)
        assert repr(location) in str(caught.value)
    refuses(bundle, "reads weights from a file that is not listed", monkeypatch)


@pytest.mark.parametrize("name", ["model.ONNX", "model.bin", "model.onnx.bak", "model.ort", "model"])
def test_onnx_runtime_is_given_files_of_one_suffix_only(bundle, name, monkeypatch):
    data = attacked(onnx.load(bundle / "fallback/model.onnx"), "initializer", "/etc/passwd")
    put(bundle, "fallback/model.onnx", data, f"fallback/{name}")
    refuses(bundle, rf"engine 'fallback-fp32' is not a file '\*\.onnx'\n.*'fallback/{name}'", monkeypatch)


def test_the_lookup_model_too(sample, tmp_path, monkeypatch):
    bundle = write_bundle(cut_contents(sample, tmp_path / "run"), tmp_path / "bundle")
    put(bundle, "lookup/lookup.onnx", (bundle / "lookup/lookup.onnx").read_bytes(), "lookup/lookup.bin")
    refuses(bundle, r"the lookup model is not a file '\*\.onnx'", monkeypatch)


@pytest.mark.parametrize("backend", ["onnxruntime", "onnxruntime_tensorrt", "onnxruntime_of_tomorrow"])
def test_every_backend_of_onnx_runtime(bundle, backend, monkeypatch):
    entry = next(e for e in verify_bundle(bundle).engines if e.path.endswith(".onnx"))
    edit(bundle, lambda v: [e.update(backend=backend) for e in v["engines"] if e["backend"] == "onnxruntime"])
    put(bundle, entry.path, (bundle / entry.path).read_bytes(), f"{entry.path}.bin")
    refuses(bundle, rf"engine '{entry.id}' is not a file '\*\.onnx'", monkeypatch)

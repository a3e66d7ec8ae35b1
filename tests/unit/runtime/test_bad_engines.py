"""Engines and samples of which nothing can be made: each is passed over, and the next one serves."""

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from altered import put
from onnx import TensorProto, helper
from sample_run import SampleRun

from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.errors import BundleInvalid, ConfigError, EngineError
from loka_onnx.runtime import Cause, Serving, load
from loka_onnx.sessions import onnx_session
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions

FP32, FP8 = 1, 2
"""Places of two engines for this host among those of the sample."""


def engine_path(bundle: Path, sample: SampleRun, place: int) -> str:
    known = sample.contents.engines[place].artifact.id
    return next(entry.path for entry in verify_bundle(bundle).engines if entry.id == known)


def renamed(model: onnx.ModelProto) -> None:
    """Its output has another name."""
    old, new = model.graph.output[0].name, "click"
    for node in model.graph.node:
        for place, name in enumerate(node.output):
            node.output[place] = new if name == old else name
    model.graph.output[0].name = new


def wider(model: onnx.ModelProto) -> None:
    """It takes one more input, and answers it."""
    model.graph.input.append(helper.make_tensor_value_info("extra", TensorProto.FLOAT, [None, 1]))
    model.graph.output.append(helper.make_tensor_value_info("copy", TensorProto.FLOAT, [None, 1]))
    model.graph.node.append(helper.make_node("Identity", ["extra"], ["copy"]))


def unknown(model: onnx.ModelProto) -> None:
    """It has an operator that nobody knows."""
    model.graph.node[0].op_type = "NoSuchOperator"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (renamed, "the engine is not the one that the manifest describes (it takes ['dense'"),
        (wider, "the engine is not the one that the manifest describes (it takes ['dense'"),
        (unknown, "ONNX Runtime refuses"),
    ],
)
def test_an_engine_that_is_not_the_one_of_the_manifest_is_passed_over(sample, bundle, change, reason):
    path = engine_path(bundle, sample, FP32)
    model = onnx.load(bundle / path)
    change(model)
    put(bundle, path, model.SerializeToString())
    with load(bundle) as engine:
        assert engine.entry.id == sample.contents.engines[FP8].artifact.id
        skipped = engine.skipped[-1]
    assert skipped.cause is Cause.OPEN
    assert reason in skipped.reason


def test_whatever_a_library_raises_the_next_engine_serves(sample, bundle, monkeypatch):
    first = engine_path(bundle, sample, FP32)

    def open_session(path: Path, *arguments: Any) -> OnnxSession:
        if path.parts[-3:] == Path(first).parts:
            raise KeyError("what\nis this")
        return OnnxSession(path, *arguments)

    monkeypatch.setattr(onnx_session, "OnnxSession", open_session)
    with load(bundle) as engine:
        assert engine.entry.id == sample.contents.engines[FP8].artifact.id
        assert engine.skipped[-1].reason == r"KeyError: 'what\nis this'"


def altered_sample(bundle: Path, change: Callable[[zipfile.ZipFile, str, bytes], None]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(bundle / "sample.npz") as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            change(new, name, old.read(name))
    return buffer.getvalue()


def headers(data: bytes, local: int, central: int, value: int) -> bytes:
    """An archive with another byte in each header."""
    changed = bytearray(data)
    for mark, offset in ((b"PK\x03\x04", local), (b"PK\x01\x02", central)):
        place = data.find(mark)
        while place >= 0:
            changed[place + offset] = value
            place = data.find(mark, place + 4)
    return bytes(changed)


def broken_deflate(bundle: Path) -> bytes:
    data = bytearray(altered_sample(bundle, lambda new, name, d: new.writestr(name, d, zipfile.ZIP_DEFLATED)))
    place = data.find(b"PK\x03\x04")
    while place >= 0:
        data[place + 60 : place + 64] = b"\xff" * 4
        place = data.find(b"PK\x03\x04", place + 4)
    return bytes(data)


def same(bundle: Path) -> bytes:
    return altered_sample(bundle, lambda new, name, data: new.writestr(name, data))


def with_input(value: np.ndarray) -> Callable[[Path], bytes]:
    buffer = io.BytesIO()
    np.save(buffer, value)
    return lambda bundle: altered_sample(
        bundle,
        lambda new, name, data: new.writestr(name, buffer.getvalue() if name.startswith("input") else data),
    )


def npz(arrays: dict[str, np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def gigabytes() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("input/dense.npy", b"\0" * (257 << 20))
    assert len(buffer.getvalue()) < 1 << 20
    return buffer.getvalue()


SAMPLES: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "no array": (
        lambda bundle: altered_sample(bundle, lambda new, name, data: new.writestr(name, b"raw")),
        "'input/dense' is no array",
    ),
    "encrypted": (lambda bundle: headers(same(bundle), 6, 8, 1), "is encrypted"),
    "unknown method": (
        lambda bundle: headers(same(bundle), 8, 10, 99),
        "compression method is not supported",
    ),
    "broken deflate": (broken_deflate, "Error -3 while decompressing"),
    "no rows": (with_input(np.zeros((0, 16), np.float32)), "'input/dense' holds no rows"),
    "no axis": (with_input(np.float32(1)), "'input/dense' holds no rows"),
    "no outputs": (lambda bundle: npz({"input/dense": np.zeros((8, 16), np.float32)}), "lacks an array"),
    "gigabytes": (lambda bundle: gigabytes(), "the sample is too large"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case == "gigabytes")) for case in SAMPLES]
)
def test_a_sample_of_no_arrays_is_refused_with_a_reason_in_one_line(bundle, case):
    make, said = SAMPLES[case]
    put(bundle, "sample.npz", make(bundle))
    with pytest.raises(EngineError, match="no engine of the bundle runs here") as caught:
        load(bundle)
    assert said in caught.value.evidence
    assert "\n" not in caught.value.evidence


def test_directories_without_an_end_are_refused(bundle):
    deep = bundle.joinpath(*["d"] * 8)
    deep.mkdir(parents=True)
    (deep / "x").write_text("x")
    with pytest.raises(BundleInvalid, match="directory 'd/d/d/d/d/d/d/d' is too deep"):
        verify_bundle(bundle)


def test_a_program_in_a_model_needs_trust(sample, bundle):
    path = engine_path(bundle, sample, FP32)
    model = onnx.load(bundle / path)
    node = helper.make_node("EPContext", ["dense"], ["unused"], domain="com.microsoft", ep_cache_context=b"x")
    branch = helper.make_graph([node], "branch", [], [])
    model.graph.node.append(helper.make_node("If", ["c"], [], then_branch=branch, else_branch=branch))
    put(bundle, path, model.SerializeToString())
    options = SessionOptions(providers=("AzureExecutionProvider", "CPUExecutionProvider"))

    def reason(**named: Any) -> str:
        with load(bundle, options, serving=Serving(warm_up=False), **named) as engine:
            wanted = sample.contents.engines[FP32].artifact.id
            return next(each.reason for each in engine.skipped if each.engine == wanted)

    assert reason().startswith("the model holds a program, in a node EPContext")
    assert "EPContext" not in reason(trust=True).partition(":")[0]


@pytest.mark.parametrize("keys", ["key.pub", Path("key.pub"), b"key.pub"])
def test_keys_are_a_list(bundle, keys):
    with pytest.raises(ConfigError, match="`keys` is one path, and not a list of paths"):
        load(bundle, keys=keys)

"""Bundles that must not be trusted or do not run, and a host with nothing but the runtime."""

import gc
import io
import json
import re
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from absent import python
from altered import put
from onnx import helper
from onnx_text import parsed
from sample_run import SampleRun

from loka_onnx.bundle.format.archive import pack_bundle
from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.bundle.signing import sign_bundle, write_key_pair
from loka_onnx.engines.tensorrt import spec as tensorrt
from loka_onnx.errors import BundleInvalid, ConfigError, EngineError
from loka_onnx.runtime import Cause, Serving, load
from loka_onnx.sessions import cuda, host_devices, onnx_session
from loka_onnx.sessions.cuda import CudaDevice
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.sessions.runner import Arrays, Runner


class Answers(Runner):
    """Stands for a TensorRT engine: answers what the bundle expects."""

    closed = 0

    def __init__(self, expected: Arrays) -> None:
        self.expected = expected

    def run(self, inputs: Any) -> Arrays:
        return {name: value[np.arange(len(inputs["dense"])) % 8] for name, value in self.expected.items()}

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def opened(sample: SampleRun, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Programs that were opened, on a host with an RTX 4090 and the library that the engine was built by."""
    seen: list[tuple[str, ...]] = []

    def open_program(spec: Any, path: Path, architecture: str, version: str, *, is_new: bool) -> Runner:
        seen.append((path.name, architecture, version))
        return Answers(sample.contents.engines[0].expectation.outputs)

    monkeypatch.setattr(tensorrt, "open_engine", open_program)
    gpu = CudaDevice(0, "NVIDIA GeForce RTX 4090", "sm89")
    for module in (cuda, host_devices):
        monkeypatch.setattr(module, "list_cuda_devices", lambda: (gpu,))
    library = SimpleNamespace(__name__="tensorrt_rtx", __version__="1.5", __spec__=object())
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", library)
    return seen


def test_a_program_is_loaded_for_a_caller_or_a_signature_that_vouches_for_it(bundle, opened, tmp_path):
    pair = write_key_pair(tmp_path / "keys")
    sign_bundle(bundle, pair.private)
    # A signature that nobody asked about vouches for nothing.
    assert load(bundle).entry.backend == "onnxruntime"
    assert opened == []
    for vouched, trust in (({"trust": True}, "caller"), ({"keys": [pair.public]}, pair.fingerprint)):
        engine = load(bundle, **vouched)
        assert engine.entry.backend == "tensorrt_rtx"
        assert opened.pop() == ("engine.bin", "sm89", "1.5")
        assert engine.health().trust == trust
        engine.close()
        assert engine._runner.closed == 1


@pytest.mark.parametrize("trust", [False, True])
def test_a_bundle_that_the_key_did_not_sign_is_refused_not_served_without_programs(
    bundle, opened, tmp_path, trust
):
    ours, other = write_key_pair(tmp_path / "keys"), write_key_pair(tmp_path / "others")
    for sign in (lambda: None, lambda: sign_bundle(bundle, other.private)):
        sign()
        with pytest.raises(BundleInvalid):
            load(bundle, keys=[ours.public], trust=trust)
    assert opened == []
    assert load(bundle, keys=[ours.public, other.public]).entry.backend == "tensorrt_rtx"


def test_a_single_file_serves_and_leaves_nothing_behind(bundle, tmp_path, monkeypatch, sample):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    pair = write_key_pair(tmp_path / "keys")
    sign_bundle(bundle, pair.private)
    archive = pack_bundle(bundle, tmp_path / "bundle.loka")
    expected = load(bundle).infer(sample.contents.sample)["ctr"]
    engine = load(archive, keys=[pair.public])
    assert len(list(temporary.iterdir())) == 1
    np.testing.assert_array_equal(engine.infer(sample.contents.sample)["ctr"], expected)
    assert engine.health().trust == pair.fingerprint
    engine.close()
    engine.close()
    assert list(temporary.iterdir()) == []
    # Nor when it does not load or is forgotten.
    with pytest.raises(EngineError, match="no engine of the bundle runs here"):
        load(archive, part="dense")
    assert list(temporary.iterdir()) == []
    engine = load(archive)
    assert list(temporary.iterdir())
    del engine
    gc.collect()
    assert list(temporary.iterdir()) == []


FP32, FP8 = 1, 2
"""Places of two engines for this host among those of the sample."""


@pytest.fixture
def first(bundle: Path, sample: SampleRun) -> Path:
    """The file of the first engine for this host."""
    known = sample.contents.engines[FP32].artifact.id
    return bundle / next(entry.path for entry in verify_bundle(bundle).engines if entry.id == known)


NOT_THE_ONE = "the engine is not the one that the manifest describes (it takes ['dense'"


@pytest.mark.parametrize(
    ("body", "more", "output", "reason"),
    [
        ("click = ReduceSum(dense, one)", "", "click", NOT_THE_ONE),
        ("ctr = Add(dense, extra)", ", float[batch,16] extra", "ctr", NOT_THE_ONE),
        ("ctr = NoSuchOperator(dense)", "", "ctr", "ONNX Runtime refuses"),
    ],
)
def test_an_engine_that_is_not_the_one_of_the_manifest_is_passed_over(
    bundle, first, *, body, more, output, reason
):
    inputs, outputs = f"float[batch,16] dense{more}", f"float[batch,_] {output}"
    model = parsed(body, {"one": [1]}, inputs=inputs, outputs=outputs)
    put(bundle, str(first.relative_to(bundle)), model.SerializeToString())
    with load(bundle) as engine:
        assert engine.entry.plan == "fp8-safe"
        skipped = engine.skipped[-1]
    assert skipped.cause is Cause.OPEN
    assert reason in skipped.reason


def test_whatever_a_library_raises_the_next_engine_serves(sample, bundle, first, monkeypatch):
    def open_session(path: Path, *arguments: Any) -> OnnxSession:
        if path.parts[-2] == first.parts[-2]:
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


def headers(bundle: Path, local: int, central: int, value: int) -> bytes:
    """The sample with another byte in each header of its archive."""
    data = bytearray(altered_sample(bundle, lambda new, name, data: new.writestr(name, data)))
    for mark, offset in ((rb"PK\x03\x04", local), (rb"PK\x01\x02", central)):
        for found in re.finditer(mark, bytes(data)):
            data[found.start() + offset] = value
    return bytes(data)


def broken_deflate(bundle: Path) -> bytes:
    data = bytearray(altered_sample(bundle, lambda new, name, d: new.writestr(name, d, zipfile.ZIP_DEFLATED)))
    for found in re.finditer(rb"PK\x03\x04", bytes(data)):
        data[found.start() + 60 : found.start() + 64] = b"\xff" * 4
    return bytes(data)


def stored(value: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, value)
    return buffer.getvalue()


def with_input(data: bytes) -> Callable[[Path], bytes]:
    return lambda bundle: altered_sample(
        bundle, lambda new, name, kept: new.writestr(name, data if name.startswith("input") else kept)
    )


def with_input_alone(data: bytes, times: int = 1) -> Callable[[Path], bytes]:
    def made(bundle: Path) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("input/dense.npy", data * times)
        assert len(buffer.getvalue()) < 1 << 20
        return buffer.getvalue()

    return made


SAMPLES: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "no array": (with_input(b"raw"), "'input/dense' is no array"),
    "encrypted": (lambda bundle: headers(bundle, 6, 8, 1), "is encrypted"),
    "unknown method": (lambda bundle: headers(bundle, 8, 10, 99), "compression method is not supported"),
    "broken deflate": (broken_deflate, "Error -3 while decompressing"),
    "no rows": (with_input(stored(np.zeros((0, 16), np.float32))), "'input/dense' holds no rows"),
    "no axis": (with_input(stored(np.float32(1))), "'input/dense' holds no rows"),
    "no outputs": (with_input_alone(stored(np.zeros((8, 16), np.float32))), "lacks an array"),
    "gigabytes": (with_input_alone(b"\0", 257 << 20), "the sample is too large"),
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


def test_a_program_in_a_model_needs_trust(sample, bundle, first):
    model = onnx.load(first)
    node = helper.make_node("EPContext", ["dense"], ["unused"], domain="com.microsoft", ep_cache_context=b"x")
    branch = helper.make_graph([node], "branch", [], [])
    model.graph.node.append(helper.make_node("If", ["c"], [], then_branch=branch, else_branch=branch))
    put(bundle, str(first.relative_to(bundle)), model.SerializeToString())
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


ABSENT = (
    "torch", "pyarrow", "scipy", "onnx_graphsurgeon", "pandas", "plotly", "rich", "typer", "jinja2", "yaml",
    "prometheus_client", "cryptography", "tensorrt", "tensorrt_rtx", "migraphx", "triton",
)  # fmt: skip

PROGRAM = """
import json, sys, time
began = time.process_time()
import loka_onnx.runtime
imported = time.process_time()
import numpy as np
engine = loka_onnx.runtime.load(sys.argv[1])
loaded = time.process_time()
answer = engine.infer({"dense": np.full((3, 16), 0.5, np.float32)})["ctr"]
health, now = engine.health(), engine.metrics.snapshot()
engine.close()
print(json.dumps({
    "answer": answer.tolist(), "ready": health.ready, "requests": now.requests, "skipped": now.skipped,
    "import_ms": 1e3 * (imported - began), "load_ms": 1e3 * (loaded - imported),
    "found": sorted({name.partition(".")[0] for name in sys.modules}),
}))
"""


@pytest.mark.parametrize("form", ["directory", pytest.param("file", marks=pytest.mark.slow)])
def test_a_bundle_of_onnx_runtime_is_served(original: Path, tmp_path: Path, form: str) -> None:
    place = pack_bundle(original, tmp_path / "bundle.loka") if form == "file" else original
    done = python(PROGRAM, place, without=ABSENT)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    print(f"import {said['import_ms']:.0f} ms, load {said['load_ms']:.0f} ms")
    assert said["ready"]
    assert said["requests"] == 1
    assert not set(ABSENT) & set(said["found"])
    assert np.shape(said["answer"]) == (3, 1)
    assert said["skipped"]["untrusted"] == 1
    # Of the processor. Seen: 0.4 s, half of it ONNX. Torch alone takes longer than the limit.
    assert said["import_ms"] < 5000

"""Bundles that must not be trusted or do not run, and a host with nothing but the runtime."""

import gc
import io
import json
import subprocess
import sys
import tempfile
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

from loka_onnx.bundle.format.archive import pack_bundle
from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.bundle.signing import sign_bundle, write_key_pair
from loka_onnx.bundle.writer import write_bundle
from loka_onnx.core.manifest import EngineEntry
from loka_onnx.engines.tensorrt import spec as tensorrt
from loka_onnx.errors import BundleInvalid, ConfigError, EngineError
from loka_onnx.runtime import Cause, Serving, Skipped, load, loading
from loka_onnx.runtime.loading import obstacle
from loka_onnx.sessions import onnx_session
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.sessions.runner import Arrays, Runner


@pytest.fixture
def opened(sample: SampleRun, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Programs that were opened, on a host that has what the engine needs."""
    seen: list[str] = []
    expected = sample.contents.engines[0].expectation.outputs

    class Answers(Runner):
        def run(self, inputs: Any) -> Arrays:
            return {name: value[np.arange(len(inputs["dense"])) % 8] for name, value in expected.items()}

    def open_program(spec: Any, path: Path, architecture: str, version: str, *, is_new: bool) -> Runner:
        seen.append(path.name)
        return Answers()

    def untrusted_only(entry: EngineEntry, *arguments: Any, is_trusted: bool) -> Skipped | None:
        found = obstacle(entry, *arguments, is_trusted=is_trusted)
        return found if found is not None and found.cause is Cause.UNTRUSTED else None

    monkeypatch.setattr(loading, "obstacle", untrusted_only)
    monkeypatch.setattr(tensorrt, "open_engine", open_program)
    monkeypatch.setattr(loading, "in_order", lambda manifest, usable: tuple(usable))
    return seen


def test_a_signature_lets_programs_load_and_health_names_the_key(bundle, opened, tmp_path):
    pair = write_key_pair(tmp_path / "keys")
    sign_bundle(bundle, pair.private)
    # A signature that nobody asked about vouches for nothing.
    assert load(bundle).entry.backend == "onnxruntime"
    assert opened == []
    engine = load(bundle, keys=[pair.public])
    assert engine.entry.backend == "tensorrt_rtx"
    assert opened == ["engine.bin"]
    assert engine.health().trust == pair.fingerprint


@pytest.mark.parametrize("trust", [False, True])
def test_a_bundle_that_the_key_did_not_sign_is_refused_not_served_without_programs(
    bundle: Path, opened: list[str], tmp_path: Path, trust: bool
) -> None:
    ours, other = write_key_pair(tmp_path / "keys"), write_key_pair(tmp_path / "others")
    with pytest.raises(BundleInvalid):
        load(bundle, keys=[ours.public], trust=trust)
    sign_bundle(bundle, other.private)
    with pytest.raises(BundleInvalid):
        load(bundle, keys=[ours.public], trust=trust)
    assert opened == []
    assert load(bundle, keys=[ours.public, other.public]).entry.backend == "tensorrt_rtx"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def test_a_single_file_serves_and_leaves_nothing_behind(bundle, tmp_path, temporary, sample):
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


@pytest.mark.slow
def test_a_single_file_leaves_nothing_when_it_does_not_load_or_is_forgotten(bundle, tmp_path, temporary):
    archive = pack_bundle(bundle, tmp_path / "bundle.loka")
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


ABSENT = (
    "torch", "pyarrow", "scipy", "onnx_graphsurgeon", "pandas", "plotly", "rich", "typer", "jinja2", "yaml",
    "prometheus_client", "cryptography", "tensorrt", "tensorrt_rtx", "migraphx", "triton",
)  # fmt: skip

PROGRAM = f"""
import json, sys, time

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named '{{name}}'", name=name)

sys.meta_path.insert(0, Absent())
began = time.perf_counter()
import loka_onnx.runtime
imported = time.perf_counter()
import numpy as np
engine = loka_onnx.runtime.load(sys.argv[1])
loaded = time.perf_counter()
answer = engine.infer({{"dense": np.full((3, 16), 0.5, np.float32)}})["ctr"]
health, now = engine.health(), engine.metrics.snapshot()
engine.close()
print(json.dumps({{
    "answer": answer.tolist(), "ready": health.ready, "requests": now.requests, "skipped": now.skipped,
    "import_ms": 1e3 * (imported - began), "load_ms": 1e3 * (loaded - imported),
    "found": sorted({{name.partition(".")[0] for name in sys.modules}} & {{*{ABSENT!r}}}),
}}))
"""


@pytest.mark.parametrize("form", ["directory", pytest.param("file", marks=pytest.mark.slow)])
def test_a_bundle_of_onnx_runtime_is_served(sample: SampleRun, tmp_path: Path, form: str) -> None:
    place = write_bundle(sample.contents, tmp_path / "bundle")
    if form == "file":
        place = pack_bundle(place, tmp_path / "bundle.loka")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(place)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    print(f"import {said['import_ms']:.0f} ms, load {said['load_ms']:.0f} ms")
    assert said["ready"]
    assert said["requests"] == 1
    assert said["found"] == []
    assert np.shape(said["answer"]) == (3, 1)
    assert said["skipped"]["untrusted"] == 1
    # Seen: 0.4 s on a busy machine, half of it ONNX. Torch alone takes longer than the limit.
    assert said["import_ms"] < 5000

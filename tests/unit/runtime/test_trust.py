"""Who vouches for programs, and the single-file form, which needs a place while the engine lives."""

import gc
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from altered import built_by_inductor
from sample_run import SampleRun

from loka_onnx.bundle.format.archive import pack_bundle
from loka_onnx.bundle.signing import sign_bundle, write_key_pair
from loka_onnx.bundle.writer import write_bundle
from loka_onnx.core.manifest import EngineEntry
from loka_onnx.engines.tensorrt import spec as tensorrt
from loka_onnx.errors import BundleInvalid, EngineError
from loka_onnx.runtime import Cause, Skipped, load, loading
from loka_onnx.runtime.selection import obstacle
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


@pytest.mark.slow
def test_a_trusted_bundle_is_served_by_a_package_of_inductor(sample, tmp_path):
    bundle = write_bundle(built_by_inductor(sample, tmp_path, (1, 8, 4096, ())), tmp_path / "bundle")
    rows, exact = sample.contents.sample["dense"], sample.contents.fallback.outputs["ctr"]
    with load(bundle, trust=True) as engine:
        assert engine.entry.backend == "inductor"
        assert engine.health().ready
        for count in (1, 3, 8):
            np.testing.assert_allclose(engine.infer({"dense": rows[:count]})["ctr"], exact[:count], atol=1e-4)
    assert load(bundle).entry.backend == "onnxruntime"

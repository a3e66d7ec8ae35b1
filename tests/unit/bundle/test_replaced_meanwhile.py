"""A bundle that is replaced while it is read: who signed it and what is loaded are of one bundle."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cut_models import cut_contents, request
from sample_run import SampleRun

from loka_onnx.bundle.format import files as bundle_files
from loka_onnx.bundle.format import pinned
from loka_onnx.bundle.format import signature as bundle_signature
from loka_onnx.bundle.format.archive import pack_bundle, verify_path
from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.bundle.format.replace import move_into_place
from loka_onnx.bundle.format.signature import verify_signature
from loka_onnx.bundle.signing import KeyPair, sign_bundle, write_key_pair
from loka_onnx.bundle.writer import write_bundle
from loka_onnx.core.digests import seal
from loka_onnx.core.manifest import Manifest
from loka_onnx.errors import BundleInvalid
from loka_onnx.graph import storage
from loka_onnx.runtime import load, loading
from loka_onnx.sessions import onnx_session
from loka_onnx.sessions.onnx_session import OnnxSession


@pytest.fixture
def pair(tmp_path: Path) -> KeyPair:
    return write_key_pair(tmp_path / "keys")


@pytest.fixture
def signed(sample: SampleRun, pair: KeyPair, tmp_path: Path) -> Path:
    return write_bundle(sample.contents, tmp_path / "bundle", key=pair.private)


@pytest.fixture
def other(signed: Path, tmp_path: Path) -> Path:
    """Another bundle, of nobody."""
    place = Path(shutil.copytree(signed, tmp_path / "other"))
    (place / "signature.json").unlink()
    manifest = place / "manifest.json"
    manifest.write_text(
        seal(manifest.read_text().replace('"created_by": "loka-onnx', '"created_by": "nobody'))
    )
    return place


def swap(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, act: Callable[[], object]) -> None:
    """Lets something happen once, right after the first call of a function."""
    original = getattr(module, name)

    def then(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        monkeypatch.setattr(module, name, original)
        act()
        return result

    monkeypatch.setattr(module, name, then)


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[os.stat_result]]:
    """What ONNX Runtime was given: status of each model as it is opened."""
    seen: list[os.stat_result] = []

    def opened(path: Path, *arguments: Any) -> OnnxSession:
        seen.append(path.stat())
        return OnnxSession(path, *arguments)

    monkeypatch.setattr(onnx_session, "OnnxSession", opened)
    yield seen


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (bundle_signature, "read_document"),
        (bundle_files, "check_signature"),
        (bundle_files, "parse_manifest"),
        (bundle_files, "check_models"),
        (loading, "verify_directory"),
        (loading, "read_sample"),
    ],
)
def test_a_signature_vouches_for_no_other_bundle(
    signed: Path, other: Path, pair: KeyPair, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    """What is left in the place is not signed, and it is that which a load would have to serve."""
    swap(monkeypatch, module, name, lambda: move_into_place(other, signed))
    with pytest.raises(BundleInvalid, match="the bundle is not signed") as caught:
        load(signed, keys=[pair.public])
    assert str(signed) in str(caught.value)
    assert "/proc/self/fd" not in str(caught.value)


def test_a_directory_that_is_replaced_stays_the_one_that_was_verified(
    signed: Path, other: Path, pair: KeyPair, sessions: list[os.stat_result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file is opened in the directory that was verified, though another has its name by then."""
    models = {path: path.stat() for path in signed.rglob("*.onnx")}
    foreign = {path: path.stat() for path in other.rglob("*.onnx")}
    swap(monkeypatch, loading, "verify_directory", lambda: move_into_place(other, signed))
    # And back, so that what was loaded stays.
    back = iter([lambda: move_into_place(other, signed)])
    first = loading._first

    def then(opener: Any) -> Any:
        engine = first(opener)
        next(back)()
        return engine

    monkeypatch.setattr(loading, "_first", then)
    with load(signed, keys=[pair.public]) as engine:
        assert engine.health().trust == pair.fingerprint
        assert sessions
        assert all(any(os.path.samestat(s, m) for m in models.values()) for s in sessions)
        assert not any(os.path.samestat(s, m) for m in foreign.values() for s in sessions)


def test_a_deployment_meanwhile_is_loaded_in_its_place(
    sample: SampleRun, signed: Path, pair: KeyPair, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """A writer removes the old bundle under a reader: the reader begins again, with the new one."""
    fewer = dataclasses.replace(sample.contents, engines=sample.contents.engines[1:2])
    swap(monkeypatch, loading, "verify_directory", lambda: write_bundle(fewer, signed, key=pair.private))
    with load(signed, keys=[pair.public]) as engine:
        assert engine.entry.id == fewer.engines[0].artifact.id
        assert [skipped.engine for skipped in engine.skipped] == []
    assert "the bundle was replaced while it was loaded: once more" in caplog.text


def test_a_bundle_that_never_stays_is_not_loaded(
    sample: SampleRun, signed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = loading.verify_directory

    def then(*arguments: Any) -> Any:
        verified = verify(*arguments)
        write_bundle(sample.contents, signed)
        return verified

    monkeypatch.setattr(loading, "verify_directory", then)
    with pytest.raises(BundleInvalid, match="replaced faster than it is loaded\n  evidence: 3 attempts"):
        load(signed)


def test_without_paths_of_open_directories_nothing_is_read(
    signed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "DESCRIPTORS", tmp_path / "no such place")
    for call in (verify_bundle, load):
        with pytest.raises(BundleInvalid, match="the bundle cannot be held open"):
            call(signed)


def test_verifying_reads_one_directory(
    sample: SampleRun, signed: Path, pair: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these refuses or answers for one bundle; none mixes two."""
    fewer = dataclasses.replace(sample.contents, engines=sample.contents.engines[1:2])
    spare = write_bundle(fewer, signed.parent / "spare")
    before = verify_bundle(signed)
    calls: tuple[Callable[[], Manifest | str], ...] = (
        lambda: verify_bundle(signed),
        lambda: verify_path(signed, [pair.public]).manifest,
        lambda: verify_path(pack_bundle(signed, signed.parent / "b.loka")).manifest,
    )
    for call in calls:
        swap(monkeypatch, bundle_files, "parse_manifest", lambda: move_into_place(spare, signed))
        assert call() == before
        move_into_place(spare, signed)
    swap(monkeypatch, bundle_signature, "read_document", lambda: move_into_place(spare, signed))
    assert verify_signature(signed, [pair.public]) == pair.fingerprint


def test_onnx_runtime_opens_external_data_through_the_pin(
    sample: SampleRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sessions: list[os.stat_result]
) -> None:
    """A table beside the model, from a directory that has another name by then."""
    monkeypatch.setattr(storage, "TABLE_LIMIT_BYTES", 0)
    contents = cut_contents(sample, tmp_path / "run", is_external=True)
    bundle = write_bundle(contents, tmp_path / "bundle")
    assert (bundle / "lookup/tables.bin").exists()
    with pinned.pinned(bundle) as pin:
        bundle.rename(tmp_path / "moved")
        bundle.mkdir()
        assert not pin.is_current
        with OnnxSession(pin.path / "fallback" / contents.model.path.name) as session:
            assert session.run(request(3))["ctr"].shape == (3, 1)
        bundle.rmdir()
        (tmp_path / "moved").rename(bundle)
    with load(bundle) as engine:
        assert sessions
        np.testing.assert_array_equal(engine.infer(request(5))["ctr"].shape, (5, 1))


def test_signing_signs_what_was_verified(
    sample: SampleRun, signed: Path, pair: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    fewer = dataclasses.replace(sample.contents, engines=sample.contents.engines[1:2])
    spare = write_bundle(fewer, signed.parent / "spare")
    swap(monkeypatch, bundle_files, "check_models", lambda: move_into_place(spare, signed))
    with pytest.raises(Exception, match="was replaced while it was being signed"):
        sign_bundle(signed, pair.private)
    assert not (signed / "signature.json").exists()

"""Writes that are killed, refused by the disk, or meet other processes: one whole bundle is there."""

import contextlib
import dataclasses
import errno
import io
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cut_models import cut_contents, request
from sample_run import SampleRun

from loka_onnx.bundle.format import documents, replace
from loka_onnx.bundle.format import files as bundle_files
from loka_onnx.bundle.format import signature as bundle_signature
from loka_onnx.bundle.format.archive import pack_bundle, unpack, verify_path
from loka_onnx.bundle.format.files import Verified, verify_bundle
from loka_onnx.bundle.format.replace import move_into_place
from loka_onnx.bundle.format.signature import verify_signature
from loka_onnx.bundle.registry import TransferOptions, pull_bundle, push_bundle
from loka_onnx.bundle.signing import KeyPair, sign_bundle, write_key_pair
from loka_onnx.bundle.writer import BundleContents, write_bundle
from loka_onnx.core.manifest import Manifest
from loka_onnx.errors import BundleError, BundleInvalid, OutputError
from loka_onnx.graph import storage
from loka_onnx.runtime import load, loading
from loka_onnx.sessions import onnx_session
from loka_onnx.sessions.onnx_session import OnnxSession

KILLS = 40


@pytest.fixture(scope="module")
def fewer(sample: SampleRun) -> BundleContents:
    return dataclasses.replace(sample.contents, engines=sample.contents.engines[1:2])


@pytest.mark.slow
@pytest.mark.parametrize("job", ["write", "write signed", "pack", "unpack", "sign", "push", "pull"])
def test_killed_at_any_moment_one_whole_bundle_is_there(sample, fewer, tmp_path, job):
    (tmp_path / "contents").write_bytes(pickle.dumps((sample.contents, fewer)))
    key = write_key_pair(tmp_path / "keys").private
    bundles = [write_bundle(c, tmp_path / f"source-{i}") for i, c in enumerate((sample.contents, fewer))]
    place = tmp_path / "deploy" / ("b.loka" if job == "pack" else "bundle")
    if job == "unpack":
        bundles = [pack_bundle(bundle, tmp_path / f"{i}.loka") for i, bundle in enumerate(bundles)]
    if job == "sign":
        write_bundle(sample.contents, place)
    script = Path(__file__).with_name("killed_writes.py")
    done = subprocess.run(
        [sys.executable, script, job, place, str(KILLS), tmp_path / "contents", *bundles, key],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(job, found)
    assert found["left"] == []
    assert found["states"] == (1 if job == "sign" else 2)
    assert found["seen"] == found["states"]
    # Otherwise the kills hit nothing and the test would show nothing.
    assert found["staged"] > KILLS // 10


@dataclasses.dataclass(frozen=True)
class Place:
    """An old bundle, what is done to it, how it is read, and how it becomes the old one again.

    `folder` holds nothing else than `path`, and what an interrupted write leaves.
    """

    path: Path
    act: Callable[[], object]
    look: Callable[[], Verified]
    folder: Path
    reset: Callable[[], object] = lambda: None

    def left(self) -> list[str]:
        return [path.name for path in self.folder.iterdir() if path != self.path]


JOBS = ("write", "write signed", "pack", "unpack", "sign")
SLOW = [pytest.param(job, marks=pytest.mark.slow) for job in ("push", "pull")]


@pytest.fixture(params=[*JOBS, *SLOW])
def place(request: pytest.FixtureRequest, sample: SampleRun, fewer: BundleContents, tmp_path: Path) -> Place:
    root = tmp_path / "deploy"
    key = write_key_pair(tmp_path / "keys").private
    old, new = write_bundle(sample.contents, tmp_path / "old"), write_bundle(fewer, tmp_path / "new")
    directory, file, registry = root / "bundle", root / "b.loka", tmp_path / "registry"
    options = TransferOptions(threads=1)

    def look() -> Verified:
        return verify_path(file if request.param == "pack" else directory)

    def look_in_registry() -> Verified:
        return verify_path(pull_bundle(f"{registry}#prod", directory, options).directory)

    def forget() -> None:
        """The registry as it was before."""
        shutil.rmtree(registry)
        push_bundle(old, f"{registry}#prod", options)

    if request.param == "push":
        push_bundle(old, f"{registry}#prod", options)
        act = partial(push_bundle, new, f"{registry}#prod", options)
        return Place(directory, act, look_in_registry, registry / "uploads", forget)
    if request.param == "pack":
        return Place(pack_bundle(old, file), lambda: pack_bundle(new, file), look, root)
    write_bundle(sample.contents, directory)
    if request.param == "pull":
        push_bundle(new, f"{registry}#new", options)
        act = partial(pull_bundle, f"{registry}#new", directory, options)
        return Place(directory, act, look, root, lambda: write_bundle(sample.contents, directory))
    archive = pack_bundle(new, tmp_path / "new.loka")
    acts: dict[str, Callable[[], object]] = {
        "write": lambda: write_bundle(fewer, directory),
        "write signed": lambda: write_bundle(fewer, directory, key=key),
        "unpack": lambda: unpack(archive, directory),
        "sign": lambda: sign_bundle(directory, key),
    }
    return Place(directory, acts[request.param], look, root)


class FullDisk:
    """Fails the n-th call that needs room on the disk: opening, writing, syncing, making a directory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, self.calls = -1, 0
        disk, real_open, real_fsync, real_mkdir = self, io.open, os.fsync, os.mkdir

        class Raw(io.FileIO):
            def write(self, data: Any) -> int:
                disk.count()
                return super().write(data) or 0

        def opened(file: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
            if not set(mode) & set("wxa+") or isinstance(file, int):
                return real_open(file, mode, *args, **more)
            disk.count()
            raw = Raw(file, mode.replace("b", "").replace("t", ""))
            buffered: Any = io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding="utf-8")

        def fsync(descriptor: int) -> None:
            disk.count()
            real_fsync(descriptor)

        def mkdir(*args: Any, **more: Any) -> None:
            disk.count()
            real_mkdir(*args, **more)

        monkeypatch.setattr(io, "open", opened)
        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "mkdir", mkdir)

    def count(self) -> None:
        self.calls += 1
        if self.left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.left -= 1


def test_a_full_disk_at_any_call_leaves_a_bundle(place, monkeypatch):
    before = place.look()
    disk = FullDisk(monkeypatch)
    place.act()
    # Counted once: the same calls follow each time.
    needed, after = disk.calls, place.look()
    assert needed >= 4
    assert after != before
    states = {before.manifest.seal, after.manifest.seal}
    failed = 0
    for number in range(needed):
        disk.left = -1
        place.reset()
        disk.left = number
        with contextlib.suppress(OutputError):
            place.act()
            failed -= 1
        failed += 1
        disk.left = -1
        assert place.left() == [], number
        assert place.look().manifest.seal in states, number
    # The sync of the parent, last, fails after the bundle took its place.
    assert failed == needed


@contextlib.contextmanager
def file_limit(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 100, 300])
def test_the_kernel_refusing_to_write_leaves_the_old_bundle(place, size):
    """Not simulated: the limit on the size of files ends the write in the system call (EFBIG)."""
    before = place.look()
    with (
        file_limit(size),
        pytest.raises(OutputError, match=r"cannot write '.*'\n  evidence: .*File too large"),
    ):
        place.act()
    assert place.left() == []
    assert place.look() == before
    place.act()
    assert place.look() != before


@pytest.fixture
def pair(tmp_path: Path) -> KeyPair:
    return write_key_pair(tmp_path / "keys")


@pytest.fixture
def signed(sample: SampleRun, pair: KeyPair, tmp_path: Path) -> Path:
    return write_bundle(sample.contents, tmp_path / "bundle", key=pair.private)


@pytest.fixture
def spare(sample: SampleRun, signed: Path) -> Path:
    """A bundle of one engine, of nobody."""
    fewer = dataclasses.replace(sample.contents, engines=sample.contents.engines[1:2])
    return write_bundle(fewer, signed.parent / "spare")


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
def test_a_signature_vouches_for_no_other_bundle(signed, spare, pair, monkeypatch, module, name):
    """What is left in the place is not signed, and it is that which a load would have to serve."""
    swap(monkeypatch, module, name, lambda: move_into_place(spare, signed))
    with pytest.raises(BundleInvalid, match="the bundle is not signed") as caught:
        load(signed, keys=[pair.public])
    assert str(signed) in str(caught.value)
    assert "/proc/self/fd" not in str(caught.value)


def test_a_directory_that_is_replaced_stays_the_one_that_was_verified(
    signed: Path, spare: Path, pair: KeyPair, sessions: list[os.stat_result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file is opened in the directory that was verified, though another has its name by then."""
    models = {path: path.stat() for path in signed.rglob("*.onnx")}
    foreign = {path: path.stat() for path in spare.rglob("*.onnx")}
    swap(monkeypatch, loading, "verify_directory", lambda: move_into_place(spare, signed))
    # And back, so that what was loaded stays.
    back = iter([lambda: move_into_place(spare, signed)])
    first = loading._Opener.first

    def then(opener: Any) -> Any:
        engine = first(opener)
        next(back)()
        return engine

    monkeypatch.setattr(loading._Opener, "first", then)
    with load(signed, keys=[pair.public]) as engine:
        assert engine.health().trust == pair.fingerprint
        assert sessions
        assert all(any(os.path.samestat(s, m) for m in models.values()) for s in sessions)
        assert not any(os.path.samestat(s, m) for m in foreign.values() for s in sessions)


def test_a_deployment_meanwhile_is_loaded_in_its_place(sample, signed, pair, monkeypatch, caplog):
    """A writer removes the old bundle under a reader: the reader begins again, with the new one."""
    fewer = dataclasses.replace(sample.contents, engines=sample.contents.engines[1:2])
    swap(monkeypatch, loading, "verify_directory", lambda: write_bundle(fewer, signed, key=pair.private))
    with load(signed, keys=[pair.public]) as engine:
        assert engine.entry.id == fewer.engines[0].artifact.id
        assert [skipped.engine for skipped in engine.skipped] == []
    assert "the bundle was replaced while it was loaded: once more" in caplog.text


def test_a_bundle_that_never_stays_is_not_loaded(sample, signed, monkeypatch):
    verify = loading.verify_directory

    def then(*arguments: Any) -> Any:
        verified = verify(*arguments)
        write_bundle(sample.contents, signed)
        return verified

    monkeypatch.setattr(loading, "verify_directory", then)
    with pytest.raises(BundleInvalid, match="replaced faster than it is loaded\n  evidence: 3 attempts"):
        load(signed)


def test_without_paths_of_open_directories_nothing_is_read(signed, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "DESCRIPTORS", tmp_path / "no such place")
    for call in (verify_bundle, load):
        with pytest.raises(BundleInvalid, match="the bundle cannot be held open"):
            call(signed)


def test_verifying_reads_one_directory(signed, spare, pair, monkeypatch):
    """Each of these refuses or answers for one bundle; none mixes two."""
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


def test_onnx_runtime_opens_external_data_through_the_pin(sample, tmp_path, monkeypatch, sessions):
    """A table beside the model, from a directory that has another name by then."""
    monkeypatch.setattr(storage, "TABLE_LIMIT_BYTES", 0)
    contents = cut_contents(sample, tmp_path / "run", is_external=True)
    bundle = write_bundle(contents, tmp_path / "bundle")
    assert (bundle / "lookup/tables.bin").exists()
    with documents.pinned(bundle) as pin:
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


@pytest.mark.parametrize(("module", "name"), [(bundle_files, "check_models"), (replace, "_sync")])
def test_a_bundle_that_is_replaced_meanwhile_is_not_signed(signed, spare, pair, monkeypatch, module, name):
    """After it was verified, or when its signature is about to take its place."""
    swap(monkeypatch, module, name, lambda: move_into_place(spare, signed))
    with pytest.raises(BundleError, match="was replaced while it was being signed"):
        sign_bundle(signed, pair.private)
    assert not (signed / "signature.json").exists()
    assert sorted(p.name for p in signed.parent.iterdir()) == ["bundle", "keys", "spare"]

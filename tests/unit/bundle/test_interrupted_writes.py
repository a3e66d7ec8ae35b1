"""Writes that are killed, refused by the disk, or meet other processes: one whole bundle is there."""

import contextlib
import dataclasses
import errno
import io
import os
import resource
import shutil
import warnings
from collections.abc import Callable
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


@pytest.fixture(scope="module")
def fewer(sample: SampleRun) -> BundleContents:
    return dataclasses.replace(sample.contents, engines=sample.contents.engines[1:2])


@pytest.fixture(scope="module")
def other(sample: SampleRun) -> BundleContents:
    return dataclasses.replace(sample.contents, engines=sample.contents.engines[2:])


@dataclasses.dataclass(frozen=True)
class Place:
    """An old bundle, what is done to it, how it is read, and how it becomes the old one again.

    `folder` holds nothing else than `path`, and what an interrupted write leaves.
    """

    path: Path
    act: Callable[[], object]
    look: Callable[[], Verified]
    folder: Path
    reset: Callable[[], object]

    def left(self) -> list[str]:
        return [path.name for path in self.folder.iterdir() if path != self.path]


SLOW = [pytest.param(job, marks=pytest.mark.slow) for job in ("push", "pull")]


@pytest.fixture(params=["write", "write signed", "pack", "unpack", "sign", *SLOW])
def place(
    request: pytest.FixtureRequest, other: BundleContents, fewer: BundleContents, tmp_path: Path
) -> Place:
    root = tmp_path / "deploy"
    key = write_key_pair(tmp_path / "keys").private
    old, new = write_bundle(other, tmp_path / "old"), write_bundle(fewer, tmp_path / "new")
    directory, file, registry = root / "bundle", root / "b.loka", tmp_path / "registry"
    options = TransferOptions(threads=1)

    def look_in_registry() -> Verified:
        return verify_path(pull_bundle(f"{registry}#prod", directory, options).directory)

    def forget() -> None:
        """The registry as it was before."""
        shutil.rmtree(registry, ignore_errors=True)
        push_bundle(old, f"{registry}#prod", options)

    if request.param == "push":
        forget()
        act = partial(push_bundle, new, f"{registry}#prod", options)
        return Place(directory, act, look_in_registry, registry / "uploads", forget)
    if request.param == "pack":
        reset = partial(pack_bundle, old, file)
        return Place(reset(), partial(pack_bundle, new, file), partial(verify_path, file), root, reset)
    write_bundle(other, directory)
    push_bundle(new, f"{registry}#new", options)
    archive = pack_bundle(new, tmp_path / "new.loka")
    acts: dict[str, Callable[[], object]] = {
        "write": lambda: write_bundle(fewer, directory),
        "write signed": lambda: write_bundle(fewer, directory, key=key),
        "unpack": lambda: unpack(archive, directory),
        "sign": lambda: sign_bundle(directory, key),
        "pull": lambda: pull_bundle(f"{registry}#new", directory, options),
    }
    reset = partial(write_bundle, other, directory)
    return Place(directory, acts[request.param], partial(verify_path, directory), root, reset)


KILLED = 9


class Disk:
    """Ends the n-th call that changes the disk: it has no room, or the process dies there.

    A call that needs no room (a rename, a removal) is counted for the latter only.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, kills: bool) -> None:
        self.left, self.calls, self.kills = -1, 0, kills
        disk, real_open = self, io.open

        class Raw(io.FileIO):
            def write(self, data: Any) -> int:
                disk.count(lambda: super(Raw, self).write(bytes(data)[: len(data) // 2]))
                return super().write(data) or 0

        def opened(file: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
            if not set(mode) & set("wxa+") or isinstance(file, int):
                return real_open(file, mode, *args, **more)
            disk.count()
            raw = Raw(file, mode.replace("b", "").replace("t", ""))
            buffered: Any = io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding="utf-8")

        monkeypatch.setattr(io, "open", opened)
        without_room = ("rename", "replace", "link", "unlink", "rmdir") if kills else ()
        for name in ("fsync", "mkdir", *without_room):
            monkeypatch.setattr(os, name, self.counted(getattr(os, name)))
        if kills:
            monkeypatch.setattr(replace, "_exchange", self.counted(replace._exchange))

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def then(*args: Any, **more: Any) -> Any:
            self.count()
            return call(*args, **more)

        return then

    def count(self, half: Callable[[], object] = lambda: None) -> None:
        self.calls += 1
        if self.left == 0:
            half()
            if self.kills:
                os._exit(KILLED)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.left -= 1


def in_a_child(act: Callable[[], object]) -> int:
    """Exit code of a process that does it."""
    with warnings.catch_warnings():
        # Python 3.12 warns where other threads hold locks; the child takes none of theirs.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            act()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("kills", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_full_disk_or_a_death_at_any_call_leaves_a_whole_bundle(place, monkeypatch, kills):
    before = place.look()
    disk = Disk(monkeypatch, kills=kills)
    place.act()
    # Counted once: the same calls follow each time.
    needed, after = disk.calls, place.look()
    assert needed >= 4
    assert after != before
    seen, failed = set(), 0
    for number in range(needed):
        disk.left = -1
        place.reset()
        disk.left = number
        if kills:
            failed += in_a_child(place.act) == KILLED
        else:
            with contextlib.suppress(OutputError):
                place.act()
                failed -= 1
            failed += 1
        disk.left = -1
        assert kills or place.left() == [], number
        found = place.look()
        assert found in (before, after), number
        seen.add(found == after)
    assert seen == {False, True}
    # The sync of the parent, last, fails after the bundle took its place.
    assert failed == needed
    place.act()
    assert place.left() == [], "the next write removes what a dead one left"


def test_the_kernel_refusing_to_write_leaves_the_old_bundle(place):
    """Not simulated: the limit on the size of files ends the write in the system call (EFBIG)."""
    before = place.look()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OutputError, match=r"cannot write '.*'\n  evidence: .*File too large"):
            place.act()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
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
def spare(fewer: BundleContents, signed: Path) -> Path:
    """A bundle of one engine, of nobody."""
    return write_bundle(fewer, signed.parent / "spare")


def swap(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, act: Callable[[], object], *, once: bool = True
) -> None:
    """Lets something happen right after a function was called, the first time or each time."""
    original = getattr(module, name)

    def then(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        if once:
            monkeypatch.setattr(module, name, original)
        act()
        return result

    monkeypatch.setattr(module, name, then)


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What ONNX Runtime was given: the file of each model as it is opened."""
    seen: list[int] = []

    def opened(path: Path, *arguments: Any) -> OnnxSession:
        seen.append(path.stat().st_ino)
        return OnnxSession(path, *arguments)

    monkeypatch.setattr(onnx_session, "OnnxSession", opened)
    return seen


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
    signed, spare, pair, sessions, monkeypatch
):
    """Every file is opened in the directory that was verified, though another has its name by then."""
    models = {path.stat().st_ino for path in signed.rglob("*.onnx")}
    swap(monkeypatch, loading, "verify_directory", lambda: move_into_place(spare, signed))
    # And back, so that what was loaded stays.
    swap(monkeypatch, loading._Opener, "first", lambda: move_into_place(spare, signed))
    with load(signed, keys=[pair.public]) as engine:
        assert engine.health().trust == pair.fingerprint
        assert sessions and set(sessions) <= models


def test_a_deployment_meanwhile_is_loaded_in_its_place(fewer, signed, pair, monkeypatch, caplog, tmp_path):
    """A writer removes the old bundle under a reader: the reader begins again, with the new one."""
    deploy = partial(write_bundle, fewer, signed, key=pair.private)
    swap(monkeypatch, loading, "verify_directory", deploy)
    with load(signed, keys=[pair.public]) as engine:
        assert engine.entry.id == fewer.engines[0].artifact.id
        assert [skipped.engine for skipped in engine.skipped] == []
    assert "the bundle was replaced while it was loaded: once more" in caplog.text
    # One that never stays is not loaded; nor is one that cannot be held open.
    swap(monkeypatch, loading, "verify_directory", deploy, once=False)
    with pytest.raises(BundleInvalid, match="replaced faster than it is loaded\n  evidence: 3 attempts"):
        load(signed)
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

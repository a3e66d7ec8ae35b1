"""Writes that are cut off at any moment, or run out of disk, leave the old bundle or the new one, whole."""

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

import pytest
from sample_run import SampleRun

from loka_onnx.bundle.format.archive import pack_bundle, unpack, verify_path
from loka_onnx.bundle.format.files import Verified
from loka_onnx.bundle.registry import TransferOptions, pull_bundle, push_bundle
from loka_onnx.bundle.signing import sign_bundle, write_key_pair
from loka_onnx.bundle.writer import BundleContents, write_bundle
from loka_onnx.errors import OutputError

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

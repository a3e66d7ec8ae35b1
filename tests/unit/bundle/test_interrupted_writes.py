"""Writes that are cut off at any moment, or run out of disk, leave the old bundle or the new one, whole."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import json
import os
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sample_run import SampleRun

from loka_onnx.bundle.contents import BundleContents
from loka_onnx.bundle.format.archive import pack_bundle, unpack, verify_path
from loka_onnx.bundle.signing import sign_bundle, write_key_pair
from loka_onnx.bundle.writer import write_bundle
from loka_onnx.errors import OutputError

KILLS = 100


@pytest.fixture(scope="module")
def fewer(sample: SampleRun) -> BundleContents:
    return dataclasses.replace(sample.contents, engines=sample.contents.engines[1:2])


# A child does the same thing over and over until it is killed. It is forked from a process that has imported
# everything, so that a round takes as long as a write, and kills fall into writes.
ROUNDS = """
import json, os, pickle, random, shutil, signal, sys, time
from pathlib import Path
from loka_onnx.bundle.format.archive import pack_bundle
from loka_onnx.bundle.signing import sign_bundle
from loka_onnx.bundle.format.archive import unpack
from loka_onnx.bundle.format.archive import verify_path
from loka_onnx.bundle.writer import write_bundle

job, place, kills, contents, old, new, key = sys.argv[1:]
place, old, new, key = Path(place), Path(old), Path(new), Path(key)
one, two = pickle.loads(Path(contents).read_bytes())
jobs = {
    "write": lambda i: write_bundle((one, two)[i], place),
    "write signed": lambda i: write_bundle((one, two)[i], place, key=key),
    "pack": lambda i: pack_bundle((old, new)[i], place),
    "unpack": lambda i: unpack((old, new)[i], place),
    "sign": lambda i: sign_bundle(place, key),
}
act = jobs[job]
act(0)
start = time.perf_counter()
for number in range(4):
    act(number % 2)
longest = (time.perf_counter() - start) / 2
whole = {verify_path(place).manifest.seal} | {verify_path(act(i) and place).manifest.seal for i in (0, 1)}
random.seed(5)
seen, staged = set(), 0
for kill in range(int(kills)):
    child = os.fork()
    if child == 0:
        try:
            number = kill
            while True:
                act(number % 2)
                number += 1
        finally:
            os._exit(3)
    # A write of a child that was just forked takes longer than one of those timed.
    time.sleep(random.uniform(0, min(3 * longest, 0.3)))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), status
    seal = verify_path(place).manifest.seal
    assert seal in whole, seal
    seen.add(seal)
    staged += any(".staged-" in path.name for path in place.parent.iterdir())
act(0)
verify_path(place)
left = [path.name for path in place.parent.iterdir() if path != place]
print(json.dumps({"states": len(whole), "seen": len(seen), "staged": staged, "left": left}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("job", ["write", "write signed", "pack", "unpack", "sign"])
def test_killed_at_any_moment_one_whole_bundle_is_there(
    sample: SampleRun, fewer: BundleContents, tmp_path: Path, job: str
) -> None:
    (tmp_path / "contents").write_bytes(pickle.dumps((sample.contents, fewer)))
    key = write_key_pair(tmp_path / "keys").private
    bundles = [write_bundle(c, tmp_path / f"source-{i}") for i, c in enumerate((sample.contents, fewer))]
    place = tmp_path / "deploy" / ("b.loka" if job == "pack" else "bundle")
    if job == "unpack":
        bundles = [pack_bundle(bundle, tmp_path / f"{i}.loka") for i, bundle in enumerate(bundles)]
    if job == "sign":
        write_bundle(sample.contents, place)
    done = subprocess.run(
        [sys.executable, "-c", ROUNDS, job, place, str(KILLS), tmp_path / "contents", *bundles, key],
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
    """A place with an old bundle, and what is done to it."""

    path: Path
    act: Callable[[], object]


@pytest.fixture(params=["write", "write signed", "pack", "unpack", "sign"])
def place(request: pytest.FixtureRequest, sample: SampleRun, fewer: BundleContents, tmp_path: Path) -> Place:
    root = tmp_path / "deploy"
    key = write_key_pair(tmp_path / "keys").private
    old, new = write_bundle(sample.contents, tmp_path / "old"), write_bundle(fewer, tmp_path / "new")
    directory, file = root / "bundle", root / "b.loka"
    if request.param == "pack":
        return Place(pack_bundle(old, file), lambda: pack_bundle(new, file))
    if request.param == "unpack":
        archive = pack_bundle(new, tmp_path / "new.loka")
        write_bundle(sample.contents, directory)
        return Place(directory, lambda: unpack(archive, directory))
    write_bundle(sample.contents, directory)
    acts = {
        "write": lambda: write_bundle(fewer, directory),
        "write signed": lambda: write_bundle(fewer, directory, key=key),
        "sign": lambda: sign_bundle(directory, key),
    }
    return Place(directory, acts[request.param])


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


def test_a_full_disk_at_any_call_leaves_a_bundle(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    before = verify_path(place.path)
    disk = FullDisk(monkeypatch)
    place.act()
    # Counted once: the same calls follow each time.
    needed, after = disk.calls, verify_path(place.path)
    assert needed >= 4
    assert after != before
    states = {before.manifest.seal, after.manifest.seal}
    failed = 0
    for number in range(needed):
        disk.left = number
        with contextlib.suppress(OutputError):
            place.act()
            failed -= 1
        failed += 1
        disk.left = -1
        assert verify_path(place.path).manifest.seal in states, number
        assert [path.name for path in place.path.parent.iterdir()] == [place.path.name], number
    # The sync of the parent, last, fails after the bundle took its place.
    assert failed == needed


def test_the_message_of_a_full_disk(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(monkeypatch)
    disk.left = 2
    with pytest.raises(
        OutputError, match=r"cannot write '.*'\n  evidence: .*No space left on device"
    ) as caught:
        place.act()
    assert caught.value.exit_code == 2


@contextlib.contextmanager
def file_limit(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 100, 300])
def test_the_kernel_refusing_to_write_leaves_the_old_bundle(place: Place, size: int) -> None:
    """Not simulated: the limit on the size of files ends the write in the system call (EFBIG)."""
    before = verify_path(place.path)
    with (
        file_limit(size),
        pytest.raises(OutputError, match=r"cannot write '.*'\n  evidence: .*File too large"),
    ):
        place.act()
    assert verify_path(place.path) == before
    assert [path.name for path in place.path.parent.iterdir()] == [place.path.name]
    place.act()
    assert verify_path(place.path) != before

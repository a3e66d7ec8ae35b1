"""A push or a pull that is killed, or that finds the disk full: the old bundle or the new one, whole."""

import contextlib
import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from altered import tree, with_files
from sample_run import SampleRun

from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.bundle.registry import TransferOptions, pull_bundle, push_bundle
from loka_onnx.bundle.registry import layout as registry_layout
from loka_onnx.bundle.writer import write_bundle
from loka_onnx.errors import OutputError

FAST = TransferOptions(threads=2)
KILLS = 100


@pytest.fixture(scope="module")
def base(sample: SampleRun, tmp_path_factory) -> Path:
    return write_bundle(sample.contents, tmp_path_factory.mktemp("base") / "bundle")


def run_killed(base: Path, tmp_path: Path, verb: str, kills: int) -> dict[str, int]:
    bundles = tmp_path / "bundles"
    bundles.mkdir()
    for seed in range(4):
        with_files(base, bundles / str(seed), (150_000, 60_001, 500), seed)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).with_name("killed_registry.py")
    command = [sys.executable, str(script), verb, str(bundles), str(tmp_path / "place"), str(kills)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_push_killed_at_random_moments(base, tmp_path):
    seen = run_killed(base, tmp_path, "push", KILLS)
    print(seen)
    # Otherwise the kills hit nothing, and the test would show nothing.
    assert seen["killed"] == KILLS
    assert seen["old"] > 0
    assert seen["new"] > 0
    assert seen["leftovers"] > 0
    assert seen["resumed parts"] > 0


@pytest.mark.slow
def test_a_pull_killed_at_random_moments(base, tmp_path):
    seen = run_killed(base, tmp_path, "pull", KILLS)
    print(seen)
    assert seen["killed"] == KILLS
    assert seen["old"] > 0
    assert seen["new"] > 0
    assert seen["leftovers"] > 0


@pytest.mark.parametrize("verb", ["push", "pull"])
def test_killed_a_few_times(base, tmp_path, verb):
    assert run_killed(base, tmp_path, verb, 8)["killed"] > 0


class FullDisk(io.FileIO):
    """A file of which so many writes pass; the next one is cut short, and has no room for the rest."""

    left = 0

    def write(self, data):
        if FullDisk.left == 0:
            super().write(bytes(data)[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        FullDisk.left -= 1
        return super().write(data)


@contextlib.contextmanager
def full_after(writes: int):
    """The disk is full after so many writes, of this process."""
    with pytest.MonkeyPatch.context() as patch:
        FullDisk.left = writes
        opened = Path.open
        patch.setattr(
            Path,
            "open",
            lambda path, mode="r", *rest, **more: (
                FullDisk(path, mode.replace("b", ""))
                if mode in {"wb", "xb"}
                else opened(path, mode, *rest, **more)
            ),
        )
        yield


@pytest.fixture
def scene(base, tmp_path, monkeypatch):
    monkeypatch.setattr(registry_layout, "PART_BYTES", 10_000)
    old = with_files(base, tmp_path / "old", (12_000,), seed=1)
    new = with_files(base, tmp_path / "new", (35_000, 100), seed=2)
    push_bundle(old, f"{tmp_path / 'registry'}#prod", FAST)
    pull_bundle(f"{tmp_path / 'registry'}#prod", tmp_path / "host" / "bundle", FAST)
    return old, new, f"{tmp_path / 'registry'}#prod", tmp_path / "host" / "bundle"


def test_a_disk_that_is_full_at_any_write_of_a_push(scene, tmp_path):
    old, new, url, _ = scene
    fulls = 0
    while True:
        # The manifest and the name are written by every push, so that it needs room for two files at least.
        try:
            with full_after(2):
                done = push_bundle(new, url, FAST)
        except OutputError as error:
            assert "No space left on device" in str(error)
            assert "has room" in str(error)
            assert tree(pull_bundle(url, tmp_path / "x", FAST).directory) == tree(old)
            assert not list((tmp_path / "registry" / "uploads").iterdir())
            fulls += 1
            assert fulls < 20
            continue
        break
    assert fulls >= 2
    # What was sent is not sent again.
    assert done.sent_parts <= 1
    assert tree(pull_bundle(url, tmp_path / "x", FAST).directory) == tree(new)


def test_a_disk_that_is_full_at_any_write_of_a_pull(scene):
    old, new, url, place = scene
    push_bundle(new, url, FAST)
    fulls = 0
    while True:
        try:
            with full_after(fulls):
                pull_bundle(url, place, FAST)
        except OutputError as error:
            assert "No space left on device" in str(error)
            assert tree(place) == tree(old)
            verify_bundle(place)
            assert [p.name for p in place.parent.iterdir()] == ["bundle"]
            fulls += 1
            assert fulls < 20
            continue
        break
    assert fulls >= 3
    assert tree(place) == tree(new)
    assert [p.name for p in place.parent.iterdir()] == ["bundle"]


LIMITED = """
import resource, signal, sys
from pathlib import Path
from loka_onnx.bundle.registry import layout as registry_layout
from loka_onnx.bundle.registry import TransferOptions, pull_bundle, push_bundle
from loka_onnx.errors import OutputError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
verb, bundle, url = sys.argv[1:]
registry_layout.PART_BYTES = 30_000 if verb == "push" else 10_000
options = TransferOptions(threads=2)
try:
    push_bundle(Path(bundle), url, options) if verb == "push" else pull_bundle(url, Path(bundle), options)
except OutputError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["push", "pull"])
def test_the_kernel_refuses_to_let_a_file_grow(scene, tmp_path, verb):
    old, new, url, place = scene
    if verb == "pull":
        push_bundle(new, url, FAST)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, verb, str(new if verb == "push" else place), url],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert "File too large" in done.stdout
    assert tree(place) == tree(old)
    expected = old if verb == "push" else new
    assert tree(pull_bundle(url, tmp_path / "x", FAST).directory) == tree(expected)

"""A registry that others can write to: every lie has its own message, and nothing is written outside."""

import errno
import io
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from altered import read, rewrite, tree, with_files
from fsspec.implementations.memory import MemoryFileSystem

from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.bundle.registry import TransferOptions, list_names, pull_bundle, push_bundle, resolve
from loka_onnx.bundle.registry.names import write_pointer
from loka_onnx.bundle.registry.store import Store
from loka_onnx.bundle.signing import sign_bundle, write_key_pair
from loka_onnx.core.digests import digest_file
from loka_onnx.core.manifest import MAX_MANIFEST_BYTES, BundleFile
from loka_onnx.errors import BundleError, BundleInvalid, LokaError, OutputError, UserError

FAST = TransferOptions(threads=4)
PART = 10_000
pytestmark = pytest.mark.usefixtures("small_parts")
LARGE = "report/extra-0.bin"


class Scene:
    """A registry with one bundle under a name, and an older bundle where the next one is pulled to."""

    def __init__(self, original: Path, root: Path) -> None:
        self.old = with_files(original, root / "old", (12_000,), seed=1)
        self.new = with_files(original, root / "new", (35_000, 100), seed=2)
        self.registry = root / "registry"
        self.place = root / "host" / "bundle"
        push_bundle(self.old, f"{self.registry}#prod", FAST)
        pull_bundle(f"{self.registry}#prod", self.place, FAST)
        self.digest = push_bundle(self.new, f"{self.registry}#prod", FAST).digest
        self.before = tree(root)

    @property
    def manifest(self) -> Path:
        return self.registry / "bundles" / self.digest / "manifest.json"

    def part(self, number: int, path: str = LARGE) -> Path:
        return self.registry / "blobs" / "sha256" / f"{read(self.new).file(path).sha256}.{number}"

    def point_at(self, digest: str, name: str = "prod") -> None:
        pointer = self.registry / "names" / "prod.json"
        document = json.loads(pointer.read_text())
        document["value"] |= {"manifest": digest, "name": name}
        pointer.write_text(json.dumps(document))

    def publish(self, manifest) -> None:
        """A manifest as somebody who can write to the registry would lay it there."""
        digest = rewrite(self.new, manifest)
        (self.registry / "bundles" / digest).mkdir()
        (self.new / "manifest.json").rename(self.registry / "bundles" / digest / "manifest.json")
        self.point_at(digest)

    def outside(self) -> set[Path]:
        return {p for p in self.place.parents[1].rglob("*") if self.registry not in {p, *p.parents}}

    def refuses(self, message: str) -> None:
        outside = self.outside()
        with pytest.raises(BundleInvalid, match=message) as caught:
            pull_bundle(f"{self.registry}#prod", self.place, FAST)
        assert str(caught.value).startswith(f"{self.registry}#prod: ")
        assert "remedy: " in str(caught.value)
        assert tree(self.place) == tree(self.old)
        verify_bundle(self.place)
        assert self.outside() == outside


@pytest.fixture
def scene(original: Path, tmp_path: Path) -> Scene:
    return Scene(original, tmp_path)


def alter(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def flipped(data: bytes) -> bytes:
    place = len(data) // 2
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


def grow(path: Path, size: int = 1 << 42) -> None:
    """Sparse, and far larger than the memory that may be used."""
    path.touch()
    os.truncate(path, size)


def swap_blobs(scene: Scene) -> None:
    one, two = (scene.part(number).read_bytes() for number in (0, 1))
    scene.part(0).write_bytes(two)
    scene.part(1).write_bytes(one)


def other_name(scene: Scene) -> None:
    push_bundle(scene.new, f"{scene.registry}#staging", FAST)
    (scene.registry / "names/staging.json").replace(scene.registry / "names/prod.json")


def other_bundle(scene: Scene) -> None:
    """It does not pass for the digest asked for."""
    known = digest_file(scene.old / "manifest.json")
    scene.manifest.write_bytes((scene.registry / "bundles" / known / "manifest.json").read_bytes())


LIES: dict[str, tuple[Callable[[Scene], object], str]] = {
    **{
        f"part {n}": (lambda s, n=n: alter(s.part(n), flipped), f"file '{LARGE}' was altered\n.*sha256 ")
        for n in (0, 1, 3)
    },
    "swapped": (swap_blobs, f"file '{LARGE}' was altered"),
    "no part": (lambda s: s.part(2).unlink(), r"'blobs/sha256/\w+\.2' is missing in the registry"),
    "short": (lambda s: os.truncate(s.part(2), 9_999), r"'blobs/sha256/\w+\.2' has 9999 bytes of 10000"),
    "long": (lambda s: grow(s.part(3)), r"'blobs/sha256/\w+\.3' in the registry is too large\n.*5,000 bytes"),
    "manifest": (lambda s: alter(s.manifest, flipped), "the registry was altered\n.*sha256 .*, asked for "),
    "no manifest": (lambda s: s.manifest.unlink(), r"manifest\.json' is missing in the registry"),
    "huge manifest": (lambda s: grow(s.manifest, MAX_MANIFEST_BYTES + 1), "too large\n.*is 16,777,216"),
    "huge signature": (
        lambda s: grow(s.manifest.parent / "signature.json"),
        r"signature\.json' in the registry is too la",
    ),
    "huge name": (
        lambda s: grow(s.registry / "names/prod.json"),
        r"'names/prod\.json' in the registry is too large",
    ),
    "other name": (other_name, "name 'prod' is of another name, .*\n  evidence: it says 'staging' and"),
    "other bundle": (other_bundle, "the manifest in the registry was altered"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_is_altered_missing_or_too_large(scene, lie):
    change, message = LIES[lie]
    change(scene)
    scene.refuses(message)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("../../escaped", "leaves or repeats a directory"),
        ("/tmp/escaped", "is absolute"),
        ("a\\b", "has a backslash"),
        ("manifest.json", "is listed twice"),
        (LARGE.upper(), "differ only in case"),
    ],
)
def test_a_manifest_with_a_path_that_leaves_the_bundle(scene, path, message):
    manifest = read(scene.new)
    file = BundleFile(path, 100, manifest.file("report/extra-1.bin").sha256)
    scene.publish(replace(manifest, files=(*manifest.files, file)))
    scene.refuses(f"the manifest lists a forbidden path: .*{message}")


def test_what_is_no_lie_about_the_bundle_but_ends_the_pull(scene):
    """A manifest that promises more than the disk holds, and a directory in the place of a part."""
    manifest = read(scene.new)
    scene.part(1).unlink()
    scene.part(1).mkdir()
    with pytest.raises(LokaError, match="cannot read 'blobs/sha256/"):
        pull_bundle(f"{scene.registry}#prod", scene.place, FAST)
    files = [replace(f, bytes=1 << 50) if f.path == LARGE else f for f in manifest.files]
    scene.publish(replace(manifest, files=tuple(files)))
    with pytest.raises(OutputError, match=r"there is no room for .*\n  evidence: 1,125,899,9"):
        pull_bundle(f"{scene.registry}#prod", scene.place, FAST)
    assert tree(scene.place) == tree(scene.old)


@pytest.mark.parametrize("digest", ["../../names/prod", "0" * 63, "A" * 64])
def test_a_pointer_that_leaves_the_registry(scene, digest):
    scene.point_at(digest)
    scene.refuses(
        f"the pointer of name 'prod' .* does not hold a digest\n  evidence: it says 'prod' and '{digest}'"
    )


TEXTS = (b"", b"{", b"\xff", b"[" * 60_000, b'{"schema": "loka-onnx/registry-name/2", "value": {}}')


@pytest.mark.parametrize("text", TEXTS)
def test_a_pointer_that_is_none(scene, text):
    (scene.registry / "names/prod.json").write_bytes(text)
    scene.refuses("the pointer of name 'prod' is not a loka-onnx/registry-name/1 document")
    (name,) = list_names(str(scene.registry), FAST)
    assert name.problem.startswith("the pointer of name 'prod' is")


def test_nothing_of_a_pointer_reaches_a_terminal_as_it_is(scene):
    scene.point_at("\x1b[2J")
    scene.refuses(r"it says 'prod' and '\\x1b\[2J'")
    scene.point_at("0" * 64, name="\x1b]0;owned\x07\n  remedy: run this")
    scene.refuses(r"it says '\\x1b\]0;owned\\x07\\n  remedy: run this'")


def test_a_pipe_in_the_place_of_a_pointer_does_not_hold_a_pull_up(scene):
    (scene.registry / "names/prod.json").unlink()
    os.mkfifo(scene.registry / "names/prod.json")

    def too_late(*_):
        raise AssertionError("it waits for the pipe")

    before = signal.signal(signal.SIGALRM, too_late)
    signal.alarm(5)
    try:
        with pytest.raises(BundleError, match=r"cannot read 'names/prod\.json'.*\n.*not a plain file"):
            resolve(f"{scene.registry}#prod", FAST)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_a_signature_of_another_bundle(scene, tmp_path):
    pair = write_key_pair(tmp_path / "keys")
    sign_bundle(scene.old, pair.private)
    signature = (scene.old / "signature.json").read_bytes()
    (scene.old / "signature.json").unlink()
    (scene.manifest.parent / "signature.json").write_bytes(signature)
    scene.refuses("the manifest was altered since it was signed")


def test_a_signed_bundle_swapped_for_an_unsigned_one_is_read_no_further(scene, tmp_path, monkeypatch):
    pair = write_key_pair(tmp_path / "keys")
    read_keys, ask = [], Store.read

    def watched(store, key, limit):
        read_keys.append(key)
        return ask(store, key, limit)

    monkeypatch.setattr(Store, "read", watched)
    with pytest.raises(BundleInvalid, match="the bundle is not signed"):
        pull_bundle(f"{scene.registry}#prod", scene.place, FAST, keys=[pair.public])
    assert [key.partition("/")[0] for key in read_keys] == ["names", "bundles", "bundles"]


class Endless(io.RawIOBase):
    """Goes on for ever, and gives more than it is asked for."""

    given = 0

    def seek(self, position, whence=0):
        return position

    def read(self, size=-1):
        Endless.given += size + 5
        return b"x" * (size + 5)


def test_a_remote_that_never_ends_is_cut_off(scene, tmp_path, monkeypatch):
    push_bundle(scene.new, "memory://endless#prod", FAST)
    ask, Endless.given = MemoryFileSystem.open, 0

    def endless(fs, path, *more, **named):
        return Endless() if "blobs" in path else ask(fs, path, *more, **named)

    monkeypatch.setattr(MemoryFileSystem, "open", endless)
    with pytest.raises(BundleInvalid, match="in the registry is too large"):
        pull_bundle("memory://endless#prod", tmp_path / "x", FAST)
    assert Endless.given <= 2 * FAST.threads * (PART + 6)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (PermissionError("403 Forbidden"), UserError, "log in, or ask for the right to read it"),
        (RuntimeError("what is this"), BundleError, "RuntimeError: what is this"),
        (TimeoutError("slow"), BundleError, "TimeoutError: slow\n  remedy: try again"),
        (ConnectionError("\x1b[2J\n  remedy: run"), BundleError, r"ConnectionError: \\x1b\[2J remedy: run\n"),
    ],
)
def test_failures_of_a_remote_are_named(monkeypatch, error, kind, message):
    monkeypatch.setattr(MemoryFileSystem, "open", Mock(side_effect=error))
    with pytest.raises(kind, match=message) as caught:
        resolve("memory://here#prod", FAST)
    assert "cannot read 'names/prod.json' from the registry" in str(caught.value)
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", Mock(side_effect=OSError(errno.EACCES, "read-only")))
    with pytest.raises(OutputError, match=r"cannot write 'names/prod\.json' to the registry"):
        write_pointer(Store("memory://here", FAST), "prod", "0" * 64)

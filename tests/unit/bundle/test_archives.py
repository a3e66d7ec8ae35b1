"""The single-file form: what it holds, that it is determined, and that it comes back as it was."""

import dataclasses
import errno
import os
import shutil
import time
import zipfile
from pathlib import Path

import pytest
from altered import edit, tree, with_files
from cut_models import cut_contents

from loka_onnx.bundle import writer
from loka_onnx.bundle.format import archive as bundle_archive
from loka_onnx.bundle.format import files as bundle_files
from loka_onnx.bundle.format.archive import as_directory, pack_bundle, unpack, verify_path
from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.bundle.inspection import inspect_bundle
from loka_onnx.bundle.signing import sign_bundle, write_key_pair
from loka_onnx.bundle.writer import write_bundle
from loka_onnx.core.manifest import MAX_FILES
from loka_onnx.errors import BundleError, BundleInvalid, OutputError
from loka_onnx.graph import storage


@pytest.fixture
def bundle(original: Path) -> Path:
    return original


def test_a_bundle_comes_back_as_it_was(bundle, tmp_path):
    archive = pack_bundle(bundle, tmp_path / "b.loka")
    assert verify_path(archive).manifest == verify_bundle(bundle)
    assert inspect_bundle(archive) == inspect_bundle(bundle)
    place = unpack(archive, tmp_path / "back")
    assert tree(place) == tree(bundle)
    assert verify_bundle(place)
    with as_directory(archive) as directory:
        assert tree(directory) == tree(bundle)
    assert not directory.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b.loka", "back"]


def test_equal_bundles_give_equal_archives(sample, bundle, tmp_path, monkeypatch):
    one = pack_bundle(bundle, tmp_path / "one.loka").read_bytes()
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    for path in copy.rglob("*"):
        os.utime(path, (1e9, 1e9))
        path.chmod(0o700)
    monkeypatch.setattr(time, "time", lambda: 2e9)
    assert pack_bundle(copy, tmp_path / "two.loka").read_bytes() == one


def test_sizes_and_places_that_need_64_bits(bundle, tmp_path, monkeypatch):
    large = with_files(bundle, tmp_path / "large", (60_000,), seed=1)
    plain = pack_bundle(large, tmp_path / "plain.loka")
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 50_000)
    archive = pack_bundle(large, tmp_path / "large.loka")
    with zipfile.ZipFile(archive) as read:
        assert {entry.extract_version for entry in read.infolist()} == {20, 45}
    assert tree(unpack(archive, tmp_path / "back")) == tree(large)
    # One form: where a number needs no 64 bits, it has none.
    with pytest.raises(BundleInvalid, match="is not in its place"):
        verify_path(plain)


def test_a_file_with_two_names_is_in_the_archive_once(sample, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "TABLE_LIMIT_BYTES", 0)
    linked = write_bundle(cut_contents(sample, tmp_path / "run", is_external=True), tmp_path / "linked")
    archive = pack_bundle(linked, tmp_path / "b.loka")
    with zipfile.ZipFile(archive) as read:
        assert [n for n in read.namelist() if n.endswith("tables.bin")] == ["fallback/tables.bin"]
    place = unpack(archive, tmp_path / "back")
    assert tree(place) == tree(linked)
    assert (place / "lookup/tables.bin").samefile(place / "fallback/tables.bin")
    # A copy without links gives the same archive.
    plain = Path(shutil.copytree(linked, tmp_path / "plain"))
    assert not (plain / "lookup/tables.bin").samefile(plain / "fallback/tables.bin")
    assert pack_bundle(plain, tmp_path / "p.loka").read_bytes() == archive.read_bytes()


def test_a_file_that_takes_few_links_is_copied_once_for_as_many(bundle, tmp_path, monkeypatch):
    """The archive of a bundle with ten more names of one file, and a file system that takes four of each."""
    path = Path(shutil.copytree(bundle, tmp_path / "many"))
    entry = dataclasses.asdict(verify_bundle(bundle).file("sample.npz"))
    for number in range(10):
        name = f"z{number}/again.npz"
        (path / name).parent.mkdir()
        (path / name).hardlink_to(path / "sample.npz")
        edit(path, lambda v, name=name: v["files"].append({**entry, "path": name}))
    archive = pack_bundle(path, tmp_path / "many.loka")
    link, needed, check = Path.hardlink_to, [], bundle_archive.check_room

    def few(self: Path, target: Path) -> None:
        if Path(target).stat().st_nlink >= 4:
            raise OSError(errno.EMLINK, "Too many links")
        link(self, target)

    monkeypatch.setattr(Path, "hardlink_to", few)
    monkeypatch.setattr(
        bundle_archive, "check_room", lambda place, size: needed.append(size) or check(place, size)
    )
    place = unpack(archive, tmp_path / "back")
    copies = {path.stat().st_ino for path in [place / "sample.npz", *place.glob("z*/again.npz")]}
    assert len(copies) == 3  # 11 names, 4 each
    assert needed[1:] == [7 * entry["bytes"], 3 * entry["bytes"]]  # before each copy, for all that are left
    assert verify_bundle(place)
    # Without room nothing is written.
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(bundle_archive.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(OutputError, match=r"there is no room for .*\n  evidence: [\d,]+ bytes, 1,000"):
        unpack(archive, tmp_path / "never")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(OutputError, match="there is no room"), as_directory(archive):
        pass
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "many", "many.loka"]


def test_a_manifest_lists_so_many_files_and_no_more(bundle, tmp_path, sample, monkeypatch):
    archive = pack_bundle(bundle, tmp_path / "b.loka")
    count = len(verify_path(archive).manifest.files)
    monkeypatch.setattr(bundle_files, "MAX_FILES", count)
    verify_path(archive)
    monkeypatch.setattr(bundle_files, "MAX_FILES", count - 1)
    for call in (verify_path, lambda path: unpack(path, tmp_path / "back")):
        with pytest.raises(BundleInvalid, match=f"lists too many files\n  evidence: {count}, the limit"):
            call(archive)
    monkeypatch.setattr(writer, "MAX_FILES", 3)
    with pytest.raises(BundleError, match="the bundle has too many files"):
        write_bundle(sample.contents, tmp_path / "written")
    assert MAX_FILES == 20_000


def test_a_signature_goes_along(bundle, tmp_path):
    pair = write_key_pair(tmp_path / "keys")
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    sign_bundle(copy, pair.private)
    archive = pack_bundle(copy, tmp_path / "b.loka")
    for place in (archive, unpack(archive, tmp_path / "back")):
        assert verify_path(place, [pair.public]).signer == pair.fingerprint
    with pytest.raises(BundleInvalid, match="the bundle is not signed"):
        verify_path(pack_bundle(bundle, tmp_path / "u.loka"), [pair.public])


def test_an_old_bundle_is_replaced_and_anything_else_is_not(bundle, tmp_path):
    archive = pack_bundle(bundle, tmp_path / "b.loka")
    assert pack_bundle(bundle, archive) == archive
    place = unpack(archive, tmp_path / "back")
    assert unpack(archive, place) == place
    (tmp_path / "home").mkdir()
    (tmp_path / "home/thesis.txt").write_text("years of work")
    for call in (lambda: unpack(archive, tmp_path / "home"), lambda: pack_bundle(bundle, tmp_path / "home")):
        with pytest.raises(OutputError, match="is in the way"):
            call()
    is_left_alone(bundle, tmp_path / "home/thesis.txt")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b.loka", "back", "home"]


@pytest.mark.parametrize(
    "manifest",
    [
        *(b"{}", b"", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"name": "a web app", "icons": []}'),
        *(b'{"schema": "another/thing/1", "value": {}}', b'{"schema": ["loka-onnx/bundle-format/1"]}'),
        *(b'{"schema": "loka-onnx/bundle-formats/1"}', b'{"schema": "loka-onnx/run/1"}'),
    ],
)
def test_a_manifest_of_something_else_is_no_bundle(sample, bundle, tmp_path, manifest):
    """Web apps and browser extensions have a `manifest.json` too."""
    archive = pack_bundle(bundle, tmp_path / "b.loka")
    app, file = tmp_path / "app", tmp_path / "app.zip"
    (app / "src").mkdir(parents=True)
    (app / "manifest.json").write_bytes(manifest)
    (app / "src/main.js").write_text("years of work")
    with zipfile.ZipFile(file, "w") as write:
        write.writestr("manifest.json", manifest)
    before = tree(tmp_path)
    for call in (lambda: unpack(archive, app), lambda: write_bundle(sample.contents, app)):
        with pytest.raises(OutputError, match="is in the way\n  evidence: it exists and is not a bundle"):
            call()
    is_left_alone(bundle, file)
    assert tree(tmp_path) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["app", "app.zip", "b.loka"]


def is_left_alone(bundle: Path, file: Path) -> None:
    kept = file.read_bytes()
    with pytest.raises(OutputError, match="it exists and is not a single-file bundle"):
        pack_bundle(bundle, file)
    assert file.read_bytes() == kept


def test_a_document_in_a_zip_archive_is_not_replaced(bundle, tmp_path):
    file = tmp_path / "thesis.docx"
    with zipfile.ZipFile(file, "w") as write:
        write.writestr("[Content_Types].xml", "<Types/>")
        write.write(bundle / "manifest.json", "manifest.json")
    kept = file.read_bytes()
    for data in (kept, kept[:20], b"PK\x03\x04"):
        file.write_bytes(data)
        is_left_alone(bundle, file)


def test_bundles_that_do_not_verify_are_replaced_nevertheless(sample, bundle, tmp_path):
    """One of a later version, and one that was damaged: their manifests say what they are."""
    place = Path(shutil.copytree(bundle, tmp_path / "place"))
    text = (place / "manifest.json").read_text()
    (place / "manifest.json").write_text(text.replace("bundle-format/1", "bundle-format/2"))
    (place / "plans.json").unlink()
    assert verify_bundle(write_bundle(sample.contents, place))
    archive = pack_bundle(place, tmp_path / "b.loka")
    archive.write_bytes(archive.read_bytes()[:-100])
    assert verify_path(pack_bundle(bundle, archive))

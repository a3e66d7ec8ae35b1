"""Archives that somebody made or changed: each is refused with its own message, and nothing is written."""

from __future__ import annotations

import hashlib
import io
import json
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from sample_run import SampleRun

from loka_onnx.bundle.format.archive import pack_bundle, unpack, unpacked, verify_path
from loka_onnx.bundle.signing import write_key_pair
from loka_onnx.bundle.writer import write_bundle
from loka_onnx.core.digests import digest_bytes, seal
from loka_onnx.core.manifest import MAX_MANIFEST_BYTES
from loka_onnx.errors import BundleInvalid

FLIPS = 200
MODEL = "engines/cpu-onnxruntime-cpu-fp8-safe/engine.onnx"
Member = tuple[str, bytes]


@pytest.fixture(scope="module")
def original(sample: SampleRun, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    root = tmp_path_factory.mktemp("original")
    key = write_key_pair(root / "keys").private
    return pack_bundle(write_bundle(sample.contents, root / "bundle", key=key), root / "b.loka").read_bytes()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Where an attack is put; nothing but it may be there, and around it, afterwards."""
    inner = tmp_path / "around" / "inner"
    inner.mkdir(parents=True)
    yield inner / "b.loka"
    assert {p.name for p in inner.iterdir()} <= {"b.loka"}
    assert [p.name for p in (tmp_path / "around").iterdir()] == ["inner"]


def refused(place: Path, data: bytes, message: str) -> str:
    place.write_bytes(data)
    said = []
    for attempt in (
        lambda: verify_path(place),
        lambda: unpack(place, place.parent / "out"),
        lambda: unpacked(place, place.parent).__enter__(),
    ):
        with pytest.raises(BundleInvalid, match=message) as caught:
            attempt()
        said.append(str(caught.value))
        assert str(place) in said[-1]
        assert caught.value.exit_code == 3
        assert "remedy:" in said[-1]
        assert [p.name for p in place.parent.iterdir()] == ["b.loka"]
    return said[0].partition("\n")[0]


def members(data: bytes) -> list[Member]:
    with zipfile.ZipFile(io.BytesIO(data)) as read:
        return [(info.filename, read.read(info)) for info in read.infolist()]


def packed(content: list[Member]) -> bytes:
    """An archive in the form of ours, of whatever it is told."""
    return zipped(content, lambda info: setattr(info, "create_system", 3))


def zipped(content: list[Member], change: Callable[[zipfile.ZipInfo], object] = lambda info: None) -> bytes:
    """An archive as Python's zipfile writes it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as write, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for path, data in content:
            info = zipfile.ZipInfo(path)
            info.external_attr = 0o100644 << 16
            change(info)
            write.writestr(info, data)
    return out.getvalue()


def with_manifest(content: list[Member], change: Callable[[dict], object]) -> list[Member]:  # type: ignore[type-arg]
    """The same with another manifest, sealed as somebody could who may write the whole archive."""
    document = json.loads(content[0][1])
    change(document["value"])
    text = seal(json.dumps(document, indent=1)).encode()
    return [("manifest.json", text), *(m for m in content[1:] if m[0] != "signature.json")]


def central(data: bytes, path: str) -> int:
    """Where the central header of an entry begins."""
    place = data.index(b"PK\x01\x02")
    while not data[place + 46 :].startswith(path.encode()):
        place = data.index(b"PK\x01\x02", place + 4)
    return place


def test_the_helpers_make_what_is_accepted(original: bytes, place: Path) -> None:
    assert packed(members(original)) == original
    place.write_bytes(original)
    assert verify_path(place).claimed


def test_single_flipped_bytes_are_noticed(original: bytes, place: Path) -> None:
    rng = np.random.default_rng(17)
    start = struct.unpack_from("<I", original, len(original) - 6)[0]
    # Most bytes are content: a part of the places is drawn from headers, which are few.
    headers = [*range(start, len(original))]
    with zipfile.ZipFile(io.BytesIO(original)) as read:
        for info in read.infolist():
            headers += range(info.header_offset, info.header_offset + 30 + len(info.filename))
    places = [*rng.integers(len(original), size=FLIPS), *rng.choice(headers, size=FLIPS, replace=False)]
    for number in places:
        altered = bytearray(original)
        altered[number] ^= int(rng.integers(1, 256))
        place.write_bytes(altered)
        with pytest.raises(BundleInvalid):
            verify_path(place)
        with pytest.raises(BundleInvalid):
            unpack(place, place.parent / "out")
        assert [p.name for p in place.parent.iterdir()] == ["b.loka"]


def test_pieces_put_elsewhere_are_noticed(original: bytes, place: Path) -> None:
    """Parts copied over others, taken out or put in: nothing but a refusal comes of it."""
    rng = np.random.default_rng(19)
    for _ in range(FLIPS):
        start, end, at = (int(n) for n in rng.integers(len(original), size=3))
        piece = original[min(start, end) : min(start, end) + int(rng.integers(1, 300))]
        kept = len(piece) if rng.integers(2) else int(rng.integers(300))
        altered = original[:at] + piece + original[at + kept :]
        if altered == original:
            continue
        place.write_bytes(altered)
        with pytest.raises(BundleInvalid):
            verify_path(place)


def test_every_cut_is_noticed(original: bytes, place: Path) -> None:
    rng = np.random.default_rng(18)
    for size in (0, 1, 4, 29, len(original) - 1, *rng.integers(len(original), size=60)):
        place.write_bytes(original[: int(size)])
        with pytest.raises(BundleInvalid):
            verify_path(place)
    refused(place, original[:-1], "the archive is cut short, or its end is damaged\n  evidence: File is not")


def test_what_is_no_archive(place: Path) -> None:
    refused(place, b"", "this is not a single-file bundle\n  evidence: File is not a zip file")
    refused(place, zipped([("a.txt", b"x")]), "not a single-file bundle\n  evidence: it begins with 'a.txt'")
    refused(place, b"\x80\x04cos\nsystem\n", "this is not a single-file bundle")


def test_every_file_is_missed_and_may_not_have_another_name(original: bytes, place: Path) -> None:
    content = members(original)
    for path, data in content[2:]:
        rest = [m for m in content if m[0] != path]
        refused(place, packed(rest), rf"file '{path}' is missing")
        renamed = [(f"{p}.old" if p == path else p, d) for p, d in content]
        refused(place, packed(renamed), rf"file '{path}\.old' is not listed in the manifest")
        other = [(p, bytes(len(d)) if p == path else d) for p, d in content]
        refused(place, packed(other), rf"file '{path}' was altered\n  evidence: sha256 ")
        longer = [(p, d + b"\0" * (p == path)) for p, d in content]
        refused(place, packed(longer), rf"file '{path}' has another size\n  evidence: {len(data) + 1} bytes")
    refused(place, packed(content[1:]), "this is not a single-file bundle")
    refused(place, packed([*content[:2], *reversed(content[2:])]), "is missing, or out of order")


@pytest.mark.parametrize(
    "path",
    [
        *("extra.txt", "plans.json", "manifest.json", "/etc/cron.d/evil", "../../evil", "engines/../../evil"),
        *("C:/evil", "a\\b", "a b", "größe", "new\nline", "engines/", ".hidden", "NUL"),
    ],
)
def test_an_added_entry_is_noticed_wherever_it_stands(original: bytes, place: Path, path: str) -> None:
    message = "not listed in the manifest|in the archive twice|out of order"
    content = members(original)
    last = zipped([*content, (path, b"evil")])
    refused(place, last, message)
    refused(place, zipped([*content[:3], (path, b"evil"), *content[3:]]), message)
    # Named in the directory alone, as tools that list archives read it.
    start, end = struct.unpack_from("<I", original, len(original) - 6)[0], len(original) - 22
    header = last[central(last[len(original) :], path) + len(original) : -22]
    forged = bytearray(original[:end] + header + original[end:])
    count, size = len(content) + 1, end - start + len(header)
    struct.pack_into("<HHI", forged, len(forged) - 14, count, count, size)
    refused(place, bytes(forged), message)


def test_a_link_is_refused(original: bytes, place: Path) -> None:
    altered = bytearray(original)
    for mode in (0o120777, 0o010644):
        struct.pack_into("<I", altered, central(altered, "plans.json") + 38, mode << 16)
        refused(place, bytes(altered), "the archive is not as it was packed")


def test_an_encrypted_entry_is_refused(original: bytes, place: Path) -> None:
    altered = bytearray(original)
    struct.pack_into("<H", altered, central(original, "plans.json") + 8, 1)
    refused(place, bytes(altered), r"file 'plans\.json' was altered\n  evidence: File .* is encrypted")
    only_local = bytearray(original)
    struct.pack_into("<H", only_local, original.index(b"PK\x03\x04", 40) + 6, 1)
    refused(place, bytes(only_local), "the archive is not as it was packed")


def test_a_zip_bomb_is_refused_unread(original: bytes, place: Path) -> None:
    """256 MiB of zeros, deflated to 256 KiB, with a manifest that lists them."""
    zeros, size = digest_of_zeros(1 << 28)
    bomb = zlib.compressobj(9, zlib.DEFLATED, -15)
    data = b"".join(bomb.compress(bytes(1 << 20)) for _ in range(1 << 8)) + bomb.flush()
    assert len(data) < 1 << 19
    content = members(original)
    entry = {"path": "a/zeros.bin", "bytes": size, "sha256": zeros}
    content = with_manifest(content, lambda v: v["files"].append(entry))
    bombed = bytearray(packed([content[0], ("a/zeros.bin", data), *content[1:]]))
    header = central(bytes(bombed), "a/zeros.bin")
    struct.pack_into("<H", bombed, header + 10, zipfile.ZIP_DEFLATED)
    struct.pack_into("<I", bombed, header + 24, size)
    refused(place, bytes(bombed), r"entry 'a/zeros.bin' is compressed\n  evidence: method 8")
    struct.pack_into("<H", bombed, header + 10, zipfile.ZIP_STORED)
    refused(place, bytes(bombed), r"entry 'a/zeros.bin' is compressed\n  evidence: method 0")
    # Stored, it is as large as it says, or the archive is not all there.
    struct.pack_into("<I", bombed, header + 20, size)
    refused(place, bytes(bombed), "the archive is cut short")


def digest_of_zeros(size: int) -> tuple[str, int]:
    state, chunk = hashlib.sha256(), bytes(1 << 20)
    for _ in range(size >> 20):
        state.update(chunk)
    return state.hexdigest(), size


def test_entries_that_overlap_are_refused(original: bytes, place: Path) -> None:
    """The bomb of David Fifield: many names for one content. Nobody follows the offsets."""
    content = members(original)
    target = struct.unpack_from("<I", original, central(original, content[2][0]) + 42)[0]
    altered = bytearray(original)
    struct.pack_into("<I", altered, central(original, content[3][0]) + 42, target)
    refused(place, bytes(altered), rf"file '{content[3][0]}' was altered\n  evidence: ")


def test_a_huge_manifest_is_not_read(original: bytes, place: Path) -> None:
    size = MAX_MANIFEST_BYTES + 1
    message = f"the manifest is too large\n  evidence: {size} bytes, the limit"
    refused(place, packed([("manifest.json", bytes(size))]), message)
    content = members(original)
    refused(
        place, packed([content[0], ("signature.json", bytes(70_000)), *content[2:]]), "signature is too large"
    )


def test_something_after_or_between_is_refused(original: bytes, place: Path) -> None:
    refused(place, original + b"x", r"the archive goes on after its end\n  evidence: 1 bytes")
    refused(place, original + original, "this is not a single-file bundle")
    refused(place, b"#!/bin/sh\n" + original, "this is not a single-file bundle")
    commented = bytearray(original + b"hi")
    struct.pack_into("<H", commented, len(original) - 2, 2)
    refused(place, bytes(commented), "the archive is not as it was packed")
    start = struct.unpack_from("<I", original, len(original) - 6)[0]
    gap = original[:start] + b"hidden" + original[start:]
    refused(place, gap, "this is not a single-file bundle")


def test_archives_of_other_tools_are_refused(original: bytes, place: Path) -> None:
    """The same files in the same order, with dates: an archive has one form, so that equal ones are equal."""
    refused(
        place,
        zipped(members(original), lambda i: setattr(i, "date_time", (2024, 1, 1, 0, 0, 0))),
        "not as it was packed",
    )
    refused(
        place,
        zipped(members(original), lambda i: setattr(i, "compress_type", zipfile.ZIP_DEFLATED)),
        "entry 'manifest.json' is compressed",
    )


def test_a_duplicate_may_not_be_in_an_archive_again(original: bytes, place: Path) -> None:
    content = members(original)
    model = next(m for m in content if m[0] == MODEL)
    entry = {"path": "z.onnx", "bytes": len(model[1]), "sha256": digest_bytes(model[1])}
    twice = with_manifest(content, lambda v: v["files"].append(entry))
    place.write_bytes(packed(twice))
    assert verify_path(place).manifest.file("z.onnx")
    refused(place, packed([*twice, ("z.onnx", model[1])]), "is there under another name")
    lying = {**entry, "bytes": entry["bytes"] + 1}
    refused(
        place, packed(with_manifest(content, lambda v: v["files"].append(lying))), "one digest and two sizes"
    )


def test_numbers_of_64_bits_cannot_hide_a_size(original: bytes, place: Path) -> None:
    """A ZIP64 field in a header that needs none: tools differ in which of the two sizes they believe."""
    size = struct.unpack_from("<I", original, 22)[0]
    header = bytearray(original[: 30 + len("manifest.json")])
    struct.pack_into("<I", header, 22, 0xFFFFFFFF)
    struct.pack_into("<H", header, 28, 20)
    extra = struct.pack("<HHQQ", 1, 16, size, size)
    refused(place, bytes(header) + extra + original[len(header) :], "this is not a single-file bundle")
    # The same with the place of the directory moved, so that it begins where the archive does.
    attack = bytearray(bytes(header) + extra + original[len(header) :])
    moved = struct.unpack_from("<I", original, len(original) - 6)[0] + len(extra)
    struct.pack_into("<I", attack, len(attack) - 6, moved)
    refused(place, bytes(attack), "altered|not as it was packed")

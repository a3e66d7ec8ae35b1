"""Archives that somebody made or changed: each is refused with its own message, and nothing is written."""

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

from loka_onnx.bundle.format.archive import as_directory, pack_bundle, unpack, verify_path
from loka_onnx.bundle.signing import write_key_pair
from loka_onnx.bundle.writer import write_bundle
from loka_onnx.core.digests import digest_bytes, seal
from loka_onnx.core.manifest import MAX_MANIFEST_BYTES
from loka_onnx.errors import BundleInvalid

FLIPS = 200
MODEL = "engines/cpu-onnxruntime-cpu-fp8-safe/engine.onnx"
ALTERED, NOT_PACKED = "was altered, or is not in its place", "the archive is not as it was packed"
NO_BUNDLE, SHORT = "this is not a single-file bundle", "the archive is cut short"
Member = tuple[str, bytes]


@pytest.fixture(scope="module")
def original(sample: SampleRun, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    root = tmp_path_factory.mktemp("original")
    key = write_key_pair(root / "keys").private
    return pack_bundle(write_bundle(sample.contents, root / "bundle", key=key), root / "b.loka").read_bytes()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where an attack is put; nothing but it may be there, and around it, afterwards."""
    inner = tmp_path / "around" / "inner"
    inner.mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(inner))
    yield inner / "b.loka"
    assert {p.name for p in inner.iterdir()} <= {"b.loka"}
    assert [p.name for p in (tmp_path / "around").iterdir()] == ["inner"]


def refused(place: Path, data: bytes, message: str) -> None:
    place.write_bytes(data)
    attempts = (
        lambda: verify_path(place),
        lambda: unpack(place, place.parent / "out"),
        lambda: as_directory(place).__enter__(),
    )
    for attempt in attempts if message else attempts[:1]:
        with pytest.raises(BundleInvalid, match=message or None) as caught:
            attempt()
        assert str(place) in str(caught.value)
        assert "remedy:" in str(caught.value)
        assert [p.name for p in place.parent.iterdir()] == ["b.loka"]


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


def with_file(content: list[Member], path: str, size: int, sha256: str) -> list[Member]:
    """The same with one more file in the manifest, sealed as somebody could who may write the archive."""
    document = json.loads(content[0][1])
    document["value"]["files"].append({"path": path, "bytes": size, "sha256": sha256})
    text = seal(json.dumps(document, indent=1)).encode()
    return [("manifest.json", text), *(m for m in content[1:] if m[0] != "signature.json")]


def central(data: bytes, path: str) -> int:
    """Where the central header of an entry begins."""
    place = data.index(b"PK\x01\x02")
    while not data[place + 46 :].startswith(path.encode()):
        place = data.index(b"PK\x01\x02", place + 4)
    return place


def overwritten(data: bytes, place: int, kind: str, *values: int) -> bytes:
    """The archive with other numbers at a place, negative ones from its end."""
    altered = bytearray(data)
    struct.pack_into(kind, altered, place % len(data), *values)
    return bytes(altered)


def directory_of(data: bytes) -> int:
    return int(struct.unpack_from("<I", data, len(data) - 6)[0])


def test_single_flipped_bytes_are_noticed(original: bytes, place: Path) -> None:
    rng = np.random.default_rng(17)
    # Most bytes are content: a part of the places is drawn from headers, which are few.
    headers = [*range(directory_of(original), len(original))]
    with zipfile.ZipFile(io.BytesIO(original)) as read:
        for info in read.infolist():
            headers += range(info.header_offset, info.header_offset + 30 + len(info.filename))
    for number in [*rng.integers(len(original), size=FLIPS), *rng.choice(headers, FLIPS, replace=False)]:
        altered = bytearray(original)
        altered[number] ^= int(rng.integers(1, 256))
        refused(place, bytes(altered), "")


def test_pieces_put_elsewhere_and_cuts_are_noticed(original: bytes, place: Path) -> None:
    """Parts copied over others, taken out or put in, and ends cut off: nothing but a refusal comes of it."""
    rng = np.random.default_rng(19)
    for _ in range(FLIPS):
        start, end, at = (int(n) for n in rng.integers(len(original), size=3))
        piece = original[min(start, end) : min(start, end) + int(rng.integers(1, 300))]
        kept = len(piece) if rng.integers(2) else int(rng.integers(300))
        altered = original[:at] + piece + original[at + kept :]
        if altered != original:
            refused(place, altered, "")
    for size in (1, 4, 29, len(original) - 1, *rng.integers(1, len(original), size=60)):
        refused(place, original[: int(size)], "")


def test_every_file_is_missed_and_may_not_have_another_name(original: bytes, place: Path) -> None:
    content = members(original)
    for path, data in content[2:]:
        for changed, message in (
            ([m for m in content if m[0] != path], ALTERED if data else NOT_PACKED),
            ([(f"{p}.old" if p == path else p, d) for p, d in content], f"{ALTERED}|{NOT_PACKED}"),
            ([(p, bytes(len(d)) if p == path else d) for p, d in content], f"file '{path}' {ALTERED}"),
            ([(p, d + b"\0" * (p == path)) for p, d in content], f"{ALTERED}|{NOT_PACKED}"),
        ):
            refused(place, packed(changed), f"{message}|{SHORT}")


@pytest.mark.parametrize(
    "path",
    [
        *("extra.txt", "plans.json", "manifest.json", "/etc/cron.d/evil", "../../evil", "engines/../../evil"),
        *("C:/evil", "a\\b", "a b", "größe", "new\nline", "engines/", ".hidden", "NUL"),
    ],
)
def test_an_added_entry_is_noticed_wherever_it_stands(original: bytes, place: Path, path: str) -> None:
    content = members(original)
    last = zipped([*content, (path, b"evil")])
    refused(place, last, NOT_PACKED)
    refused(place, zipped([*content[:3], (path, b"evil"), *content[3:]]), ALTERED)
    # Named in the directory alone, as tools that list archives read it.
    start, end = directory_of(original), len(original) - 22
    header = last[central(last[len(original) :], path) + len(original) : -22]
    forged = original[:end] + header + original[end:]
    count, size = len(content) + 1, end - start + len(header)
    refused(place, overwritten(forged, -14, "<HHI", count, count, size), NOT_PACKED)


def of_plans(data: bytes, offset: int, kind: str, value: int) -> bytes:
    """Another number in the central header of the plans."""
    return overwritten(data, central(data, "plans.json") + offset, kind, value)


def overlapping(data: bytes) -> bytes:
    """The bomb of David Fifield: many names for one content. Nobody follows the offsets."""
    one, two = (central(data, members(data)[place][0]) + 42 for place in (2, 3))
    return overwritten(data, two, "<I", struct.unpack_from("<I", data, one)[0])


HUGE = f"the manifest is too large\n  evidence: {MAX_MANIFEST_BYTES + 1} bytes, the limit"
COMPRESSED = "the manifest cannot be read as UTF-8|the manifest is not valid JSON"
ATTACKS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "nothing": (lambda o: b"", NO_BUNDLE),
    "another archive": (lambda o: zipped([("a.txt", b"x")]), NO_BUNDLE),
    "a pickle": (lambda o: b"\x80\x04cos\nsystem\n", NO_BUNDLE),
    "no manifest": (lambda o: packed(members(o)[1:]), NO_BUNDLE),
    "another order": (lambda o: packed([*members(o)[:2], *reversed(members(o)[2:])]), ALTERED),
    "a link": (lambda o: of_plans(o, 38, "<I", 0o120777 << 16), NOT_PACKED),
    "a pipe": (lambda o: of_plans(o, 38, "<I", 0o010644 << 16), NOT_PACKED),
    "encrypted": (lambda o: of_plans(o, 8, "<H", 1), NOT_PACKED),
    "encrypted locally": (lambda o: overwritten(o, o.index(b"PK\x03\x04", 40) + 6, "<H", 1), NOT_PACKED),
    "overlapping": (overlapping, NOT_PACKED),
    "a huge manifest": (lambda o: packed([("manifest.json", bytes(MAX_MANIFEST_BYTES + 1))]), HUGE),
    "a huge signature": (
        lambda o: packed([members(o)[0], ("signature.json", bytes(70_000)), *members(o)[2:]]),
        "signature is too large",
    ),
    "a byte behind": (lambda o: o + b"x", r"the archive goes on after its end\n  evidence: 1 bytes"),
    "twice": (lambda o: o + o, "the archive goes on after its end"),
    "a program before": (lambda o: b"#!/bin/sh\n" + o, NO_BUNDLE),
    "a comment": (lambda o: overwritten(o + b"hi", -4, "<H", 2), NOT_PACKED),
    "a gap": (lambda o: o[: directory_of(o)] + b"hidden" + o[directory_of(o) :], NOT_PACKED),
    "one byte less": (lambda o: o[:-1], rf"{SHORT}\n  evidence: 1 bytes"),
    # An archive has one form, so that equal ones are equal.
    "dates": (lambda o: zipped(members(o), lambda i: setattr(i, "date_time", (2024, *[1] * 5))), NOT_PACKED),
    "compressed": (lambda o: zipped(members(o), lambda i: setattr(i, "compress_type", 8)), COMPRESSED),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused_with_its_reason(original: bytes, place: Path, name: str) -> None:
    make, message = ATTACKS[name]
    refused(place, make(original), message)
    # The helpers make what is accepted.
    assert packed(members(original)) == original
    place.write_bytes(original)
    assert verify_path(place).claimed


@pytest.mark.slow
def test_a_zip_bomb_is_refused_unread(original: bytes, place: Path) -> None:
    """256 MiB of zeros, deflated to 256 KiB, with a manifest that lists them: no header says what is read."""
    size, state, bomb = 1 << 28, hashlib.sha256(), zlib.compressobj(9, zlib.DEFLATED, -15)
    data = b""
    for _ in range(size >> 20):
        state.update(bytes(1 << 20))
        data += bomb.compress(bytes(1 << 20))
    content = with_file(members(original), "a/zeros.bin", size, state.hexdigest())
    bombed = packed([content[0], ("a/zeros.bin", data + bomb.flush()), *content[1:]])
    assert len(bombed) < 1 << 20
    refused(place, bombed, SHORT)


def test_a_duplicate_may_not_be_in_an_archive_again(original: bytes, place: Path) -> None:
    content = members(original)
    model = next(m for m in content if m[0] == MODEL)[1]
    twice = with_file(content, "z.onnx", len(model), digest_bytes(model))
    place.write_bytes(packed(twice))
    assert verify_path(place).manifest.file("z.onnx")
    refused(place, packed([*twice, ("z.onnx", model)]), NOT_PACKED)
    lying = with_file(content, "z.onnx", len(model) + 1, digest_bytes(model))
    refused(place, packed(lying), "one digest and two sizes")


def test_numbers_of_64_bits_cannot_hide_a_size(original: bytes, place: Path) -> None:
    """A ZIP64 field in a header that needs none: tools differ in which of the two sizes they believe."""
    size = struct.unpack_from("<I", original, 22)[0]
    header = overwritten(original[: 30 + len("manifest.json")], 22, "<I", 0xFFFFFFFF)
    extra = struct.pack("<HHQQ", 1, 16, size, size)
    attack = overwritten(header, 28, "<H", 20) + extra + original[len(header) :]
    refused(place, attack, NO_BUNDLE)
    # The same with the place of the directory moved, so that it begins where the archive does.
    refused(place, overwritten(attack, -6, "<I", directory_of(original) + len(extra)), NO_BUNDLE)

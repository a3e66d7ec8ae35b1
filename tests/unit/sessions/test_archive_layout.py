"""Headers of single-file bundles, against the zip archives that Python's zipfile writes and reads."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib

import pytest

from loka_onnx.bundle.format.archive_layout import (
    Stored,
    central_header,
    ending,
    local_header,
    parse_central,
    parse_local,
)

LARGE = (1 << 32) + 5


def archive(contents: dict[str, bytes]) -> bytes:
    out, entries = io.BytesIO(), []
    for path, data in contents.items():
        entries.append(Stored(path, len(data), zlib.crc32(data), out.tell()))
        out.write(local_header(entries[-1]) + data)
    directory, offset = b"".join(map(central_header, entries)), out.tell()
    out.write(directory + ending(len(entries), len(directory), offset))
    return out.getvalue()


def test_zipfile_reads_what_the_headers_say() -> None:
    contents = {"a": b"", "b/c.txt": b"text", "d": bytes(range(256))}
    with zipfile.ZipFile(io.BytesIO(archive(contents))) as read:
        assert {info.filename: read.read(info) for info in read.infolist()} == contents
        assert read.testzip() is None
        for info in read.infolist():
            assert (info.compress_type, info.date_time) == (zipfile.ZIP_STORED, (1980, 1, 1, 0, 0, 0))
            assert info.external_attr >> 16 == 0o100644
            assert (info.create_system, info.extra, info.comment, info.flag_bits) == (3, b"", b"", 0)


def test_more_entries_than_16_bits_count() -> None:
    contents = {f"f{number}": b"" for number in range(65_536)}
    with zipfile.ZipFile(io.BytesIO(archive(contents))) as read:
        assert len(read.infolist()) == len(contents)


@pytest.mark.parametrize(
    ("size", "offset"), [(LARGE, 0), (7, LARGE), (LARGE, LARGE), (0xFFFFFFFF, 0xFFFFFFFF)]
)
def test_zipfile_reads_sizes_and_places_beyond_4_gib(size: int, offset: int) -> None:
    entry = Stored("w.bin", size, 0x1234, offset)
    directory = central_header(entry)

    class Sparse(io.RawIOBase):
        """A file whose end alone holds something."""

        tail = directory + ending(1, len(directory), offset + size + len(local_header(entry)))
        start = offset + size + len(local_header(entry))
        place = 0

        def seekable(self) -> bool:
            return True

        def readable(self) -> bool:
            return True

        def seek(self, place: int, whence: int = 0) -> int:
            self.place = place + (0, self.place, self.start + len(self.tail))[whence]
            return self.place

        def tell(self) -> int:
            return self.place

        def read(self, size: int = -1) -> bytes:
            first = self.place - self.start
            if first < 0:
                raise AssertionError("only the directory is read")
            data = self.tail[first:] if size < 0 else self.tail[first : first + size]
            self.place += len(data)
            return data

    with zipfile.ZipFile(Sparse()) as read:  # type: ignore[type-var]
        (info,) = read.infolist()
    assert (info.file_size, info.compress_size, info.header_offset) == (size, size, offset)
    local = local_header(entry)
    assert entry.content == offset + len(local)
    assert entry.end == offset + len(local) + size
    found = parse_local(local)
    assert found is not None
    assert (found.path, found.bytes, found.crc, found.size) == ("w.bin", size, 0x1234, len(local))


def test_headers_of_others_are_read_for_messages() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as write:
        write.writestr("x" * 40, b"0" * 1000)
    data = out.getvalue()
    local = parse_local(data)
    assert local is not None
    assert (local.path, local.method) == ("x" * 40, zipfile.ZIP_DEFLATED)
    central = parse_central(data[struct.unpack_from("<I", data, len(data) - 6)[0] :])
    assert central is not None
    assert (central.path, central.method, central.bytes) == ("x" * 40, zipfile.ZIP_DEFLATED, 1000)
    assert parse_local(b"") is None
    assert parse_local(b"PK\x05\x06" + bytes(40)) is None
    assert parse_central(data) is None
    assert parse_central(b"") is None

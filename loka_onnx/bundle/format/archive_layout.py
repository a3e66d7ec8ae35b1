"""Headers of a single-file bundle: a zip archive whose bytes, other than contents, are all determined.

Source: PKWARE .ZIP File Format Specification (APPNOTE) 6.3.10, sections 4.3.7 (local header), 4.3.12 (central
header), 4.3.14 to 4.3.16 (end of the central directory) and 4.5.3 (ZIP64). Choices that the specification
leaves open are fixed: entries are stored uncompressed and dated 1980-01-01, without comments or extra fields
other than ZIP64 where a number needs it. The headers therefore follow from the names, sizes and checksums of
the entries, and a reader compares them instead of trusting them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

_LOCAL, _CENTRAL = struct.Struct("<IHHHHHIIIHH"), struct.Struct("<IHHHHHHIIIHHHHHII")
_END, _END64, _LOCATOR = struct.Struct("<IHHHHIIH"), struct.Struct("<IQHHIIQQQQ"), struct.Struct("<IIQI")
_LOCAL_SIGNATURE, _CENTRAL_SIGNATURE = 0x04034B50, 0x02014B50
_END_SIGNATURE, _END64_SIGNATURE, _LOCATOR_SIGNATURE = 0x06054B50, 0x06064B50, 0x07064B50
_PLAIN, _ZIP64 = 20, 45
_UNIX = 3 << 8
_DATE = 0x21
_MODE = 0o100644 << 16
_FULL, _MANY = 0xFFFFFFFF, 0xFFFF

LOCAL_BYTES, CENTRAL_BYTES = _LOCAL.size, _CENTRAL.size
MAX_HEADER_BYTES = 1024
"""Upper bound of the header of any path that a bundle may hold."""


@dataclass(frozen=True)
class Stored:
    """An entry of an archive; `bytes` and `crc` are of its content, `offset` is that of its local header."""

    path: str
    bytes: int
    crc: int
    offset: int

    @property
    def content(self) -> int:
        """Offset of its content."""
        return self.offset + len(local_header(self))

    @property
    def end(self) -> int:
        """Offset of the next entry."""
        return self.content + self.bytes


def local_header(entry: Stored) -> bytes:
    """Build the header in front of an entry's content."""
    name = entry.path.encode("ascii")
    is_large = entry.bytes >= _FULL
    extra = struct.pack("<HHQQ", 1, 16, entry.bytes, entry.bytes) if is_large else b""
    size = _FULL if is_large else entry.bytes
    needed = _ZIP64 if is_large else _PLAIN
    fixed = _LOCAL.pack(
        _LOCAL_SIGNATURE, needed, 0, 0, 0, _DATE, entry.crc, size, size, len(name), len(extra)
    )
    return fixed + name + extra


def central_header(entry: Stored) -> bytes:
    """Build the header of an entry in the central directory."""
    name = entry.path.encode("ascii")
    is_large, is_far = entry.bytes >= _FULL, entry.offset >= _FULL
    numbers = [entry.bytes] * 2 * is_large + [entry.offset] * is_far
    extra = struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""
    needed = _ZIP64 if numbers else _PLAIN
    size = _FULL if is_large else entry.bytes
    fixed = _CENTRAL.pack(
        _CENTRAL_SIGNATURE,
        _UNIX | needed,
        needed,
        0,
        0,
        0,
        _DATE,
        entry.crc,
        size,
        size,
        len(name),
        len(extra),
        0,
        0,
        0,
        _MODE,
        _FULL if is_far else entry.offset,
    )
    return fixed + name + extra


def ending(count: int, size: int, offset: int) -> bytes:
    """Build the end of an archive with `count` entries and a central directory of `size` bytes at
    `offset`.
    """
    is_large = count >= _MANY or size >= _FULL or offset >= _FULL
    large = b""
    if is_large:
        large = _END64.pack(
            _END64_SIGNATURE,
            _END64.size - 12,
            _UNIX | _ZIP64,
            _ZIP64,
            0,
            0,
            count,
            count,
            size,
            offset,
        ) + _LOCATOR.pack(_LOCATOR_SIGNATURE, 0, offset + size, 1)
    few = min(count, _MANY)
    return large + _END.pack(_END_SIGNATURE, 0, 0, few, few, min(size, _FULL), min(offset, _FULL), 0)


@dataclass(frozen=True)
class Header:
    """A header as read from an archive, untrusted.

    Attributes:
        bytes: Uncompressed size of the content.
        mode: Type and permissions of the file; 0 in a local header.
        offset: Offset of the entry; 0 in a local header.
        size: Bytes of the header.
    """

    path: str
    flags: int
    method: int
    crc: int
    bytes: int
    mode: int
    offset: int
    size: int


def parse_local(data: bytes) -> Header | None:
    """Parse a local header at the start of `data`; None where there is none."""
    if len(data) < _LOCAL.size:
        return None
    signature, _, flags, method, _, _, crc, _, size, name, extra = _LOCAL.unpack_from(data)
    if signature != _LOCAL_SIGNATURE:
        return None
    path, rest = _name(data, _LOCAL.size, name), data[_LOCAL.size + name :][:extra]
    large = struct.unpack_from("<HHQ", rest) if len(rest) >= 12 else (0, 0, 0)
    if size == _FULL and large[0] == 1:
        size = large[2]
    return Header(path, flags, method, crc, size, 0, 0, _LOCAL.size + name + extra)


def parse_central(data: bytes) -> Header | None:
    """Parse a central header, with ZIP64 numbers at their limit; None where there is none."""
    if len(data) < _CENTRAL.size or _CENTRAL.unpack_from(data)[0] != _CENTRAL_SIGNATURE:
        return None
    fields = _CENTRAL.unpack_from(data)
    flags, method, crc, size, name, extra, comment, mode, offset = (
        fields[3],
        fields[4],
        fields[7],
        fields[9],
        *fields[10:13],
        fields[15],
        fields[16],
    )
    path = _name(data, _CENTRAL.size, name)
    return Header(path, flags, method, crc, size, mode >> 16, offset, _CENTRAL.size + name + extra + comment)


def _name(data: bytes, start: int, size: int) -> str:
    return data[start : start + size].decode("utf-8", "backslashreplace")

"""Bodies of requests: read within limits of size and time, and unpacked within the same.

Source: RFC 9110, sections 8.4 (Content-Encoding; ``deflate`` is zlib's format, section 8.4.1.2), 15.5.12
(411) and 15.5.14 (413).
"""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from loka_onnx.errors import DataError

if TYPE_CHECKING:
    from starlette.requests import Request

_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_TYPES = frozenset({"", "application/json", "application/octet-stream"})
_HEADER_LENGTH = "inference-header-content-length"
_CLOSE = {"Connection": "close"}
_PIECE_BYTES = 8 << 20
"""How much is unpacked before it is counted."""


@dataclass(frozen=True)
class Limits:
    """Limits of what a server takes on at once.

    Attributes:
        body_bytes: Largest body, as it is sent and unpacked.
        held_bytes: Largest sum of what is held: bodies, as they are sent and unpacked, and answers until
            their clients have taken them. A request above it is refused with 503.
        waiting: Most requests that wait for a thread or run; one more is refused with 503.
        body_seconds: Longest time from the head of a request to the end of its body.
        head_seconds: Longest time for a head, and for what comes behind an answer.
        answer_seconds: Longest time that a client may take for an answer.
        closing_seconds: Longest time for the rest of a body once the server is to end.
        connections: Most connections; one more ends the one that has been idle longest.
    """

    body_bytes: int = 64 << 20
    held_bytes: int = 256 << 20
    waiting: int = 256
    body_seconds: float = 30.0
    head_seconds: float = 30.0
    answer_seconds: float = 60.0
    closing_seconds: float = 1.0
    connections: int = 1024


@dataclass(frozen=True)
class Body:
    """A body as it was sent.

    Attributes:
        raw: The bytes.
        encoding: How they are packed; empty where they are not.
        header_length: Bytes of JSON at the beginning, unpacked; None where all is JSON.
        held: Counts what it unpacks to.
    """

    raw: bytearray
    encoding: str
    header_length: int | None
    held: Held


class Holding:
    """What a server holds at once; places are used by its event loop alone, bytes by its threads too."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.bytes = 0
        self.waiting = 0
        self._lock = threading.Lock()

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place among those that wait or run.

        Raises:
            HTTPException: 503, there is none.
        """
        self.check()
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1

    def check(self) -> None:
        """Whether there is a place.

        Raises:
            HTTPException: 503, there is none.
        """
        if self.waiting >= self.limits.waiting:
            busy(f"{self.waiting} requests wait or run, which is the most that this server takes on")

    def add(self, count: int) -> None:
        """Count bytes that are held from now on; fewer where negative.

        Raises:
            HTTPException: 503, they do not fit.
        """
        with self._lock:
            fits = self.bytes + count <= self.limits.held_bytes
            if fits or count < 0:
                self.bytes += count
                return
        busy(f"requests and answers of {self.bytes} bytes are held, more does not fit")


class Held:
    """Bytes that one request holds.

    Args:
        holding: All that is held.
    """

    def __init__(self, holding: Holding) -> None:
        self._holding = holding
        self.bytes = 0

    def add(self, count: int) -> None:
        """Count more bytes.

        Raises:
            HTTPException: 503, they do not fit.
        """
        self._holding.add(count)
        self.bytes += count

    def release(self) -> None:
        """Give all of it back."""
        self._holding.add(-self.bytes)
        self.bytes = 0


async def read_body(request: Request, held: Held, limits: Limits) -> Body:
    """Reads the body of a request.

    Raises:
        HTTPException: 400, 408, 411, 413, 415 or 503.
        ClientDisconnect: The client has gone before its end.
    """
    headers = request.headers
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in _TYPES:
        # Not even a form, which curl sends unless told: any web page may send one to its reader's own host.
        refuse(415, f"the content type is {kind!r}; send application/json or application/octet-stream")
    if not kind and "origin" in headers:
        # The same of a web page that sends bytes without a type. tritonclient does so too, without an origin.
        refuse(415, "there is no content type; send application/json or application/octet-stream")
    encoding = headers.get("content-encoding", "").strip().lower()
    encoding = "" if encoding == "identity" else encoding
    if encoding and encoding not in _WINDOWS:
        refuse(415, f"the content encoding is {encoding!r}; send gzip, deflate or neither")
    length = headers.get("content-length")
    if length is None and "transfer-encoding" not in headers:
        refuse(411, "neither Content-Length nor Transfer-Encoding says how long the body is", _CLOSE)
    if length is not None and "transfer-encoding" in headers:
        # A proxy that goes by the other one would see another request behind this one.
        refuse(400, "there are both Content-Length and Transfer-Encoding; send one of them", _CLOSE)
    if length is not None and int(length) > limits.body_bytes:
        _too_large(f"it has {length} bytes", limits.body_bytes, _CLOSE)
    header_length = _header_length(headers.get(_HEADER_LENGTH))
    raw = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                if len(raw) + len(chunk) > limits.body_bytes:
                    _too_large("it has more bytes", limits.body_bytes, _CLOSE)
                held.add(len(chunk))
                raw += chunk
    except TimeoutError:
        refuse(
            408, f"the body did not end within {limits.body_seconds:g} s; {len(raw)} bytes have come", _CLOSE
        )
    return Body(raw, encoding, header_length, held)


def unpack(body: Body, most: int) -> bytes | bytearray:
    """The bytes of a body without its encoding.

    Args:
        body: The body.
        most: Largest size; what is larger is not unpacked to its end.

    Raises:
        HTTPException: 413, it is larger; 503, more than the server holds.
        DataError: It is not of its encoding, ends early, or goes on behind its end.
    """
    if not body.encoding:
        return body.raw
    unpacking = zlib.decompressobj(_WINDOWS[body.encoding])
    found = bytearray()
    rest: bytes | bytearray = body.raw
    while not unpacking.eof:
        try:
            piece = unpacking.decompress(rest, min(_PIECE_BYTES, most + 1 - len(found)))
        except zlib.error as error:
            raise DataError(f"the body is not {body.encoding}", evidence=str(error)) from error
        if not piece and not unpacking.unconsumed_tail:
            break
        body.held.add(len(piece))
        found += piece
        if len(found) > most:
            _too_large(f"it unpacks from {len(body.raw)} bytes to more", most)
        rest = unpacking.unconsumed_tail
    if not unpacking.eof or unpacking.unused_data:
        problem = "goes on behind its end" if unpacking.eof else "ends early"
        raise DataError(f"the body is not {body.encoding}", evidence=f"it {problem}")
    return found


def refuse(status: int, message: str, headers: Mapping[str, str] | None = None) -> NoReturn:
    """Answers with an error.

    Args:
        status: Its status.
        message: What is wrong.
        headers: Headers of the answer.

    Raises:
        HTTPException: Always.
    """
    from starlette.exceptions import HTTPException

    raise HTTPException(status, message, headers)


def busy(message: str) -> NoReturn:
    """Answers that the client should try again.

    Raises:
        HTTPException: 503, always.
    """
    from starlette.exceptions import HTTPException

    raise HTTPException(503, f"{message}; try again later", headers={"Retry-After": "1"})


def _too_large(evidence: str, most: int, headers: Mapping[str, str] | None = None) -> NoReturn:
    message = f"the body is too large: {evidence}, at most {most} are taken; send fewer rows at a time"
    refuse(413, message, headers)


def _header_length(text: str | None) -> int | None:
    if text is None:
        return None
    # Nineteen digits are the largest 64-bit integer; int() takes underscores, signs and other scripts.
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        refuse(400, f"Inference-Header-Content-Length is no number of bytes: {text[:40]!r}")
    return int(text)

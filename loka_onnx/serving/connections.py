"""Connections of the server: how many there are, and when one that stands still is ended.

uvicorn has no deadline for the head of a request, for a body that nobody reads, or for an answer that a
client does not take, and at its limit of connections it refuses whoever comes next. Here each of these ends,
and at the limit the connection that has been idle longest makes room, so that a probe gets through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from loka_onnx.serving.bodies import Limits

_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: 47\r\n"
    b"Retry-After: 1\r\nConnection: close\r\n\r\n"
    b'{"error":"all connections of this server work"}'
)


class _Deadline:
    """Calls something unless it is cancelled before; to start it again does not put it off."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, call: Callable[[], None]) -> None:
        self._loop = loop
        self._seconds = seconds
        self._call = call
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._call)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def http_protocol(limits: Limits) -> type[asyncio.Protocol]:
    """The protocol of one connection, for uvicorn.

    Args:
        limits: How many connections there are, and how long they may stand still.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Connection(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            # abort(), because a transport that is only closed keeps its socket until all is written.
            self._idle = _Deadline(self.loop, limits.head_seconds, transport.abort)
            self._stuck = _Deadline(self.loop, limits.answer_seconds, transport.abort)
            self._idle_since = self.loop.time()
            has_room = len(self.connections) < limits.connections or self._make_room()
            super().connection_made(transport)
            self._idle.start()
            if not has_room:
                transport.write(_FULL)
                transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            self._idle.cancel()
            self._stuck.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._is_idle():
                # Half a head, or a body behind its answer. More of it does not put off the end.
                self._idle.start()
            else:
                self._idle.cancel()

        def eof_received(self) -> None:
            super().eof_received()
            self._idle.start()

        def on_response_complete(self) -> None:
            self._idle_since = self.loop.time()
            if self.transport.is_closing():
                self._idle.start()
            super().on_response_complete()

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            self._idle.start()

        def shutdown(self) -> None:
            # uvicorn sends h11 an event here that it refuses in some states, and waits for every body.
            if self._is_idle():
                self.transport.close()
                self._stuck.start()
                return
            self.cycle.keep_alive = False
            self.loop.call_later(limits.closing_seconds, self._end_body)

        def _end_body(self) -> None:
            """A request whose body is not here by now is not under way."""
            if not self._is_idle() and self.cycle.more_body:
                self.transport.abort()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._stuck.start()

        def resume_writing(self) -> None:
            self._stuck.cancel()
            super().resume_writing()

        def _is_idle(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _make_room(self) -> bool:
            idle = [each for each in self.connections if isinstance(each, Connection) and each._is_idle()]
            if not idle:
                return False
            oldest = min(idle, key=lambda each: each._idle_since)
            # It leaves by itself in the loop's next turn, but the next connection may be made in this one.
            self.connections.discard(oldest)
            oldest.transport.abort()
            return True

    return Connection

"""Sending an answer: it counts as held until its client has taken it; the last of a connection lingers.

Source: RFC 9112, section 9.6: who closes a connection with bytes unread may have its last answer lost.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from loka_onnx.serving.bodies import Held

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import Message, Receive, Scope, Send

BUFFERED_BYTES = 64 << 10
"""What the server below takes without waiting for its client (asyncio's high-water mark)."""
LINGER_SECONDS = 2.0
"""How long a connection is read once its last answer is written."""


def answer_bytes(count: int) -> int:
    """What an answer holds until its client has taken it.

    Args:
        count: Its bytes; they are there twice, here and in the buffer of the connection.
    """
    return 2 * count if count > BUFFERED_BYTES else 0


class Sending:
    """A response of which the server knows when it was taken; an ASGI application, as every response is.

    The end of the body is a message of its own: the server below takes it once all but 64 KiB of what came
    before have gone, or the connection has.

    Args:
        response: The response, whole.
        held: What it holds; given back at the end.
    """

    def __init__(self, response: Response, held: Held) -> None:
        self._response = response
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""

        async def end_apart(message: Message) -> None:
            if message["type"] != "http.response.body":
                await send(message)
                return
            await send({**message, "more_body": True})
            if self._response.headers.get("connection") == "close":
                await _linger(receive)
            await send(_END)

        try:
            await self._response(scope, receive, end_apart)
        finally:
            self._held.release()


_END: dict[str, Any] = {"type": "http.response.body", "body": b"", "more_body": False}


async def _linger(receive: Receive) -> None:
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            while (await receive()).get("more_body", False):
                pass
    except TimeoutError:
        pass

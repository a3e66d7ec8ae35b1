"""The open inference protocol v2 over HTTP for one loaded bundle, as a Starlette application.

The event loop only moves bytes; a fixed number of threads reads requests, runs them and writes answers.
Requests beyond the limits are refused at once with 503.

Sources: kserve/open-inference-protocol, `specification/protocol/inference_rest.md`, section API; RFC 9110,
sections 15.5.12 (411) and 15.5.14 (413).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NoReturn

from loka_onnx.errors import DataError, EngineError, LokaError
from loka_onnx.runtime import Engine, Health
from loka_onnx.serving.protocol import Card, read_request, to_text, write_answer

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

_LOG = logging.getLogger("loka_onnx.serving")
VERSION = "1"
"""Version of the model in URLs: a bundle has no number of its own, and Triton's begin with 1."""
HEALTH_SECONDS = 10.0
"""Time in which the result of a self-test is reused."""
DRAIN_SECONDS = 2.0
"""Time in which the rest of a body that is too large is read and dropped."""
SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
"""Upper bounds of the latency histogram; a ranker answers in milliseconds."""
_TYPES = frozenset({"", "application/json", "application/octet-stream"})
_HEADER_LENGTH = "Inference-Header-Content-Length"
_CLOSE = {"Connection": "close"}


@dataclass(frozen=True)
class Limits:
    """Limits of a server: largest body and largest sum of bodies without an answer, most requests that wait
    or run, longest time from the head of a request to the end of its body, and for its rest once the server
    shuts down.
    """

    body_bytes: int = 64 << 20
    held_bytes: int = 256 << 20
    waiting: int = 256
    body_seconds: float = 30.0
    closing_seconds: float = 1.0


def make_app(
    engine: Engine, name: str, workers: ThreadPoolExecutor, limits: Limits | None = None
) -> Starlette:
    """Return the application, whose `app.state.close()` begins the shutdown; engine and workers stay open."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.routing import Route

    service = _Service(engine, name, workers, limits or Limits())
    routes = [
        Route("/v2", service.server),
        Route("/v2/health/live", service.live),
        Route("/v2/health/ready", service.ready),
        Route("/metrics", service.metrics),
    ]
    for path in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        routes += [
            Route(path, service.metadata),
            Route(f"{path}/ready", service.ready),
            Route(f"{path}/infer", service.infer, methods=["POST"]),
        ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _on_refusal, Exception: _on_bug})
    # A redirect would be made of the Host header, which the client chooses.
    app.router.redirect_slashes = False
    app.state.close = service.close
    return app


class _Service:
    """The endpoints. Counts of requests and bytes are changed by the event loop alone."""

    def __init__(self, engine: Engine, name: str, workers: ThreadPoolExecutor, limits: Limits) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        kind = PurePosixPath(engine.entry.path).suffix.lstrip(".") or "engine"
        platform = f"{engine.entry.backend}_{kind}"
        self._card = Card(name, VERSION, platform, tuple(engine.inputs), tuple(engine.outputs))
        self._engine, self._workers, self._limits = engine, workers, limits
        self._waiting = self._held_bytes = 0
        self._bodies: set[asyncio.Timeout] = set()
        self._body_seconds = limits.body_seconds
        self._testing = threading.Lock()
        self._health, self._tested = engine.health(), time.monotonic()
        self._registry = registry = CollectorRegistry()
        self._answers = Counter(
            "loka_onnx_serve_answers", "Inference requests that were answered.", ["status"], registry=registry
        )
        self._seconds = Histogram(
            "loka_onnx_serve_seconds",
            "From the head of an inference request to its answer.",
            buckets=SECONDS,
            registry=registry,
        )
        waiting = Gauge("loka_onnx_serve_waiting", "Inference requests that wait or run.", registry=registry)
        waiting.set_function(lambda: self._waiting)
        registry.register(engine.metrics)

    def close(self) -> None:
        """Shorten the time of bodies under way, so that none delays the shutdown."""
        self._body_seconds = self._limits.closing_seconds
        end = asyncio.get_running_loop().time() + self._body_seconds
        for timeout in self._bodies:
            if not timeout.expired():
                timeout.reschedule(min(end, timeout.when() or end))

    async def server(self, request: Request) -> Response:
        about = {"name": "loka-onnx", "version": version("loka-onnx")}
        return _json({**about, "extensions": ["binary_tensor_data"]})

    async def live(self, request: Request) -> Response:
        return _json({"live": True})

    async def ready(self, request: Request) -> Response:
        self._check_model(request)
        document = {"name": self._card.name} if request.path_params else {}
        # Not among the workers: a probe that waited behind requests would time out when the server is busy.
        health = await asyncio.to_thread(self._self_test)
        if health.ready:
            return _json({**document, "ready": True})
        return _json({**document, "ready": False, "error": health.detail}, 503)

    async def metadata(self, request: Request) -> Response:
        self._check_model(request)
        return _json(self._card.metadata())

    async def metrics(self, request: Request) -> Response:
        from prometheus_client import generate_latest
        from starlette.responses import Response

        text = generate_latest(self._registry)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def infer(self, request: Request) -> Response:
        from starlette.exceptions import HTTPException
        from starlette.requests import ClientDisconnect

        began, status = time.perf_counter(), 500
        try:
            try:
                response = await self._infer(request)
            except HTTPException as error:
                response = await _on_refusal(request, error)
            except DataError as error:
                response = _json({"error": str(error)}, 400)
            except LokaError as error:
                _LOG.error("a request failed: %s", error)
                response = _json({"error": str(error)}, 500)
            except ClientDisconnect:
                # Nobody reads it; it is counted.
                response = _json({"error": "the connection was closed before the end of the body"}, 400)
            status = response.status_code
            return response
        finally:
            self._answers.labels(str(status)).inc()
            self._seconds.observe(time.perf_counter() - began)

    async def _infer(self, request: Request) -> Response:
        self._check_model(request)
        self._check_room()
        if not self._health.ready:
            health = await asyncio.to_thread(self._self_test)
            if not health.ready:
                _busy(f"the engine fails its self-test: {health.detail}")
        header_length = self._header_length(request.headers)
        body = bytearray()
        try:
            await self._read(request, body)
            self._check_room()
            self._waiting += 1
            try:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._workers, self._answer, body, header_length)
            finally:
                self._waiting -= 1
        finally:
            self._held_bytes -= len(body)

    def _answer(self, body: bytearray, header_length: int | None) -> Response:
        from starlette.responses import Response

        request = read_request(body, header_length, self._card)
        try:
            values = self._engine.infer(request.inputs)
        except EngineError:
            # The next probe tests it again, whatever the last one found.
            self._tested = float("-inf")
            raise
        answer, length = write_answer(request, values, self._card)
        if length is None:
            return Response(answer, media_type="application/json")
        return Response(answer, 200, {_HEADER_LENGTH: str(length)}, "application/octet-stream")

    def _self_test(self) -> Health:
        with self._testing:
            if time.monotonic() - self._tested > HEALTH_SECONDS:
                # The time first: a failure meanwhile asks for the next test.
                self._tested = time.monotonic()
                self._health = self._engine.health()
            return self._health

    def _check_model(self, request: Request) -> None:
        card, asked = self._card, request.path_params
        name, number = asked.get("model", card.name), asked.get("version", card.version)
        if name != card.name:
            _refuse(404, f"there is no model {name[:100]!r} here, there is {card.name!r}")
        if number != card.version:
            _refuse(404, f"{card.name!r} has no version {number[:100]!r}, it has {card.version!r}")

    def _check_room(self) -> None:
        if self._waiting >= self._limits.waiting:
            _busy(f"{self._waiting} requests wait or run, which is the most that this server takes on")

    def _header_length(self, headers: Mapping[str, str]) -> int | None:
        """Check the headers of a request; return the length of its JSON, None where all is JSON."""
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in _TYPES:
            # Not even a form, the default of curl: any web page may send one to its reader's own host.
            _refuse(415, f"the content type is {kind!r}; send application/json or application/octet-stream")
        if not kind and "origin" in headers:
            # The same of a web page that sends bytes without a type; tritonclient does so without an origin.
            _refuse(415, "there is no content type; send application/json or application/octet-stream")
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding not in {"", "identity"}:
            _refuse(415, f"the content encoding is {encoding!r}; send the body without one")
        length = headers.get("content-length")
        if length is None and "transfer-encoding" not in headers:
            _refuse(411, "neither Content-Length nor Transfer-Encoding says how long the body is", _CLOSE)
        if length is not None and "transfer-encoding" in headers:
            # A proxy that goes by the other one would see another request behind this one.
            _refuse(400, "there are both Content-Length and Transfer-Encoding; send one of them", _CLOSE)
        text = headers.get(_HEADER_LENGTH)
        # Nineteen digits are the largest 64-bit integer; int() takes underscores, signs and other scripts.
        if text is not None and not (text.isascii() and text.isdigit() and len(text) <= 19):
            _refuse(400, f"{_HEADER_LENGTH} is no number of bytes: {text[:40]!r}")
        return None if text is None else int(text)

    async def _read(self, request: Request, body: bytearray) -> None:
        """Append the body of a request to `body`; its bytes count as held."""
        length = request.headers.get("content-length")
        if length is not None and int(length) > self._limits.body_bytes:
            # Who expects 100 Continue has not begun to send.
            await self._refuse_large(request, f"it has {length} bytes", begun="expect" not in request.headers)
        try:
            async with asyncio.timeout(self._body_seconds) as timeout:
                self._bodies.add(timeout)
                async for chunk in request.stream():
                    if len(body) + len(chunk) > self._limits.body_bytes:
                        break
                    if self._held_bytes + len(chunk) > self._limits.held_bytes:
                        _busy(f"requests of {self._held_bytes} bytes are held, more does not fit")
                    self._held_bytes += len(chunk)
                    body += chunk
                else:
                    return
        except TimeoutError:
            message = f"the body did not end within {self._body_seconds:g} s; {len(body)} bytes have come"
            _refuse(408, message, _CLOSE)
        finally:
            self._bodies.discard(timeout)
        await self._refuse_large(request, "it has more bytes")

    async def _refuse_large(self, request: Request, evidence: str, *, begun: bool = True) -> NoReturn:
        """Drop what a client still sends: a connection closed on it may lose the answer (RFC 9112, 9.6)."""
        with suppress(TimeoutError):
            async with asyncio.timeout(min(DRAIN_SECONDS, self._body_seconds)):
                while begun and (await request.receive()).get("more_body"):
                    pass
        most = self._limits.body_bytes
        message = f"the body is too large: {evidence}, at most {most} are taken; send fewer rows at a time"
        _refuse(413, message, _CLOSE)


def _json(document: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    from starlette.responses import Response

    return Response(to_text(document), status, headers, "application/json")


def _refuse(status: int, message: str, headers: Mapping[str, str] | None = None) -> NoReturn:
    from starlette.exceptions import HTTPException

    raise HTTPException(status, message, headers)


def _busy(message: str) -> NoReturn:
    _refuse(503, f"{message}; try again later", {"Retry-After": "1"})


async def _on_refusal(request: Request, error: Any) -> Response:
    """Return an `HTTPException`, the router's included, as the protocol's error object."""
    return _json({"error": error.detail}, error.status_code, error.headers)


async def _on_bug(request: Request, error: Exception) -> Response:
    """Return 500 without details: the traceback is for the log."""
    message = f"internal error: {type(error).__name__}; the server's log has more"
    return _json({"error": message}, 500)

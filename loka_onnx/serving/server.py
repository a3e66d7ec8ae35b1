"""Serving one bundle until a signal ends it: the open inference protocol v2 over HTTP, on Starlette.

The event loop only moves bytes; a fixed number of threads reads requests, runs them and writes answers.
Requests beyond the limits are refused at once with 503.

Sources: kserve/open-inference-protocol, `specification/protocol/inference_rest.md`, section API; RFC 9110,
sections 15.5.12 (411) and 15.5.14 (413).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import quote

from loka_onnx.bundle.format.archive import bundle_name
from loka_onnx.errors import ConfigError, DataError, EngineError, LokaError, MissingPackage
from loka_onnx.runtime import Engine, Health, load
from loka_onnx.serving.protocol import Card, read_request, to_text, write_answer
from loka_onnx.sessions.runner import stream_count

if TYPE_CHECKING:
    import uvicorn
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
class ServerLimits:
    """Limits of a server: largest body, and sum of bodies without an answer; most requests that wait or run;
    longest time from the head of a request to its end, and for its rest at a shutdown.
    """

    body_bytes: int = 64 << 20
    held_bytes: int = 256 << 20
    waiting: int = 256
    body_seconds: float = 30.0
    closing_seconds: float = 1.0


def make_app(
    engine: Engine, name: str, workers: ThreadPoolExecutor, limits: ServerLimits | None = None
) -> Starlette:
    """Return the application, whose `app.state.close()` begins the shutdown; engine and workers stay open."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.routing import Route

    service = _Service(engine, name, workers, limits or ServerLimits())
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

    def __init__(self, engine: Engine, name: str, workers: ThreadPoolExecutor, limits: ServerLimits) -> None:
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
        """Read and drop the rest of a body: an early end may lose the answer (RFC 9112, 9.6)."""
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


GRACE_SECONDS = 30
"""Time that running requests have to their end once a signal came."""
KEEP_ALIVE_SECONDS = 75
"""Longer than load balancers keep a connection that idles (60 s), so that they never find it closed."""


@dataclass(frozen=True)
class ServeOptions:
    """Options of serving a bundle, as in `loka-onnx bundle serve --help`; `trust` and `keys` as in `load`."""

    host: str = "127.0.0.1"
    port: int = 8000
    trust: bool = False
    keys: tuple[Path, ...] = ()
    threads: int = 0
    limits: ServerLimits = field(default_factory=ServerLimits)
    name: str = ""
    access_log: bool = False


def serve(bundle: Path, options: ServeOptions, on_ready: Callable[[str, str], None]) -> None:
    """Serve a bundle until SIGINT or SIGTERM, then finish the requests under way; for the main thread.

    `on_ready` is called with the URL of the model and the id of its engine once requests are taken. Raises as
    `load`, ConfigError if the address cannot be listened on, the name does not fit into a URL, or the
    protocol cannot carry an input or output, and MissingPackage without the packages of a server.
    """
    with MissingPackage(
        "E1427 a package of the server is not installed", remedy="pip install 'loka-onnx[serve]'"
    ).in_place_of(ImportError):
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    name = options.name or bundle_name(bundle)
    # Clients take the dots out of a path.
    if name in {"", ".", ".."} or "/" in name:
        raise ConfigError(
            f"E1428 '{name}' cannot be the name of a model", remedy="give another one with --name"
        )
    with (
        closing(_bound(options.host, options.port)) as listener,
        load(bundle, trust=options.trust, keys=options.keys) as engine,
        ThreadPoolExecutor(stream_count(options.threads), thread_name_prefix="infer") as workers,
    ):
        app = make_app(engine, name, workers, options.limits)
        host = f"[{options.host}]" if ":" in options.host else options.host
        url = f"http://{host}:{listener.getsockname()[1]}/v2/models/{quote(name)}"
        server = make_server(app, lambda: on_ready(url, engine.entry.id), access_log=options.access_log)
        server.run(sockets=[listener])


def make_server(app: Starlette, on_ready: Callable[[], None], *, access_log: bool) -> uvicorn.Server:
    """Return a server of the application; its shutdown does not wait for bodies that stand still."""
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            on_ready()

        def handle_exit(self, sig: int, frame: object) -> None:
            # A second one does not abandon requests, and none is raised again: the exit code is 0.
            self.should_exit = True

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            app.state.close()
            await super().shutdown(sockets)

    if access_log:
        log = logging.getLogger("uvicorn.access")
        log.setLevel(logging.INFO)
        log.addHandler(logging.StreamHandler(sys.stderr))
    return Server(
        uvicorn.Config(
            app,
            # Not "auto": installed packages must not decide which parser reads strangers' bytes.
            http="h11",
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            # Below an error it logs every request that is no HTTP.
            log_level=None if access_log else "error",
            access_log=access_log,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
    )


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket that has the address, before a bundle is loaded for nothing; it does not listen yet."""
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        return listener
    except (OSError, OverflowError) as error:
        if listener is not None:
            listener.close()
        raise ConfigError(
            f"E1429 cannot listen on {host}, port {port}",
            evidence=str(error),
            remedy="choose another --port (0 for any that is free) or --host",
        ) from error

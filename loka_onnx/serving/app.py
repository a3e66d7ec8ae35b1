"""The routes of the server, as an ASGI application.

Reading a request, running it and writing the answer all happen in one of a fixed number of threads: the event
loop only moves bytes. What does not fit is refused at once with 503 instead of waiting without bound.

Source: kserve/open-inference-protocol, `specification/protocol/inference_rest.md`, section API; index and
statistics as in triton-inference-server/server, `docs/protocol/extension_model_repository.md` and
`extension_statistics.md`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Self

from loka_onnx.errors import DataError, LokaError
from loka_onnx.serving.bodies import Body, Held, Holding, Limits, busy, read_body, refuse
from loka_onnx.serving.metrics import Meter
from loka_onnx.serving.model import ServedModel
from loka_onnx.serving.protocol import InferAnswer, to_text
from loka_onnx.serving.sending import Sending, answer_bytes

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

_LOG = logging.getLogger("loka_onnx.serving")
_JSON = "application/json"
EXTENSIONS = ("binary_tensor_data", "statistics")


class Workers:
    """The threads of a server; leaving the context waits for what they run.

    Args:
        threads: Requests that run at once.

    Attributes:
        requests: They run here.
        probes: Self-tests run here. A probe that waited behind requests would time out when the server is
            busy, not ill.
    """

    def __init__(self, threads: int) -> None:
        self.requests = ThreadPoolExecutor(threads, thread_name_prefix="infer")
        self.probes = ThreadPoolExecutor(1, thread_name_prefix="probe")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.requests.shutdown()
        self.probes.shutdown()


def make_app(model: ServedModel, workers: Workers, limits: Limits | None = None) -> Starlette:
    """The application.

    Args:
        model: What it serves; stays the caller's.
        workers: What it runs on; stays the caller's.
        limits: What it takes on at once.
    """
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.routing import Route

    service = _Service(model, workers, limits or Limits())
    one = "/v2/models/{model}"
    routes = [
        Route("/v2", service.server),
        Route("/v2/health/live", service.live),
        Route("/v2/health/ready", service.ready),
        Route("/v2/models/stats", service.statistics),
        Route("/v2/repository/index", service.index, methods=["POST"]),
        Route("/metrics", service.metrics),
    ]
    for path in (one, f"{one}/versions/{{version}}"):
        routes += [
            Route(path, service.metadata),
            Route(f"{path}/ready", service.model_ready),
            Route(f"{path}/stats", service.statistics),
            Route(f"{path}/infer", service.infer, methods=["POST"]),
        ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _on_refusal, Exception: _on_bug})
    # A redirect would be made of the Host header, which the client chooses.
    app.router.redirect_slashes = False
    return app


class _Service:
    """The endpoints; every one takes a request and returns a response."""

    def __init__(self, model: ServedModel, workers: Workers, limits: Limits) -> None:
        self._model = model
        self._limits = limits
        self._holding = Holding(limits)
        self._meter = Meter(model.engine)
        self._workers = workers

    async def server(self, request: Request) -> Response:
        return _json({"name": "loka-onnx", "version": version("loka-onnx"), "extensions": list(EXTENSIONS)})

    async def live(self, request: Request) -> Response:
        return _json({"live": True})

    async def ready(self, request: Request) -> Response:
        return await self._readiness({})

    async def model_ready(self, request: Request) -> Response:
        self._check_model(request)
        return await self._readiness({"name": self._model.card.name})

    async def metadata(self, request: Request) -> Response:
        self._check_model(request)
        return _json(self._model.card.metadata())

    async def statistics(self, request: Request) -> Response:
        if "model" in request.path_params:
            self._check_model(request)
        return _json({"model_stats": [self._model.statistics()]})

    async def index(self, request: Request) -> Response:
        card, health = self._model.card, self._model.last_health
        state = "READY" if health.ready else "UNAVAILABLE"
        return _json([{"name": card.name, "version": card.version, "state": state, "reason": health.detail}])

    async def metrics(self, request: Request) -> Response:
        return _response(
            self._meter.text(self._holding.waiting), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def infer(self, request: Request) -> Sending:
        began = time.perf_counter()
        held = Held(self._holding)
        try:
            response = await self._response(request, held)
        except BaseException:
            held.release()
            self._meter.count(500, time.perf_counter() - began)
            raise
        self._meter.count(response.status_code, time.perf_counter() - began)
        return Sending(response, held)

    async def _response(self, request: Request, held: Held) -> Response:
        """What `held` counts afterwards is the response."""
        from starlette.exceptions import HTTPException
        from starlette.requests import ClientDisconnect

        try:
            answer = await self._infer(request, held)
            held.release()
            held.add(answer_bytes(len(answer.body)))
            return _answered(answer)
        except HTTPException as error:
            response = await _on_refusal(request, error)
        except DataError as error:
            response = _error(400, str(error))
        except LokaError as error:
            _LOG.error("a request failed: %s", error)
            response = _error(500, str(error))
        except ClientDisconnect:
            # Nobody reads it; it is counted.
            response = _error(400, "the connection was closed before the end of the body")
        held.release()
        return response

    async def _infer(self, request: Request, held: Held) -> InferAnswer:
        self._check_model(request)
        self._holding.check()
        if not self._model.last_health.ready:
            await self._check_ready()
        body = await read_body(request, held, self._limits)
        with self._holding.place():
            return await self._run(body)

    async def _run(self, body: Body) -> InferAnswer:
        began = time.perf_counter_ns()

        def work() -> InferAnswer:
            return self._model.answer(body, self._limits.body_bytes, time.perf_counter_ns() - began)

        return await asyncio.get_running_loop().run_in_executor(self._workers.requests, work)

    async def _check_ready(self) -> None:
        health = await asyncio.get_running_loop().run_in_executor(self._workers.probes, self._model.health)
        if not health.ready:
            busy(f"the engine fails its self-test: {health.detail}")

    async def _readiness(self, document: dict[str, Any]) -> Response:
        health = await asyncio.get_running_loop().run_in_executor(self._workers.probes, self._model.health)
        found = {**document, "ready": health.ready}
        return _json(
            found if health.ready else {**found, "error": health.detail}, 200 if health.ready else 503
        )

    def _check_model(self, request: Request) -> None:
        card, asked = self._model.card, request.path_params
        if asked["model"] != card.name:
            refuse(404, f"there is no model {asked['model'][:100]!r} here, there is {card.name!r}")
        if asked.get("version", card.version) != card.version:
            refuse(404, f"{card.name!r} has no version {asked['version'][:100]!r}, it has {card.version!r}")


def _answered(answer: InferAnswer) -> Response:
    if answer.header_length is None:
        return _response(answer.body)
    headers = {"Inference-Header-Content-Length": str(answer.header_length)}
    return _response(answer.body, headers=headers, media_type="application/octet-stream")


def _json(document: Any, status: int = 200) -> Response:
    return _response(to_text(document), status)


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return _response(to_text({"error": message}), status, headers)


def _response(
    body: bytes, status: int = 200, headers: dict[str, str] | None = None, media_type: str = _JSON
) -> Response:
    from starlette.responses import Response

    return Response(body, status, headers, media_type)


async def _on_refusal(request: Request, error: Exception) -> Response:
    """An error of HTTP, the router's included, as the protocol's error object."""
    from starlette.exceptions import HTTPException

    if not isinstance(error, HTTPException):
        raise error
    return _error(error.status_code, error.detail, dict(error.headers or {}))


async def _on_bug(request: Request, error: Exception) -> Response:
    """A bug: the traceback is for the log, not for the client."""
    return _error(500, f"internal error: {type(error).__name__}; the server's log has more")

"""The server: routes without a socket, connections over real ones, what is settled before it listens."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
import uvicorn
from absent import python
from prometheus_client.parser import text_string_to_metric_families

from loka_onnx.errors import ConfigError, EngineError
from loka_onnx.runtime import Engine
from loka_onnx.serving import server
from loka_onnx.serving.server import ServeOptions, ServerLimits, make_app, make_server, serve

INFER = "/v2/models/ranker/infer"
ROW = [0.5] * 16


def tensor(rows: int = 1) -> dict[str, Any]:
    return {"name": "dense", "shape": [rows, 16], "datatype": "FP32", "data": ROW * rows}


def request(rows: int = 1, **more: Any) -> bytes:
    return json.dumps({"inputs": [tensor(rows)], **more}).encode()


class Client:
    """Calls an application, several requests at once where asked."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def call(self, method: str, path: str, **more: Any) -> httpx.Response:
        async def call() -> httpx.Response:
            async with self._open() as client:
                return await client.request(method, path, **more)

        return asyncio.run(call())

    def get(self, path: str) -> httpx.Response:
        return self.call("GET", path)

    def infer(self, body: bytes, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.call("POST", INFER, content=body, headers=named)

    def together(self, count: int, body: bytes, between: Callable[[], None]) -> list[httpx.Response]:
        """So many requests; `between` is called when they are under way."""

        async def call() -> list[httpx.Response]:
            async with self._open() as client:
                tasks = [asyncio.create_task(client.post(INFER, content=body)) for _ in range(count)]
                await asyncio.sleep(0.2)
                between()
                return await asyncio.gather(*tasks)

        return asyncio.run(call())

    def _open(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self._app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://test")


@contextmanager
def client_of(engine: Engine, limits: ServerLimits | None = None, threads: int = 2) -> Iterator[Client]:
    with ThreadPoolExecutor(threads) as workers:
        yield Client(make_app(engine, "ranker", workers, limits))


@pytest.fixture
def client(engine: Engine) -> Iterator[Client]:
    with client_of(engine) as found:
        yield found


def test_metadata_and_health(client):
    server = client.get("/v2").json()
    assert (server["name"], server["extensions"]) == ("loka-onnx", ["binary_tensor_data"])
    assert client.get("/v2/health/live").json() == {"live": True}
    assert client.get("/v2/health/ready").json() == {"ready": True}
    for path in ("/v2/models/ranker", "/v2/models/ranker/versions/1"):
        assert client.get(f"{path}/ready").json() == {"name": "ranker", "ready": True}
        metadata = client.get(path).json()
        assert metadata["versions"] == ["1"] and metadata["platform"] == "onnxruntime_onnx"
        assert metadata["inputs"] == [{"name": "dense", "datatype": "FP32", "shape": [-1, 16]}]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        *(("GET", path, 404) for path in ("/", "/v2/", "/v2/models", "/v2/models/other")),
        *(("GET", f"/v2/models/{path}", 404) for path in ("ranker/versions/2", "other/ready")),
        *(
            ("POST", f"/v2/models/{path}/infer", 404)
            for path in ("other", "ranker/versions/2", "..%2franker")
        ),
        *(("GET", INFER, 405), ("DELETE", "/v2/models/ranker", 405), ("POST", "/v2/health/live", 405)),
    ],
)
def test_what_is_not_there_is_said_in_an_error_object(client, method, path, status):
    response = client.call(method, path)
    assert response.status_code == status
    assert isinstance(response.json()["error"], str)


LENGTH = "inference_header_content_length"
NO_TYPE = "there is no content type; send application/json or application/octet-stream"


@pytest.mark.parametrize(
    ("headers", "status", "message"),
    [
        *(({"content_type": kind}, 200, "") for kind in ("application/json; charset=utf-8", "")),
        ({"content_type": "APPLICATION/JSON"}, 200, ""),
        # As a web page can send bytes to any address.
        ({"origin": "http://elsewhere.example"}, 415, NO_TYPE),
        *(({"content_encoding": how}, 415, f"the content encoding is '{how}'") for how in ("gzip", "br")),
        ({"content_type": "text/plain"}, 415, "the content type is 'text/plain'"),
        ({"content_type": "application/x-www-form-urlencoded"}, 415, "the content type is"),
        *(({LENGTH: text}, 400, f"no number of bytes: '{text}'") for text in ("-1", "1_0", "ten", "")),
        ({LENGTH: "9" * 30}, 400, "no number of bytes"),
        ({LENGTH: "9" * 19}, 400, "is larger than the body"),
        ({LENGTH: "0"}, 400, "the request cannot be read as JSON"),
        ({LENGTH: "20"}, 400, "the request cannot be read as JSON"),
    ],
)
def test_headers(client, headers, status, message):
    response = client.infer(request(), **headers)
    told = response.json().get("error", "")
    assert (response.status_code, message in told) == (status, True), response.text


async def pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 1000):
        yield body[start : start + 1000]


def test_a_body_in_chunks_has_the_same_limit_and_a_batch_that_of_the_engine(engine):
    with client_of(engine, ServerLimits(body_bytes=5000)) as client:
        for rows, status in ((1, 200), (100, 413)):
            response = client.call(
                "POST", INFER, content=pieces(request(rows)), headers={"transfer-encoding": "chunked"}
            )
            assert response.status_code == status
        assert client.infer(request(100)).status_code == 413
    with client_of(engine) as client:
        for rows in (0, 5000):
            response = client.infer(request(rows))
            assert response.status_code == 400
            assert "the request is not a batch that the engine was built for" in response.json()["error"]


def test_an_engine_that_fails_is_our_mistake_and_is_tested_again(engine, monkeypatch, caplog):
    fail = Mock(side_effect=EngineError("the device is gone"))
    with client_of(engine) as client:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "infer", fail)
            assert client.infer(request()).json() == {"error": "the device is gone"}
            assert client.infer(request()).status_code == 500
            patch.setattr(engine._runner, "run", fail)
            ready = client.get("/v2/health/ready")
            assert (ready.status_code, ready.json()["error"]) == (503, "the device is gone")
            assert client.get("/v2/models/ranker/ready").status_code == 503
            refused = client.infer(request())
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
            assert client.get("/v2/health/live").status_code == 200
        monkeypatch.setattr(server, "HEALTH_SECONDS", 0.0)
        assert client.infer(request()).status_code == 200
    assert "a request failed: the device is gone" in caplog.text


def test_a_bug_tells_the_client_nothing_but_that(engine, monkeypatch):
    with client_of(engine) as client:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "infer", Mock(side_effect=ZeroDivisionError("/secret/path")))
            response = client.infer(request())
        assert response.status_code == 500
        assert response.json() == {"error": "internal error: ZeroDivisionError; the server's log has more"}
        assert client.infer(request()).status_code == 200
        assert 'loka_onnx_serve_answers_total{status="500"} 1.0' in client.get("/metrics").text


@contextmanager
def held(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Requests wait in the engine until the event is set."""
    go, infer = threading.Event(), engine.infer

    def wait(inputs: Any) -> Any:
        assert go.wait(10)
        return infer(inputs)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "infer", wait)
        yield go


@pytest.mark.parametrize(
    ("limits", "answered"),
    [(ServerLimits(waiting=3), 3), (ServerLimits(held_bytes=2 * len(request()) + 1), 2)],
    ids=["requests", "bytes of their bodies"],
)
def test_more_than_fits_is_refused_at_once_and_a_probe_does_not_wait(engine, monkeypatch, limits, answered):
    monkeypatch.setattr(server, "HEALTH_SECONDS", 0.0)
    found = []
    with client_of(engine, limits, threads=1) as client:
        with held(engine, monkeypatch) as go:

            def probe() -> None:
                ready = "/v2/health/ready"
                thread = threading.Thread(target=lambda: found.append(client.get(ready).status_code))
                thread.start()
                thread.join(5)
                go.set()

            responses = client.together(8, request(), probe)
        assert found == [200]
        assert sorted(r.status_code for r in responses) == [200] * answered + [503] * (8 - answered)
        refused = next(r for r in responses if r.status_code == 503)
        assert f"{answered} requests wait or run" in refused.json()["error"] or limits.waiting != 3
        assert refused.headers["retry-after"] == "1"
        assert client.infer(request()).status_code == 200


def test_metrics_count(client):
    for _ in range(2):
        client.infer(request(3))
    client.infer(b"{}")
    client.call("POST", "/v2/models/other/infer")
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {
        (sample.name, sample.labels.get("status")): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    answers = {status: samples["loka_onnx_serve_answers_total", status] for status in ("200", "400", "404")}
    assert answers == {"200": 2, "400": 1, "404": 1}
    assert samples["loka_onnx_serve_waiting", None] == 0
    assert samples["loka_onnx_serve_seconds_count", None] == 4
    assert samples["loka_onnx_rows_total", None] == 6, "the engine's own are there too"


def test_a_self_test_counts_for_a_while(engine, monkeypatch):
    health = Mock(wraps=engine.health)
    monkeypatch.setattr(engine, "health", health)
    with client_of(engine) as client:
        for _ in range(5):
            assert client.get("/v2/health/ready").status_code == 200
        assert health.call_count == 1
        monkeypatch.setattr(server, "HEALTH_SECONDS", 0.0)
        client.get("/v2/health/ready")
        assert health.call_count == 2


@dataclass(frozen=True)
class Running:
    server: uvicorn.Server
    port: int

    def connect(self, data: bytes = b"") -> socket.socket:
        found = socket.create_connection(("127.0.0.1", self.port), timeout=5)
        found.sendall(data)
        return found


@contextmanager
def running(engine: Engine, limits: ServerLimits) -> Iterator[Running]:
    with ThreadPoolExecutor(2) as workers, socket.create_server(("127.0.0.1", 0)) as listener:
        server = make_server(make_app(engine, "ranker", workers, limits), lambda: None, access_log=False)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield Running(server, listener.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(10)
        assert not thread.is_alive()


def wait_until(holds: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


def all_of(connection: socket.socket) -> bytes:
    found = b""
    with suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            found += piece
    return found


def post(body: bytes, *headers: str) -> bytes:
    lines = ["POST /v2/models/ranker/infer HTTP/1.1", "Host: x", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


LIMITS = ServerLimits(body_bytes=1 << 20, body_seconds=0.2)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (post(b"ab", "Content-Length: 9999"), 408),
        (post(b""), 411),
        (post(b"a" * 3000, "Content-Length: 2000000"), 413),
        (post(b"0\r\n\r\n", "Content-Length: 5", "Transfer-Encoding: chunked"), 400),
    ],
)
def test_a_connection_whose_next_request_is_in_doubt_is_closed(engine, data, status):
    with running(engine, LIMITS) as server, server.connect(data) as client:
        found = all_of(client)
        assert found.startswith(f"HTTP/1.1 {status} ".encode()) and b"\r\nconnection: close\r\n" in found
        assert found.count(b"HTTP/1.1") == 1


def test_who_sends_too_much_is_told_so_and_not_reset(engine):
    with running(engine, ServerLimits(body_bytes=1 << 20)) as server:
        url = f"http://127.0.0.1:{server.port}/v2/models/ranker/infer"
        assert httpx.post(url, content=bytes(20 << 20), timeout=10).status_code == 413


LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n"
SENT = {
    "nothing": b"",
    "half a head": b"GET /v2/health/live HTT",
    "no http": b"no http at all\r\n\r\n",
    "half a body": post(b"{", "Content-Length: 1000"),
    "an answer": LIVE + b"\r\n",
    "a body behind its answer": LIVE + b"Content-Length: 1000\r\n\r\n{",
    "a head behind an answer": LIVE + b"\r\nGET /v2 HT",
    "a body that is too large": post(b"{", "Content-Length: 900000000"),
}


@pytest.mark.parametrize("sent", SENT.values(), ids=SENT)
def test_no_connection_holds_up_the_end_or_fills_the_log(engine, sent, caplog, capfd):
    """A body that stands still is not a request under way."""
    with running(engine, ServerLimits(closing_seconds=0.3)) as it:
        connection = it.connect(sent)
        wait_until(lambda: len(it.server.server_state.connections) == 1 or b"no http" in sent)
        time.sleep(0.2)
        began = time.monotonic()
        it.server.should_exit = True
    assert time.monotonic() - began < 10
    connection.close()
    assert caplog.text == "" and "Traceback" not in capfd.readouterr().err


WITHOUT = """
import importlib, pkgutil
import loka_onnx.cli.bundle, loka_onnx.serving
for module in pkgutil.iter_modules(loka_onnx.serving.__path__, "loka_onnx.serving."):
    importlib.import_module(module.name)
from pathlib import Path
from loka_onnx.errors import MissingPackage
from loka_onnx.serving.server import ServeOptions, serve
try:
    serve(Path("nowhere"), ServeOptions(), print)
except MissingPackage as error:
    print(error)
"""


def never(url: str, engine: str) -> None:
    raise AssertionError(f"it listens: {url}")


@pytest.mark.slow
def test_without_its_packages_everything_imports_and_the_remedy_is_told() -> None:
    done = python(WITHOUT, without=("starlette", "uvicorn", "prometheus_client"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("a package of the server is not installed\n")
    assert done.stdout.endswith("  remedy: pip install 'loka-onnx[serve]'\n")


def test_what_cannot_be_served_is_found_before_the_bundle_is_loaded(bundle) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        taken = f"cannot listen on 127.0.0.1, port {port}\n  evidence: .*in use"
        for place, options, message in (
            (Path("nowhere"), ServeOptions(port=port), taken),
            (Path("nowhere"), ServeOptions(host="192.0.2.1"), r"cannot listen on 192\.0\.2\.1, port 8000"),
            *(
                (bundle, ServeOptions(name=name), f"'{name}' cannot be the name of a model")
                for name in ("a/b", "/", ".", "..")
            ),
        ):
            with pytest.raises(ConfigError, match=message):
                serve(place, options, never)


def test_trust_and_keys_go_to_the_loader(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Mock(side_effect=EngineError("enough"))
    monkeypatch.setattr(server, "load", load)
    with pytest.raises(EngineError, match="enough"):
        serve(bundle, ServeOptions(port=0, trust=True, keys=(Path("a.pub"),)), never)
    load.assert_called_once_with(bundle, trust=True, keys=(Path("a.pub"),))

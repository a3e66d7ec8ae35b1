"""The server: routes without a socket, connections over real ones, what is settled before it listens."""

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from loka_onnx.errors import ConfigError, EngineError
from loka_onnx.runtime import Engine
from loka_onnx.serving import server
from loka_onnx.serving.server import Limits, ServeOptions, make_app, make_server, serve

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
def client_of(engine: Engine, limits: Limits | None = None, threads: int = 2) -> Iterator[Client]:
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


@pytest.mark.parametrize(
    ("headers", "status", "message"),
    [
        ({"content_encoding": "gzip"}, 415, "the content encoding is 'gzip'"),
        ({"content_encoding": "br"}, 415, "the content encoding is 'br'"),
        ({"content_type": "text/plain"}, 415, "the content type is 'text/plain'"),
        ({"content_type": "application/x-www-form-urlencoded"}, 415, "the content type is"),
        ({"inference_header_content_length": "-1"}, 400, "no number of bytes: '-1'"),
        ({"inference_header_content_length": "1_0"}, 400, "no number of bytes: '1_0'"),
        ({"inference_header_content_length": "ten"}, 400, "no number of bytes: 'ten'"),
        ({"inference_header_content_length": ""}, 400, "no number of bytes: ''"),
        ({"inference_header_content_length": "9" * 30}, 400, "no number of bytes"),
        ({"inference_header_content_length": "9" * 19}, 400, "is larger than the body"),
        ({"inference_header_content_length": "0"}, 400, "the request cannot be read as JSON"),
        ({"inference_header_content_length": "20"}, 400, "the request cannot be read as JSON"),
    ],
)
def test_headers_that_are_wrong(client, headers, status, message):
    response = client.infer(request(), **headers)
    assert (response.status_code, message in response.json()["error"]) == (status, True), response.text


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "APPLICATION/JSON", ""])
def test_content_types_that_are_right(client, kind):
    assert client.infer(request(), content_type=kind).status_code == 200


def test_a_web_page_cannot_send_bytes_without_a_type(client):
    response = client.infer(request(), origin="http://elsewhere.example")
    assert (response.status_code, response.json()["error"]) == (
        415,
        "there is no content type; send application/json or application/octet-stream",
    )


async def pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 1000):
        yield body[start : start + 1000]


def test_a_body_in_chunks_has_the_same_limit(engine):
    with client_of(engine, Limits(body_bytes=5000)) as client:
        for rows, status in ((1, 200), (100, 413)):
            response = client.call(
                "POST", INFER, content=pieces(request(rows)), headers={"transfer-encoding": "chunked"}
            )
            assert response.status_code == status
        assert client.infer(request(100)).status_code == 413


def test_a_batch_that_the_engine_was_not_built_for_is_the_clients_mistake(client):
    for rows in (0, 5000):
        response = client.infer(request(rows))
        assert response.status_code == 400
        assert "the request is not a batch that the engine was built for" in response.json()["error"]


def test_an_engine_that_fails_is_our_mistake_and_is_tested_again(engine, monkeypatch, caplog):
    def fail(inputs: object) -> None:
        raise EngineError("the device is gone")

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
    def fail(inputs: object) -> None:
        raise ZeroDivisionError("/secret/path")

    with client_of(engine) as client:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "infer", fail)
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


def test_more_requests_than_fit_are_refused_at_once(engine, monkeypatch):
    with client_of(engine, Limits(waiting=3), threads=1) as client:
        with held(engine, monkeypatch) as go:
            responses = client.together(8, request(), go.set)
        assert sorted(r.status_code for r in responses) == [200] * 3 + [503] * 5
        refused = next(r for r in responses if r.status_code == 503)
        assert "3 requests wait or run" in refused.json()["error"]
        assert refused.headers["retry-after"] == "1"
        assert client.infer(request()).status_code == 200


def test_bodies_that_are_held_are_bounded(engine, monkeypatch):
    size = len(request())
    with client_of(engine, Limits(held_bytes=2 * size + 1), threads=1) as client:
        with held(engine, monkeypatch) as go:
            responses = client.together(5, request(), go.set)
        assert sorted(r.status_code for r in responses) == [200] * 2 + [503] * 3
        assert client.infer(request()).status_code == 200


def test_a_probe_does_not_wait_behind_requests(engine, monkeypatch):
    monkeypatch.setattr(server, "HEALTH_SECONDS", 0.0)
    found = []
    with client_of(engine, threads=1) as client, held(engine, monkeypatch) as go:

        def probe() -> None:
            thread = threading.Thread(target=lambda: found.append(client.get("/v2/health/ready").status_code))
            thread.start()
            thread.join(5)
            go.set()

        client.together(3, request(), probe)
    assert found == [200]


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
    assert samples["loka_onnx_serve_answers_total", "200"] == 2
    assert samples["loka_onnx_serve_answers_total", "400"] == 1
    assert samples["loka_onnx_serve_answers_total", "404"] == 1
    assert samples["loka_onnx_serve_waiting", None] == 0
    assert samples["loka_onnx_serve_seconds_count", None] == 4
    assert samples["loka_onnx_rows_total", None] == 6, "the engine's own are there too"


def test_a_self_test_counts_for_a_while(engine, monkeypatch):
    tests = []
    health = engine.health
    monkeypatch.setattr(engine, "health", lambda: (tests.append(1), health())[1])
    with client_of(engine) as client:
        for _ in range(5):
            assert client.get("/v2/health/ready").status_code == 200
        assert len(tests) == 1
        monkeypatch.setattr(server, "HEALTH_SECONDS", 0.0)
        client.get("/v2/health/ready")
        assert len(tests) == 2


MIB = 1 << 20


@dataclass(frozen=True)
class Running:
    server: uvicorn.Server
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self, data: bytes = b"") -> socket.socket:
        found = socket.create_connection(("127.0.0.1", self.port), timeout=5)
        found.sendall(data)
        return found

    def connections(self) -> int:
        return len(self.server.server_state.connections)


@contextmanager
def running(engine: Engine, limits: Limits) -> Iterator[Running]:
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
    try:
        while piece := connection.recv(1 << 16):
            found += piece
    except ConnectionResetError:
        pass
    return found


def post(body: bytes, *headers: str) -> bytes:
    lines = ["POST /v2/models/ranker/infer HTTP/1.1", "Host: x", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def infer(rows: int = 1, **more: Any) -> bytes:
    tensor = {"name": "dense", "shape": [rows, 16], "datatype": "FP32", "data": [0.5] * 16 * rows}
    body = json.dumps({"inputs": [tensor], **more}).encode()
    return post(body, f"Content-Length: {len(body)}")


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
    with running(engine, Limits(body_bytes=MIB, body_seconds=0.2)) as server, server.connect(data) as client:
        found = all_of(client)
        assert found.startswith(f"HTTP/1.1 {status} ".encode()) and b"\r\nconnection: close\r\n" in found
        assert found.count(b"HTTP/1.1") == 1


def test_who_sends_too_much_is_told_so_and_not_reset(engine):
    with running(engine, Limits(body_bytes=MIB)) as server:
        response = httpx.post(f"{server.url}/v2/models/ranker/infer", content=bytes(20 * MIB), timeout=10)
        assert response.status_code == 413


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
    with running(engine, Limits(closing_seconds=0.3)) as it:
        connection = it.connect(sent)
        wait_until(lambda: it.connections() == 1 or b"no http" in sent)
        time.sleep(0.2)
        began = time.monotonic()
        it.server.should_exit = True
    assert time.monotonic() - began < 10
    connection.close()
    assert caplog.text == "" and "Traceback" not in capfd.readouterr().err


WITHOUT = """
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"starlette", "uvicorn", "prometheus_client"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
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
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("a package of the server is not installed\n")
    assert done.stdout.endswith("  remedy: pip install 'loka-onnx[serve]'\n")


@pytest.mark.parametrize("name", ["a/b", "/", ".", ".."])
def test_a_name_that_is_no_part_of_a_path_is_refused(bundle: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' cannot be the name of a model"):
        serve(bundle, ServeOptions(name=name), never)


def test_an_address_that_is_taken_is_found_before_the_bundle_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"cannot listen on 127.0.0.1, port {port}\n  evidence: .*in use"
        ):
            serve(Path("nowhere"), ServeOptions(port=port), never)
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1, port 8000"):
        serve(Path("nowhere"), ServeOptions(host="192.0.2.1"), never)


def test_trust_and_keys_go_to_the_loader(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(path: Path, **more: object) -> None:
        asked.append((path, more))
        raise EngineError("enough")

    monkeypatch.setattr(server, "load", load)
    with pytest.raises(EngineError, match="enough"):
        serve(bundle, ServeOptions(port=0, trust=True, keys=(Path("a.pub"),)), never)
    assert asked == [(bundle, {"trust": True, "keys": (Path("a.pub"),)})]

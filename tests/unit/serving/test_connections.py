"""Bodies that are refused and connections that stand still, over real sockets."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn

from loka_onnx.runtime import Engine
from loka_onnx.serving.server import Limits, make_app, make_server

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

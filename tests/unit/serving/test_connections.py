"""Clients that stand still, over real sockets: half a head, a body behind its answer, an answer not taken."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn

from loka_onnx.runtime import Engine
from loka_onnx.serving.app import Workers, make_app
from loka_onnx.serving.bodies import Limits
from loka_onnx.serving.model import ServedModel
from loka_onnx.serving.server import ServeOptions, _server

QUICK = Limits(head_seconds=0.4, answer_seconds=0.4)
MIB = 1 << 20


@dataclass(frozen=True)
class Running:
    server: uvicorn.Server
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self, data: bytes = b"", buffer: int = 0) -> socket.socket:
        found = socket.socket()
        if buffer:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        found.settimeout(5)
        found.connect(("127.0.0.1", self.port))
        found.sendall(data)
        return found

    def connections(self) -> int:
        return len(self.server.server_state.connections)

    def live(self) -> int:
        return httpx.get(f"{self.url}/v2/health/live", timeout=5).status_code


@contextmanager
def running(engine: Engine, limits: Limits) -> Iterator[Running]:
    with Workers(2) as workers, socket.create_server(("127.0.0.1", 0)) as listener:
        app = make_app(ServedModel(engine, "ranker"), workers, limits)
        server = _server(app, ServeOptions(limits=limits))
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


@pytest.mark.parametrize("data", [b"", b"GET /v2 HTTP/1.1\r\nHo", infer() + b"GET /v2"])
def test_a_head_that_does_not_end_is_ended(engine: Engine, data: bytes) -> None:
    with running(engine, QUICK) as server, server.connect(data) as slow:
        if data.startswith(b"POST"):
            assert slow.recv(12) == b"HTTP/1.1 200"
            slow.sendall(b"x")
        began = time.monotonic()
        assert b"HTTP" not in all_of(slow)
        assert time.monotonic() - began < 3
        wait_until(lambda: not server.connections())


def test_bytes_one_at_a_time_do_not_put_off_the_end(engine: Engine) -> None:
    drips = {
        "a head": b"GET /v2 HTTP/1.1\r\nX: ",
        "a body that nobody reads": b"GET /v2 HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n",
    }
    with running(engine, QUICK) as server:
        for start in drips.values():
            with server.connect(start) as slow:
                end = time.monotonic() + 4
                with pytest.raises(OSError):
                    while time.monotonic() < end:
                        slow.sendall(b"a")
                        time.sleep(0.05)
                wait_until(lambda: not server.connections())


def test_half_heads_do_not_keep_others_out(engine: Engine) -> None:
    with running(engine, Limits(connections=8)) as server, ExitStack() as stack:
        half = [stack.enter_context(server.connect(b"GET /v2 HTT")) for _ in range(30)]
        assert server.live() == 200
        assert server.connections() <= 8
        assert all_of(half[0]) == b"", "the oldest made room"


def test_a_connection_too_many_is_told_when_all_work(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    go, original = threading.Event(), engine.infer

    def wait(inputs: Any) -> Any:
        assert go.wait(10)
        return original(inputs)

    monkeypatch.setattr(engine, "infer", wait)
    with running(engine, Limits(connections=2)) as server, ExitStack() as stack:
        working = [stack.enter_context(server.connect(infer())) for _ in range(2)]
        wait_until(lambda: len(server.server.server_state.tasks) == 2)
        refused = httpx.get(f"{server.url}/v2/health/live")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json() == {"error": "all connections of this server work"}
        go.set()
        assert all(each.recv(12) == b"HTTP/1.1 200" for each in working)


def large_answers(engine: Engine, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    value = {"ctr": np.zeros((size // 4, 1), np.float32)}
    monkeypatch.setattr(engine, "infer", lambda inputs: value)


BINARY = infer(parameters={"binary_data_output": True})
LAST = BINARY.replace(b"Host: x", b"Host: x\r\nConnection: close")


def test_an_answer_that_is_not_taken_is_held_within_the_limit_and_given_up(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    large_answers(engine, monkeypatch, 8 * MIB)
    limits = Limits(held_bytes=40 * MIB, answer_seconds=1.0)
    with running(engine, limits) as server, ExitStack() as stack:
        deaf = [stack.enter_context(server.connect(BINARY, 4096)) for _ in range(2)]
        wait_until(lambda: all(each.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 200" for each in deaf))
        with server.connect(LAST) as late:
            found = all_of(late)
            assert found.startswith(b"HTTP/1.1 503") and b"answers of" in found
        wait_until(lambda: not server.connections())
        with server.connect(LAST) as reader:
            assert len(all_of(reader)) > 8 * MIB, "room again, and a client that reads gets all"


def test_clients_that_leave_their_answer_give_back_its_room(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    large_answers(engine, monkeypatch, 8 * MIB)
    with running(engine, Limits(held_bytes=20 * MIB)) as server:
        for _ in range(3):
            with server.connect(BINARY, 4096) as deaf:
                assert deaf.recv(12) == b"HTTP/1.1 200"
            wait_until(lambda: not server.connections())


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (post(b"ab", "Content-Length: 9999"), 408),
        (post(b""), 411),
        (post(b"a" * 3000, "Content-Length: 2000000"), 413),
        (post(b"0\r\n\r\n", "Content-Length: 5", "Transfer-Encoding: chunked"), 400),
    ],
)
def test_a_connection_whose_next_request_is_in_doubt_is_closed(
    engine: Engine, data: bytes, status: int
) -> None:
    with running(engine, Limits(body_bytes=MIB, body_seconds=0.2)) as server, server.connect(data) as client:
        found = all_of(client)
        assert found.startswith(f"HTTP/1.1 {status} ".encode()) and b"\r\nconnection: close\r\n" in found
        assert found.count(b"HTTP/1.1") == 1


def test_who_sends_too_much_is_told_so_and_not_reset(engine: Engine) -> None:
    with running(engine, Limits(body_bytes=MIB)) as server:
        response = httpx.post(f"{server.url}/v2/models/ranker/infer", content=bytes(20 * MIB), timeout=10)
        assert response.status_code == 413


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /v2/health/live HTT",
        b"no http at all\r\n\r\n",
        b"POST /v2/models/ranker/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{",
        b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
    ids=["nothing", "half a head", "no http", "half a body", "an answer"],
)
def test_no_connection_holds_up_the_end_or_fills_the_log(
    engine: Engine, sent: bytes, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
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


def test_a_body_that_comes_while_the_server_ends_is_answered(engine: Engine) -> None:
    body = infer()
    with running(engine, Limits(closing_seconds=5.0)) as it, it.connect(body[:-10]) as connection:
        wait_until(lambda: it.connections() == 1)
        time.sleep(0.2)
        it.server.should_exit = True
        time.sleep(0.3)
        connection.sendall(body[-10:])
        assert b"200 OK" in all_of(connection)

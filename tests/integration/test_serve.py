"""`loka-onnx bundle serve` in a process of its own, called by tritonclient, curl, and who means harm."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import onnx
import pytest
import tritonclient.http as triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx_text import parsed
from tritonclient.utils import InferenceServerException

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.pipeline.serve_soak import MOST_GROWTH, SERVE, Served, make_bundle, served, soak
from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.export.onnx_model import import_onnx
from loka_onnx.runtime import Engine, load

DOCS = Path(__file__).parents[2] / "docs" / "serving.md"
ITEMS, NUMBERS = 50, 8


def write_ranker(path: Path) -> None:
    """numbers (B, 8) and item (B,), as the ranker of the README, → ctr (B,) and parts (B, 3)."""
    random = np.random.default_rng(0)
    model = parsed(
        "looked_up = Gather(table, item) joined = Concat<axis=1>(numbers, looked_up)"
        "[fc] parts = MatMul(joined, w) ctr = ReduceSum<keepdims=0>(parts, one)",
        {
            "table": random.standard_normal((ITEMS, 16)),
            "w": random.standard_normal((16 + NUMBERS, 3)),
            "one": np.array([1]),
        },
        inputs=f"float[batch,{NUMBERS}] numbers, int64[batch] item",
        outputs="float[batch] ctr, float[batch,3] parts",
    )
    onnx.save(model, path)


def rows(count: int, seed: int = 3) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "numbers": random.standard_normal((count, NUMBERS)).astype(np.float32),
        "item": random.integers(0, ITEMS, count),
    }


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("served")
    write_ranker(place / "ranker.onnx")
    judged = OutputSpec("ctr", OutputKind.LOGIT, "clicked")
    artifact = import_onnx(place / "ranker.onnx", place / "model.onnx", (judged,))
    return make_bundle(artifact, judged, rows(16), place / "bundle")


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Served]:
    with served(bundle, "--max-body-mb", "1") as found:
        yield found


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Iterator[Engine]:
    with load(bundle) as found:
        yield found


@pytest.fixture
def client(server: Served) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.host) as found:
        yield found


def tensors(request: dict[str, np.ndarray], binary: bool = True) -> list[triton.InferInput]:
    kinds = {"numbers": "FP32", "item": "INT64"}
    found = [triton.InferInput(name, list(value.shape), kinds[name]) for name, value in request.items()]
    return [t.set_data_from_numpy(request[t.name()], binary_data=binary) for t in found]


def check(answer: triton.InferResult, expected: dict[str, np.ndarray]) -> None:
    for name, value in expected.items():
        got = answer.as_numpy(name)
        assert (got.dtype, got.shape, got.tobytes()) == (value.dtype, value.shape, value.tobytes())


@pytest.mark.parametrize("count", [1, 7, 64, 1000])
@pytest.mark.parametrize(("sent", "returned"), [(True, True), (True, False), (False, True), (False, False)])
def test_answers_are_those_of_the_runtime(client, engine, count, sent, returned):
    request = rows(count)
    outputs = [triton.InferRequestedOutput(name, binary_data=returned) for name in ("parts", "ctr")]
    answer = client.infer("bundle", tensors(request, sent), outputs=outputs, request_id="a 1")
    check(answer, engine.infer(request))
    response = answer.get_response()
    assert response["id"] == "a 1"
    assert [output["name"] for output in response["outputs"]] == ["parts", "ctr"]


def test_the_client_as_it_comes(client, engine):
    request = rows(5)
    for packing in (None, "gzip", "deflate"):
        answer = client.infer(
            "bundle", tensors(request), "1", response_compression_algorithm=packing, timeout=1000, priority=2
        )
        check(answer, engine.infer(request))
    one = client.infer("bundle", tensors(request), outputs=[triton.InferRequestedOutput("ctr")])
    assert one.as_numpy("parts") is None
    later = [client.async_infer("bundle", tensors(request)) for _ in range(3)]
    for pending in later:
        check(pending.get_result(), engine.infer(request))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t[:1], "inputs are missing\n  evidence: item"),
        (lambda t: [t[0].set_shape([2, 8]), t[1]], "the shape [2, 8] takes 64 bytes"),
    ],
)
def test_the_client_is_told_what_is_wrong(client, spoil, message):
    with pytest.raises(InferenceServerException) as caught:
        client.infer("bundle", spoil(tensors(rows(1))))
    assert (caught.value.status(), message in caught.value.message()) == ("400", True), caught.value
    with pytest.raises(InferenceServerException, match="there is no model 'other' here"):
        client.infer("other", tensors(rows(1)))


def test_values_that_the_engine_fails_on(client, server, engine):
    request = rows(2) | {"item": np.array([1, 10**9])}
    with pytest.raises(InferenceServerException) as caught:
        client.infer("bundle", tensors(request))
    assert caught.value.status() == "500"
    assert_well(server, engine)


def assert_well(server: Served, engine: Engine) -> None:
    """The next good request is answered, and the process is the same."""
    assert server.process.poll() is None
    request = rows(2)
    document = {
        "inputs": [
            {"name": "numbers", "shape": [2, 8], "datatype": "FP32", "data": request["numbers"].tolist()},
            {"name": "item", "shape": [2], "datatype": "INT64", "data": request["item"].tolist()},
        ]
    }
    response = httpx.post(f"{server.url}/infer", json=document, timeout=10)
    assert response.status_code == 200
    expected = engine.infer(request)
    assert response.json()["outputs"][0]["data"] == expected["ctr"].tolist()


def raw(server: Served, data: bytes, *, half_close: bool = False, wait: float = 5.0) -> bytes:
    """What the server says to these bytes; empty where it closes the connection without a word."""
    host, _, port = server.host.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=wait) as connection:
        connection.sendall(data)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        found = b""
        try:
            while b"\r\n\r\n" not in found and (piece := connection.recv(65536)):
                found += piece
        except (TimeoutError, ConnectionResetError):
            pass
        return found


def post(body: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = ["POST /v2/models/bundle/infer HTTP/1.1", "Host: x", *headers]
    if length != -1:
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


GOOD = b'{"inputs":[]}'
BROKEN = {
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00" + b"\r\n\r\n", 400),
    "a negative length": (post(GOOD, "Content-Length: -5", length=-1), 400),
    "two lengths": (post(GOOD, "Content-Length: 5"), 400),
    "a length of thirty digits": (post(b"", length=10**30), 400),
    "a bad chunk": (post(b"zz\r\n", "Transfer-Encoding: chunked", length=-1), 400),
    "a head without end": (b"GET /" + b"a" * 200_000, 400),
    "a NUL in the path": (b"GET /v2/models/\0 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "an odd path": (b"GET /v2/models/%ff%00%2e%2e HTTP/1.1\r\nHost: x\r\n\r\n", 404),
    "no such method": (b"BREW /v2 HTTP/1.1\r\nHost: x\r\n\r\n", 405),
    "a websocket": (b"GET /v2 HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n", 200),
    "a header of other digits": (post(GOOD, "Inference-Header-Content-Length: \xb2"), 400),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_gets_its_status(server, engine, name):
    data, status = BROKEN[name]
    assert raw(server, data).startswith(f"HTTP/1.1 {status} ".encode())
    assert_well(server, engine)


def test_a_body_that_is_cut_off_leaves_nothing(server, engine):
    for half_close in (True, False):
        raw(server, post(GOOD, length=1000), half_close=half_close, wait=0.2)
    assert_well(server, engine)
    metrics = httpx.get(f"http://{server.host}/metrics").text
    assert "loka_onnx_serve_waiting 0.0" in metrics


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(min_size=1, max_size=500))
def test_random_bytes_in_place_of_http_are_refused_or_ignored(server, data):
    found = raw(server, data + b"\r\n\r\n", wait=0.2)
    assert found == b"" or re.match(rb"HTTP/1.1 4\d\d ", found)


def test_curl_as_documented(server, engine):
    blocks = re.findall(r"^```console\n\$ (curl .*?)^```$", DOCS.read_text(encoding="utf-8"), re.S | re.M)
    assert len(blocks) == 1
    command = blocks[0].replace("127.0.0.1:8000", server.host)
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True, timeout=30)
    answer = json.loads(done.stdout)
    numbers = np.array([[0.1, -0.2, 0.3, 0.4, -0.5, 0.6, 0.7, 0.8], [1, 0, 0, 0, 0, 0, 0, 0]], np.float32)
    expected = engine.infer({"numbers": numbers, "item": np.array([7, 12])})["ctr"]
    assert (answer["id"], answer["outputs"][0]["data"]) == ("42", expected.tolist())


@pytest.mark.slow
def test_python_as_documented(server, engine, capsys):
    (code,) = re.findall(r"^```python\n(.*?)^```$", DOCS.read_text(encoding="utf-8"), re.S | re.M)
    exec(compile(code.replace("127.0.0.1:8000", server.host), os.fspath(DOCS), "exec"), {})
    inputs = {"numbers": np.zeros((2, 8), np.float32), "item": np.array([7, 12])}
    assert capsys.readouterr().out == f"{engine.infer(inputs)['ctr']}\n"


@pytest.mark.slow
def test_a_signal_ends_it_once_its_requests_are_answered(bundle, tmp_path):
    found: list[int] = []
    with served(bundle, "--name", "my ranker") as server:
        assert server.url.endswith("/v2/models/my%20ranker")
        body = b'{"inputs":[{"name":"item","shape":[1],"datatype":"INT64","data":[1]},' + (
            b'{"name":"numbers","shape":[1,8],"datatype":"FP32","data":[0,0,0,0,0,0,0,0]}]}'
        )
        host, _, port = server.host.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10) as slow:
            head = post(b"", length=len(body)).replace(b"bundle", b"my%20ranker")
            slow.sendall(head + body[:40])
            time.sleep(0.2)
            server.process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline and not found:
                with socket.socket() as probe:
                    if probe.connect_ex((host, int(port))):
                        found.append(1)
                time.sleep(0.05)
            slow.sendall(body[40:])
            assert slow.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert server.process.wait(10) == 0
    assert found, "no new connection is taken meanwhile"


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_it_at_once_and_without_a_traceback(bundle, times):
    """A body that stands still has a second, and a second Ctrl-C changes nothing."""
    command = [sys.executable, "-c", SERVE, str(bundle), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        port = int(re.findall(r"127\.0\.0\.1:(\d+)", process.stdout.readline())[0])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as stuck:
            stuck.sendall(post(b"{", length=1000))
            time.sleep(0.3)
            for _ in range(times):
                process.send_signal(signal.SIGINT)
                time.sleep(0.3)
            assert stuck.recv(65536).startswith(b"HTTP/1.1 408 ")
        _, log = process.communicate(timeout=10)
        assert (process.returncode, "Traceback" in log) == (0, False), log
    finally:
        process.kill()


@pytest.mark.slow
def test_many_clients_at_once(bundle):
    """The benchmark's soak, shorter; that one runs for a minute (`benchmarks/records/serve_soak.json`)."""
    with served(bundle) as server:
        answers, memory = soak(server, bundle, clients=64, seconds=8)
    assert (answers.wrong, answers.errors) == (0, 0), answers
    assert min(answers.count.values()) > 64 and len(answers.count) == 2
    assert memory.growth(memory.anonymous_mib, 4) <= MOST_GROWTH

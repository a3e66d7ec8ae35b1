"""A registry in S3: s3fs and its real HTTP client against moto's S3 behind a socket of this process.

moto's own server needs Flask. Its request handlers do not: they are handed what arrives on the socket.
"""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from altered import tree, with_files
from botocore.awsrequest import AWSPreparedRequest
from botocore.compat import HTTPHeaders
from moto.core.botocore_stubber import BotocoreStubber

from loka_onnx.bundle.registry import TransferOptions, list_names, pull_bundle, push_bundle

pytestmark = pytest.mark.slow

_LOCK = threading.Lock()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    requests: ClassVar[list[tuple[str, str]]] = []
    broken: ClassVar[list[int]] = []
    """Statuses to answer next instead, last first."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.requests.append((self.command, self.path))
        if self.broken:
            status, headers, content = self.broken.pop(), {}, b""
        else:
            passed = HTTPHeaders()
            for key, value in self.headers.items():
                passed[key] = value
            # Path-style addresses on the name that moto knows.
            url = f"http://s3.amazonaws.com{self.path}"
            request = AWSPreparedRequest(self.command, url, passed, body, stream_output=False)
            with _LOCK:
                answer = BotocoreStubber().process_request(request)
            assert answer is not None
            status, headers, content = answer
        content = content.encode() if isinstance(content, str) else bytes(content)
        self.send_response(status)
        for key, value in headers.items():
            if key.lower() not in {"content-length", "connection", "transfer-encoding", "date", "server"}:
                self.send_header(key, str(value))
        length = headers.get("content-length", len(content)) if self.command == "HEAD" else len(content)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer

    def log_message(self, *_: object) -> None:
        return


@contextlib.contextmanager
def s3_server() -> Iterator[tuple[str, type[_Handler]]]:
    """Its address, and its handler, which counts and breaks requests."""
    _Handler.requests, _Handler.broken = [], []
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", _Handler
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def s3(monkeypatch, small_parts):
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    # Nothing of the machine's own account is looked for.
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with s3_server() as (address, handler):
        storage = {
            "key": "AKIATEST",
            "secret": "s3cr3t",
            "client_kwargs": {"endpoint_url": address},
            "skip_instance_cache": True,
        }
        import s3fs

        s3fs.S3FileSystem(**storage).mkdir("models")
        yield TransferOptions(threads=4, storage=storage), handler
        import moto.backends

        moto.backends.get_backend("s3").reset()


@pytest.fixture
def one(original: Path, tmp_path: Path) -> Path:
    return with_files(original, tmp_path / "one", (35_000, 100, 0), seed=1)


def test_push_pull_and_retry(one, s3, tmp_path):
    options, handler = s3
    url = "s3://models/ranker"
    pushed = push_bundle(one, f"{url}#prod", options)
    puts = [path for verb, path in handler.requests if verb == "PUT" and "blobs" in path]
    assert len(set(puts)) == len(puts) == pushed.sent_parts
    handler.requests.clear()
    assert push_bundle(one, f"{url}#prod", options).sent_parts == 0
    assert not [path for verb, path in handler.requests if verb == "PUT" and "blobs" in path]
    assert [(n.name, n.digest) for n in list_names(url, options)] == [("prod", pushed.digest)]
    handler.broken += [503, 500]
    pulled = pull_bundle(f"{url}#prod", tmp_path / "x", options)
    assert tree(pulled.directory) == tree(one)
    assert not handler.broken

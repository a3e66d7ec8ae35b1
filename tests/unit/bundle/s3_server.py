"""An S3 server in this process: moto's S3 behind an HTTP socket.

moto's own server needs Flask. Its request handlers do not: this hands them what arrives on the socket.
"""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

from botocore.awsrequest import AWSPreparedRequest
from botocore.compat import HTTPHeaders
from moto.core.botocore_stubber import BotocoreStubber

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
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", _Handler
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

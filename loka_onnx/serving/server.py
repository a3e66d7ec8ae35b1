"""Serving one bundle until a signal ends it."""

from __future__ import annotations

import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from loka_onnx.bundle.format.names import name_of
from loka_onnx.errors import ConfigError, MissingPackage
from loka_onnx.runtime import load
from loka_onnx.serving.app import Workers, make_app
from loka_onnx.serving.bodies import Limits
from loka_onnx.serving.connections import http_protocol
from loka_onnx.serving.model import ServedModel
from loka_onnx.sessions.streams import stream_count

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette

BACKLOG = 1024
"""Most connections that come at once; asyncio accepts as many before it handles the first."""
GRACE_SECONDS = 30
"""How long running requests may take to their end once a signal came."""
_NO_NAMES = frozenset({"", ".", "..", "stats"})
"""Clients take the dots out of a path, and `/v2/models/stats` is the statistics of all models."""
KEEP_ALIVE_SECONDS = 75
"""Longer than load balancers keep a connection that idles (60 s), so that they never find it closed."""


@dataclass(frozen=True)
class ServeOptions:
    """Options of serving a bundle.

    Attributes:
        host: Address to listen on.
        port: Port; 0 for any that is free.
        trust: Whether the bundle's programs may run on this host.
        keys: Public keys; a bundle signed with one of them is trusted.
        threads: Requests that run at once; 0 for one a core.
        limits: What is taken on at once.
        name: What the model is called in URLs; the bundle's own name where empty.
        access_log: Whether each request is logged to standard error.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    trust: bool = False
    keys: tuple[Path, ...] = ()
    threads: int = 0
    limits: Limits = field(default_factory=Limits)
    name: str = ""
    access_log: bool = False


@dataclass(frozen=True)
class Ready:
    """A server that takes requests.

    Attributes:
        url: URL of the model.
        engine: Id of its engine.
    """

    url: str
    engine: str


def serve(bundle: Path, options: ServeOptions, on_ready: Callable[[Ready], None]) -> None:
    """Serves a bundle until SIGINT or SIGTERM, then finishes the requests that are under way.

    To be called in the main thread, which signals reach.

    Args:
        bundle: The bundle.
        options: How.
        on_ready: Called once when requests are taken.

    Raises:
        BundleInvalid: The bundle does not verify.
        EngineError: Nothing in it runs here.
        ConfigError: The address cannot be listened on, the name does not fit into a URL, or the protocol
            cannot carry an input or output.
        MissingPackage: The packages of a server are not installed.
    """
    _check_packages()
    name = _name(bundle, options.name)
    with (
        closing(_bound(options.host, options.port)) as listener,
        load(bundle, trust=options.trust, keys=options.keys) as engine,
        Workers(stream_count(options.threads)) as workers,
    ):
        server = _server(make_app(ServedModel(engine, name), workers, options.limits), options)
        listener.listen(_share(BACKLOG, 4))
        with _ended_by_signals(server):
            port = listener.getsockname()[1]
            host = f"[{options.host}]" if ":" in options.host else options.host
            url = f"http://{host}:{port}/v2/models/{quote(name)}"
            on_ready(Ready(url, engine.entry.id))
            server.run(sockets=[listener])


def _name(bundle: Path, wanted: str) -> str:
    name = wanted or name_of(bundle)
    if name in _NO_NAMES or "/" in name:
        raise ConfigError(f"'{name}' cannot be the name of a model", remedy="give another one with --name")
    return name


def _share(wanted: int, part: int) -> int:
    """So many of the files that this process may open, at most: without one nothing is answered at all.

    Args:
        wanted: How many are wanted.
        part: They are the limit's `part`-th part at most.
    """
    import resource

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if files == resource.RLIM_INFINITY else max(1, min(wanted, files // part))


def _server(app: Starlette, options: ServeOptions) -> uvicorn.Server:
    import uvicorn

    if options.access_log:
        log = logging.getLogger("uvicorn.access")
        log.setLevel(logging.INFO)
        log.addHandler(logging.StreamHandler(sys.stderr))
    limits = replace(options.limits, connections=_share(options.limits.connections, 2))
    return uvicorn.Server(
        uvicorn.Config(
            app,
            # Of h11: what is installed beside must not decide which parser reads strangers' bytes.
            http=http_protocol(limits),
            backlog=_share(BACKLOG, 4),
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            # Below an error it logs every request that is no HTTP.
            log_level=None if options.access_log else "error",
            access_log=options.access_log,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
    )


def _bound(host: str, port: int) -> socket.socket:
    """A socket that has the address, before a bundle is loaded for nothing; it does not listen yet."""
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        return listener
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(
            f"cannot listen on {host}, port {port}",
            evidence=str(error),
            remedy="choose another --port (0 for any that is free) or --host",
        ) from error


@contextmanager
def _ended_by_signals(server: uvicorn.Server) -> Iterator[None]:
    """Also by one that comes before the server handles them, or that it raises again at its end."""

    def end(number: int, frame: object) -> None:
        server.should_exit = True

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_packages() -> None:
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingPackage(
            "a package of the server is not installed",
            evidence=str(error),
            remedy="pip install 'loka-onnx[serve]'",
        ) from error

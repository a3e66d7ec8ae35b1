"""Serving one bundle until a signal ends it."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from loka_onnx.bundle.format.archive import name_of
from loka_onnx.errors import ConfigError, MissingPackage
from loka_onnx.runtime import load
from loka_onnx.serving.app import Limits, make_app
from loka_onnx.sessions.runner import stream_count

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette

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
    limits: Limits = field(default_factory=Limits)
    name: str = ""
    access_log: bool = False


def serve(bundle: Path, options: ServeOptions, on_ready: Callable[[str, str], None]) -> None:
    """Serve a bundle until SIGINT or SIGTERM, then finish the requests under way; for the main thread.

    `on_ready` is called with the URL of the model and the id of its engine once requests are taken.

    Raises:
        BundleInvalid: The bundle does not verify.
        EngineError: None of its engines runs here.
        ConfigError: The address cannot be listened on, the name does not fit into a URL, or the protocol
            cannot carry an input or output.
        MissingPackage: The packages of a server are not installed.
    """
    with MissingPackage(
        "E1427 a package of the server is not installed", remedy="pip install 'loka-onnx[serve]'"
    ).in_place_of(ImportError):
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    name = options.name or name_of(bundle)
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

"""`loka-onnx bundle serve`: a bundle behind HTTP, for trying it out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from loka_onnx.cli.terminal import terminal_of
from loka_onnx.serving.app import Limits
from loka_onnx.serving.server import ServeOptions
from loka_onnx.serving.server import serve as run_server

_MIB = 1 << 20
_HELD_BODIES = 4
"""Bodies of the largest size that are held at once."""


def serve(  # noqa: PLR0913, PLR0917 - typer reads one parameter for each option
    context: typer.Context,
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="The bundle.", show_default=False)],
    host: Annotated[
        str, typer.Option(help="Address to listen on; there is no authentication.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any that is free.")] = 8000,
    trust: Annotated[bool, typer.Option("--trust", help="Run programs that the bundle holds.")] = False,
    key: Annotated[
        list[Path] | None,
        typer.Option(metavar="PUB", help="Run them if this public key signed the bundle; may be repeated."),
    ] = None,
    threads: Annotated[int, typer.Option(min=0, help="Requests that run at once; 0 for one a core.")] = 0,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Largest request, in MiB.")] = 64,
    max_waiting: Annotated[
        int, typer.Option(min=1, help="Requests that wait or run; more are refused with 503.")
    ] = 256,
    name: Annotated[
        str, typer.Option(help="What the model is called in URLs; as the bundle.", show_default=False)
    ] = "",
    access_log: Annotated[bool, typer.Option("--access-log", help="Log each request.")] = False,
) -> None:
    """Serve a bundle over HTTP in the open inference protocol v2 until Ctrl-C or SIGTERM."""
    terminal = terminal_of(context)
    body_bytes = max_body_mb * _MIB
    options = ServeOptions(
        host=host,
        port=port,
        trust=trust,
        keys=tuple(key or ()),
        threads=threads,
        limits=Limits(body_bytes, _HELD_BODIES * body_bytes, max_waiting),
        name=name,
        access_log=access_log,
    )

    def announce(url: str, engine: str) -> None:
        terminal.out.print(Text(f"ready: {url} (engine {engine}; Ctrl-C ends it)"), soft_wrap=True)

    run_server(bundle, options, announce)

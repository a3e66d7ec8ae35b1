"""`loka-onnx bundle`: checking and describing what is deployed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from loka_onnx.bundle import inspect_bundle, verify_bundle
from loka_onnx.cli.outcome import shown
from loka_onnx.cli.terminal import terminal_of

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The bundle.", show_default=False)]

bundle = typer.Typer(no_args_is_help=True, help="Verify or inspect a bundle.", rich_markup_mode=None)


@bundle.command()
def verify(context: typer.Context, directory: Directory) -> None:
    """Check every file of a bundle against its manifest; exit with 3 if it does not verify."""
    manifest = verify_bundle(directory)
    terminal_of(context).out.print(
        Text(f"{shown(directory)}: verified, {len(manifest.files)} files, {manifest.total_bytes:,} bytes"),
        soft_wrap=True,
    )


@bundle.command()
def inspect(context: typer.Context, directory: Directory) -> None:
    """Verify a bundle and describe its engines, inputs, outputs and files."""
    terminal_of(context).out.print(Text(inspect_bundle(directory)), soft_wrap=True, end="")

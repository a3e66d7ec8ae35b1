"""`loka-onnx bundle diff`: what differs between two bundles."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from loka_onnx.cli.terminal import terminal_of
from loka_onnx.core import serde
from loka_onnx.operations.compare.bundle_text import bundles_view
from loka_onnx.operations.compare.bundles import diff_bundles
from loka_onnx.operations.compare.difference import print_difference

DIFFERENT = 3
"""Exit code of two bundles that differ, where it was asked for: a check that did not hold."""


class Format(StrEnum):
    """Formats of the result."""

    TEXT = "text"
    JSON = "json"


def diff(
    context: typer.Context,
    a: Annotated[Path, typer.Argument(metavar="A", help="The one bundle.", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B", help="The other.", show_default=False)],
    form: Annotated[Format, typer.Option("--format", help="JSON has everything.")] = Format.TEXT,
    everything: Annotated[bool, typer.Option("--all", help="Everything, not one screen of it.")] = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 3 if they differ.")] = False,
) -> None:
    """Verify two bundles, directories or single files, and say what differs between them.

    Engines, plans site by site, accuracy and latency as they were recorded, versions, files. Nothing is run:
    `loka-onnx compare` does that. Exit with 0 also when they differ.
    """
    difference = diff_bundles(a, b)
    out = terminal_of(context).out
    if form is Format.JSON:
        out.out(serde.dumps(difference), end="")
    else:
        print_difference(out, bundles_view(difference), screen=not everything)
    if exit_code and not difference.is_equal:
        raise typer.Exit(DIFFERENT)

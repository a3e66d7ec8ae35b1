"""`loka-onnx schema`: the JSON Schema of the run file, and of what a run leaves."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any

import typer

from loka_onnx.cli.terminal import terminal_of
from loka_onnx.config import run_file_schema
from loka_onnx.core import serde
from loka_onnx.core.profile import Profile


class Document(StrEnum):
    """A document whose schema is published."""

    RUN = "run"
    PROFILE = "profile"


def schema(
    context: typer.Context,
    document: Annotated[
        Document, typer.Argument(help="run: the run file; profile: profile.json.")
    ] = Document.RUN,
) -> None:
    """Print the JSON Schema of the run file, for editors, or of profile.json, for programs that read it."""
    terminal_of(context).out.out(schema_text(document))


def schema_text(document: Document) -> str:
    """The schema as it is printed, and published under `docs/`, without the last line's end."""
    found: dict[str, Any] = run_file_schema() if document is Document.RUN else serde.json_schema(Profile)
    return json.dumps(found, indent=2)

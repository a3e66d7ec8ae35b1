"""`loka-onnx schema`: the JSON Schema of the run file."""

from __future__ import annotations

import json

import typer

from loka_onnx.cli.terminal import terminal_of
from loka_onnx.config import run_file_schema


def schema(context: typer.Context) -> None:
    """Print the JSON Schema of the run file, for editors."""
    terminal_of(context).out.out(json.dumps(run_file_schema(), indent=2))

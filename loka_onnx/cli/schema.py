"""`loka-onnx schema`: the JSON Schema of the run file, and of what a run leaves."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from loka_onnx.cli.log_lines import line_schema
from loka_onnx.cli.terminal import terminal_of
from loka_onnx.config import run_file_schema
from loka_onnx.core import serde
from loka_onnx.core.profile import Profile
from loka_onnx.operations.compare.difference import Difference
from loka_onnx.report import ReportData


class Published(StrEnum):
    """A document whose schema is published."""

    RUN = "run"
    PROFILE = "profile"
    REPORT = "report"
    RUN_COMPARISON = "run-comparison"
    LOG = "log"


_TYPES = {Published.PROFILE: Profile, Published.REPORT: ReportData, Published.RUN_COMPARISON: Difference}


def schema(
    context: typer.Context,
    document: Annotated[
        Published,
        typer.Argument(
            help="run: the run file; profile: profile.json; report: report.json; run-comparison: what "
            "compare-runs writes, and `compare` and `bundle diff` print as JSON; log: a line of `--log json`."
        ),
    ] = Published.RUN,
) -> None:
    """Print the JSON Schema of the run file, for editors, or of what a run leaves, for programs."""
    terminal_of(context).out.out(schema_text(document))


def schema_text(document: Published) -> str:
    """The schema as it is printed, and published under `docs/`, without the last line's end."""
    if document in _TYPES:
        definition = serde.json_schema(_TYPES[document])
    else:
        definition = run_file_schema() if document is Published.RUN else line_schema()
    return json.dumps(definition, indent=2)

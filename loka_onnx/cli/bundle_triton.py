"""`loka-onnx bundle export-triton`: a bundle as a model repository of an inference server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from loka_onnx.bundle.format.archive import name_of
from loka_onnx.bundle.triton.record import RepositoryModel, TritonRepository
from loka_onnx.bundle.triton.repository import export_triton
from loka_onnx.cli.outcome import shown
from loka_onnx.cli.terminal import terminal_of
from loka_onnx.engines.triton.models import TritonOptions


def export_triton_command(  # noqa: PLR0913, PLR0917 - typer reads one parameter for each option
    context: typer.Context,
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="The bundle.", show_default=False)],
    repository: Annotated[
        Path, typer.Argument(metavar="REPOSITORY", help="The repository to write.", show_default=False)
    ],
    name: Annotated[
        str,
        typer.Option(metavar="N", help="Model that clients call.  [default: name of the bundle]"),
    ] = "",
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID", help="Engine to serve, several times; the FP32 model always is.  [default: all]"
        ),
    ] = None,
    instances: Annotated[int, typer.Option(metavar="K", help="Instances of each model on a device.")] = 1,
    queue_delay_us: Annotated[
        int, typer.Option(metavar="N", help="Longest wait for a fuller batch, microseconds.")
    ] = 100,
) -> None:
    """Write a model repository of NVIDIA Triton Inference Server."""
    called = name or name_of(bundle)
    record = export_triton(
        bundle, repository, TritonOptions(called, tuple(engine or ()), instances, queue_delay_us)
    )
    _print(context, record, repository)


def _print(context: typer.Context, record: TritonRepository, repository: Path) -> None:
    out = terminal_of(context).out
    out.print(Text.assemble(("wrote ", "bold"), shown(repository)), soft_wrap=True)
    out.print(Text(f"{record.name}: engine '{record.preferred}'"), soft_wrap=True)
    for model in record.models:
        out.print(Text(_described(model)), soft_wrap=True)
        for remark in model.remarks:
            out.print(Text(f"    {remark}"), soft_wrap=True)
    for declined in record.declined:
        out.print(Text(f"– {declined.engine}: {declined.reason}"), soft_wrap=True)
    for remark in record.remarks:
        out.print(Text(f"! {remark}"), soft_wrap=True)


def _described(model: RepositoryModel) -> str:
    runs = "" if model.runs == (model.name,) else f": {' → '.join(model.runs)}"
    return f"  {model.name} ({model.backend}){runs}"

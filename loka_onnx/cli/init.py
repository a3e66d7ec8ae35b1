"""`loka-onnx init`: a run file from a model and rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from loka_onnx.cli.outcome import shown
from loka_onnx.cli.terminal import print_words, terminal_of
from loka_onnx.core import serde
from loka_onnx.errors import ConfigError

Devices = Annotated[
    list[str] | None,
    typer.Option("--device", help="A device to build for; those of this machine by default."),
]


def init(  # noqa: PLR0913, PLR0917 - typer reads one parameter for each option
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="An .onnx file.", show_default=False)],
    data: Annotated[Path, typer.Argument(help="A .parquet or .npz file.", show_default=False)],
    device: Devices = None,
    label: Annotated[list[str] | None, typer.Option(help="Label column of each output, in order.")] = None,
    budget: Annotated[float, typer.Option(help="Largest accepted relative increase of the loss.")] = 0.0002,
    output: Annotated[Path, typer.Option("--output", "-o", help="The run file to write.")] = Path("RUN.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Write a run file for a model and rows; what was guessed is marked in it."""
    from loka_onnx.operations.proposal import propose

    if output.exists() and not force:
        raise ConfigError(
            "E1719 the run file is there already",
            where=str(output),
            evidence="it may hold your changes",
            remedy="give another --output, or --force to replace it",
        )
    home = output.absolute().parent
    proposal = propose(model, data, devices=device or (), labels=label or (), budget=budget, home=home)
    serde.write_text(proposal.text, output)
    terminal = terminal_of(context)
    checks = proposal.text.count("check this")
    terminal.out.print(Text(f'{output}: {len(proposal.matches)} inputs, {checks} lines say "check this"'))
    for match in proposal.unmatched:
        near = ", ".join(match.candidates) or "none of its type and width"
        print_words(terminal.out, Text(f"  no column for input '{match.input}'; candidates: {near}"))
    following = "fill in what is missing, then" if proposal.unmatched else "next:"
    terminal.out.print(Text(f"{following} loka-onnx run {output}"), soft_wrap=True)
    terminal.out.print(Text(f"it writes {shown(home / 'runs' / proposal.document['name'])}"), soft_wrap=True)

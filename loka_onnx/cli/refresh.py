"""`loka-onnx refresh`: a retrained checkpoint through the decisions of an earlier run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from loka_onnx.cli.outcome import check_fp8, print_outcome, print_written
from loka_onnx.cli.progress import StageReporter
from loka_onnx.cli.run import Overrides, RequireFp8, Sign
from loka_onnx.cli.terminal import terminal_of
from loka_onnx.config import parse_overrides
from loka_onnx.core.intervals import Interval
from loka_onnx.core.lineage import REFRESH_NAME, Refresh
from loka_onnx.operations.refresh.refreshing import RefreshOptions
from loka_onnx.operations.refresh.refreshing import refresh as refresh_run


def refresh(  # noqa: PLR0913, PLR0917 - typer reads one parameter for each option
    context: typer.Context,
    earlier: Annotated[
        Path, typer.Option("--run", metavar="DIR", help="The finished run to refresh.", show_default=False)
    ],
    model: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="The retrained model: .onnx, or a checkpoint for the run's torch module.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="The new run directory; <DIR>-<FILE without suffix> beside the run by default."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Start over; removes an earlier run in the new directory.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on with a refresh that was interrupted, or that waited for build jobs."
        ),
    ] = False,
    overrides: Overrides = None,
    no_fallback: Annotated[
        bool,
        typer.Option(
            "--no-fallback",
            help="Fail where the decisions of the run do not hold, in place of a full run: with 2 where the "
            "structure differs, with 3 where certification fails.",
        ),
    ] = False,
    require_fp8: RequireFp8 = False,
    sign: Sign = None,
) -> None:
    """Bring a finished run to a retrained model: keep its decisions, redo scales, build and certify."""
    terminal = terminal_of(context)
    with StageReporter(terminal) as reporter:
        options = RefreshOptions(
            output=output,
            overrides=parse_overrides(overrides or []),
            force=force,
            resume=resume,
            may_fall_back=not no_fallback,
            sign=sign,
            **reporter.callbacks,
        )
        result = refresh_run(earlier, model, options)
    print_outcome(terminal, result.run)
    terminal.out.print()
    for line in _lines(result.refresh):
        terminal.say(line)
    print_written(terminal, result.run, REFRESH_NAME)
    if require_fp8:
        check_fp8(result.run)


def _described(interval: Interval) -> str:
    return f"{interval.value:.4%} ({interval.lower:.4%} … {interval.upper:.4%})"


def _lines(refresh: Refresh) -> Iterator[str]:
    for move in refresh.outputs:
        before = "not measured before" if move.before is None else f"was {_described(move.before)}"
        yield (
            f"{move.engine}, {move.output}: {move.judged} {_described(move.now)}, {before}; "
            f"budget {move.budget:.4%}: {move.status}"
        )
    if refresh.fallback:
        yield f"everything was done anew: {refresh.fallback}"
        return
    took = refresh.earlier_seconds
    share = f"{refresh.seconds / took if took else 0.0:.0%} of the {took:.1f} s"
    yield f"refreshed in {refresh.seconds:.1f} s, {share} of the run before"

"""`loka-onnx tune`: times the kernels that a model's products need, on the device of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from loka_onnx.cli.progress import reported
from loka_onnx.cli.run import Output, Overrides, read_run_file, run_until
from loka_onnx.cli.terminal import terminal_of
from loka_onnx.core.timing import Shape
from loka_onnx.engines.tuning import ROUNDS, KernelTimer
from loka_onnx.errors import ConfigError
from loka_onnx.pipeline.run import RunOptions, Stage
from loka_onnx.pipeline.tuning import TIMINGS, shapes_of, sites_of_file, sites_of_run, tune_shapes
from loka_onnx.planning.timings import TimingDatabase

_MOST_REFUSED = 3


def tune(  # noqa: PLR0913, PLR0917 - typer reads one parameter for each option
    context: typer.Context,
    run_file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN.yaml]",
            help="The run file: times the products of its model, after mods where a run came so far.",
            show_default=False,
        ),
    ] = None,
    output: Output = None,
    overrides: Overrides = None,
    model: Annotated[
        Path | None, typer.Option(metavar="FILE.onnx", help="Time the products of this model.")
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="Batch size, with --model; may be repeated.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="The device, as in nvidia-h100 or cpu; what is found by default.")
    ] = None,
    database: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=f"Where times are kept; {TIMINGS} in the run directory or here."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Times that each kernel is timed.")] = ROUNDS,
    again: Annotated[bool, typer.Option("--again", help="Re-measure cached shapes.")] = False,
    take: Annotated[
        Path | None,
        typer.Option("--import", metavar="FILE.json", help="Take in times that another machine exported."),
    ] = None,
    export: Annotated[
        Path | None, typer.Option("--export", metavar="FILE.json", help="Write all times as JSON.")
    ] = None,
) -> None:
    """Time the kernels of a model's products on this machine's device, so that plans use measured speeds.

    Each time is stored at once. Known ones are skipped, also after an interruption.
    """
    terminal = terminal_of(context)
    if run_file is not None and (model is not None or batch):
        raise ConfigError(
            "E1715 a run file and --model exclude each other",
            evidence="the run file says which model and which batch sizes",
            remedy="give one of them; `--set batch.serve=[256]` changes the batch sizes of a run",
        )
    shapes, place = list[Shape](), database or Path(TIMINGS)
    if run_file is not None:
        config = read_run_file(run_file, output, overrides)
        directory = run_until(terminal, config, RunOptions(resume=True, until=Stage.EXPORT)).directory
        shapes += shapes_of(sites_of_run(directory), config.batch.serve)
        place = database or directory / TIMINGS
    elif model is not None:
        shapes += shapes_of(sites_of_file(model), _check_batches(batch))
    if not (shapes or take or export):
        raise ConfigError(
            "E1716 `tune` was given nothing to time",
            evidence="there is no run file and no --model, or their model has no product for FP8",
            remedy="`loka-onnx tune RUN.yaml`, or `loka-onnx tune --model ranker.onnx --batch 1024`",
        )
    if take is not None:
        with TimingDatabase(place) as opened:
            terminal.say(f"{opened.take(take)} times taken in from {take}")
    if shapes:
        timer = KernelTimer(device, rounds)
        unique = tuple(dict.fromkeys(shapes))
        with reported(terminal, "tune") as progress:
            result = tune_shapes(unique, place, timer, again=again, progress=progress)
        known = f", {result.known} known before" if result.known else ""
        terminal.say(f"{result.measured} kernels timed on {result.device}{known}")
        for refused in result.refused[:_MOST_REFUSED]:
            terminal.say(f"not run: {refused.kernel} on {refused.shape}: {refused.reason}")
        if (more := len(result.refused) - _MOST_REFUSED) > 0:
            terminal.say(f"not run: {more} more")
    if export is not None:
        with TimingDatabase(place) as opened:
            terminal.say(f"{opened.export(export)} times written to {export}")
    terminal.say(f"timings   {place}")


def _check_batches(batches: Sequence[int] | None) -> Sequence[int]:
    if not batches:
        raise ConfigError(
            "E1717 --model needs a batch size",
            evidence="the rows of a product are those of a request",
            remedy="add --batch 1024, once for each batch size that will be served",
        )
    if min(batches) < 1:
        raise ConfigError("E1718 a batch size is at least 1", where="--batch", evidence=f"{min(batches)}")
    return batches

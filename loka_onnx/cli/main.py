"""The command `loka-onnx`: its verbs, and what becomes of an error.

Exit codes: 0 done; 1 a stage failed, or a bug; 2 the configuration or an input is wrong; 3 the check asked
for did not hold; 130 and 143 interrupted.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from rich.text import Text
from typer.core import TyperGroup

from loka_onnx.cli.build import build
from loka_onnx.cli.bundle import bundle
from loka_onnx.cli.calibrate import calibrate
from loka_onnx.cli.compare import compare_deployments
from loka_onnx.cli.demo import demo
from loka_onnx.cli.doctor import doctor
from loka_onnx.cli.drift import drift
from loka_onnx.cli.refresh import refresh
from loka_onnx.cli.run import run
from loka_onnx.cli.schema import schema
from loka_onnx.cli.stages import add_stage_verb
from loka_onnx.cli.terminal import Terminal
from loka_onnx.cli.transform import transform
from loka_onnx.cli.tune import tune
from loka_onnx.errors import InternalError, LokaError
from loka_onnx.pipeline.run import Stage

INTERRUPTED = 130
"""Exit code of a command that SIGINT ended: 128 and the number of the signal."""
ANYWHERE = ("--debug", "--quiet")
"""Global flags that may also follow the verb."""


class _Interrupted(BaseException):
    """Ends the work as Ctrl-C does, so that children are ended and half-written files are removed."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Group(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        # typer turns KeyboardInterrupt into an exit code that depends on its version.
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise _Interrupted(signal.SIGINT) from error


app = typer.Typer(
    name="loka-onnx",
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"loka-onnx {version('loka-onnx')}")
        raise typer.Exit


@app.callback()
def _globals(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress, only the result.")] = False,
    show_version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version),
    ] = False,
) -> None:
    """Turn a trained recommendation model into the fastest engine that is still accurate."""
    # `main` handles errors, and so --debug and --version are read elsewhere.
    context.obj = Terminal.open(quiet=quiet)


app.command()(demo)
app.command()(run)
add_stage_verb(app, Stage.EXPORT)
app.command()(calibrate)
app.command()(transform)
app.command()(tune)
add_stage_verb(app, Stage.PLAN)
app.command()(build)
for _stage in (Stage.EVALUATE, Stage.REPORT):
    add_stage_verb(app, _stage)
app.command()(refresh)
app.command()(drift)
app.command("compare")(compare_deployments)
app.add_typer(bundle, name="bundle")
app.command()(doctor)
app.command()(schema)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and leave the process with its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    flags = [flag for flag in ANYWHERE if flag in given]
    for stream in (sys.stdout, sys.stderr):
        # A log in ASCII gets "?" for what it cannot hold, not a crash at the end of a long run.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    signal.signal(signal.SIGTERM, _end)
    try:
        app([*flags, *(argument for argument in given if argument not in ANYWHERE)], prog_name="loka-onnx")
    except _Interrupted as error:
        _leave_interrupted(error.number)
    except Exception as error:
        if _received:
            # Libraries wrap what a signal handler raised inside them in errors of their own.
            _leave_interrupted(_received[0])
        _report(error, flags)
    sys.exit(0)


_received: list[int] = []
"""Signals that asked this process to end."""


def _leave_interrupted(number: int) -> NoReturn:
    _say("interrupted; `run --resume` and every stage verb go on from the last finished stage")
    sys.exit(128 + number)


def _report(error: Exception, flags: Sequence[str]) -> NoReturn:
    if isinstance(error, LokaError):
        if "--debug" in flags or isinstance(error, InternalError):
            _say(_trace(error))
        kind = "internal error, please report" if isinstance(error, InternalError) else "error"
        _say(f"{kind}: {error}")
        sys.exit(error.exit_code)
    _say(_trace(error))
    _say(f"internal error, please report: {type(error).__name__}: {error}")
    sys.exit(1)


def _trace(error: Exception) -> str:
    return "".join(traceback.format_exception(error)).rstrip("\n")


def _end(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    raise _Interrupted(number)


def _say(message: str) -> None:
    Terminal.open().err.print(Text(message), soft_wrap=True)

"""The command `loka-onnx`: its verbs, and what becomes of an error.

Exit codes: 0 done; 1 a stage failed, or a bug; 2 the configuration or an input is wrong; 3 the check asked
for did not hold; 130 and 143 interrupted.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from types import FrameType
from typing import Annotated, Any, NoReturn, Protocol, runtime_checkable

import typer
from rich.text import Text
from typer.core import TyperGroup

from loka_onnx.cli.bundle import bundle
from loka_onnx.cli.compare import compare_deployments, compare_runs
from loka_onnx.cli.doctor import doctor
from loka_onnx.cli.drift import drift
from loka_onnx.cli.log_lines import Event, JsonLog, Level, LogFormat, json_log
from loka_onnx.cli.run import demo, init, refresh, run
from loka_onnx.cli.schema import schema
from loka_onnx.cli.stages import add_stage_verb, build, calibrate, transform
from loka_onnx.cli.terminal import Terminal
from loka_onnx.cli.tune import tune
from loka_onnx.errors import InternalError, LokaError
from loka_onnx.pipeline.run import Stage

ANYWHERE = ("--debug", "--quiet")
"""Global flags that may also follow the verb, as `LOG` may."""
COMPLETING = "_LOKA_ONNX_COMPLETE"
"""Environment variable by which the completion of a shell asks."""
LOG, LOG_VARIABLE = "--log", "LOKA_ONNX_LOG"
"""The global option, and the environment variable, that say how a command tells what happens."""


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
    name="loka-onnx", cls=_Group, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
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
    log: Annotated[
        LogFormat,
        typer.Option(
            LOG,
            envvar=LOG_VARIABLE,
            help="What happens, on standard error, as text or as one JSON object a line (`schema log`).",
        ),
    ] = LogFormat.TEXT,
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Turn a trained recommendation model into the fastest engine that is still accurate."""
    # `main` handles errors and opens the log, and so --debug and --log are read there.
    context.obj = Terminal.open(quiet=quiet, log=context.obj)


app.command()(demo)
app.command()(init)
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
app.command("compare-runs")(compare_runs)
app.add_typer(bundle, name="bundle")
app.command()(doctor)
app.command()(schema)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and leave the process with its exit code."""
    line, log_format = _hoisted(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        # A log in ASCII gets "?" for what it cannot hold, not a crash at the end of a long run.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    signal.signal(signal.SIGTERM, end)
    _received.clear()
    if log_format != LogFormat.JSON or COMPLETING in os.environ:
        _leave(_run(line, None))
    with json_log() as log:
        log.write(Event.STARTED, message=_command(line), version=version("loka-onnx"))
        code = _run(line, log)
        log.ended(code)
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End the process; output that cannot be written is reported as an error, without a traceback."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # Python would flush again at exit, and print a message of its own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = code or _report(error, None, is_debug=False)
    if _received:
        # A second signal breaks off the wait for threads. One inside ONNX Runtime would meet an interpreter
        # that is gone, and abort the process.
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _hoisted(arguments: Sequence[str]) -> tuple[list[str], str]:
    """The command line with its global options first: they may stand anywhere; and the format of the log."""
    log, rest = os.environ.get(LOG_VARIABLE) or LogFormat.TEXT, list[str]()
    words = iter(arguments)
    for word in words:
        if word == LOG:
            log = next(words, "")
        elif word.startswith(f"{LOG}="):
            log = word.removeprefix(f"{LOG}=")
        else:
            rest.append(word)
    flags = [flag for flag in ANYWHERE if flag in rest]
    return [*flags, LOG, log, *(word for word in rest if word not in flags)], log


def _command(line: list[str]) -> str:
    """The command without its arguments: a URL may hold a secret, and logs are kept."""
    rest = line[line.index(LOG) + 2 :]
    verb = rest[:2] if rest[:1] == ["bundle"] else rest[:1]
    return " ".join(("loka-onnx", *(word for word in verb if word.replace("-", "").isalpha())))


_received: list[int] = []
"""Signals that asked this process to end."""


def _run(line: list[str], log: JsonLog | None) -> int:
    try:
        # Errors of usage are printed by typer, unless they must become a record.
        result = app(line, prog_name="loka-onnx", standalone_mode=log is None, obj=log)
        return result if isinstance(result, int) else 0
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except _Interrupted as error:
        return _report_interrupt(error.number, log)
    except Exception as error:
        if _received:
            # Libraries wrap what a signal handler raised inside them in errors of their own.
            return _report_interrupt(_received[0], log)
        return _report(error, log, "--debug" in line)


def _report_interrupt(number: int, log: JsonLog | None) -> int:
    for each in (signal.SIGINT, signal.SIGTERM) if _received else ():
        signal.signal(each, signal.SIG_IGN)
    message = "interrupted; `run --resume` and every stage verb go on from the last finished stage"
    return _say(log, "", message, "Interrupted", 128 + number)


def _report(error: Exception, log: JsonLog | None, is_debug: bool) -> int:
    """Say on standard error what ended the command; returns the exit code."""
    kind, trace = type(error).__name__, "".join(traceback.format_exception(error)).rstrip("\n")
    if isinstance(error, LokaError) and not isinstance(error, InternalError):
        return _say(log, "error: ", error.message, kind, error.exit_code, trace if is_debug else "")
    if isinstance(error, _UsageError):
        return _say(log, "", error.format_message(), "Usage", error.exit_code)
    if lack := _lack(error):
        message = f"{lack}\n  evidence: {kind}: {error}"
        return _say(log, "error: ", message, kind, 1, trace if is_debug else "")
    message = str(error) if isinstance(error, InternalError) else f"{kind}: {error}"
    return _say(log, "internal error, please report: ", message, kind, 1, trace)


def _say(log: JsonLog | None, head: str, message: str, kind: str, exit_code: int, trace: str = "") -> int:
    if log is not None:
        fields = {"message": message, "kind": kind, "exit_code": exit_code, "traceback": trace or None}
        log.write(Event.ERROR, Level.ERROR, **fields)
        return exit_code
    for text in filter(None, (trace, f"{head}{message}")):
        Terminal.open().err.print(Text(text), soft_wrap=True)
    return exit_code


_LACKS = {
    errno.ENOSPC: "the disk, or what the output goes to, is full",
    errno.EDQUOT: "the quota of the disk is used up",
    errno.EMFILE: "this process may open no more files (`ulimit -n`)",
    errno.ENFILE: "this host may open no more files",
    errno.ENOMEM: "there is not enough memory",
    errno.EAGAIN: "this host gives out no more threads or processes (`ulimit -u`)",
}


def _lack(error: Exception) -> str:
    """The resource that the host ran out of, in words; empty for an error of another kind."""
    if isinstance(error, MemoryError):
        return _LACKS[errno.ENOMEM]
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return _LACKS[errno.EAGAIN]
    return _LACKS.get(error.errno or 0, "") if isinstance(error, OSError) else ""


@runtime_checkable
class _UsageError(Protocol):
    """An error of the command line; typer has no public name for it."""

    exit_code: int

    def format_message(self) -> str:
        """The fault, in words."""


def end(number: int, frame: FrameType | None) -> None:
    """Handle a signal that asks for the end, by an exception in the main thread."""
    _received.append(number)
    raise _Interrupted(number)

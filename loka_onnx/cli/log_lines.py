"""The log in JSON: what happens during a command, one object a line on standard error.

``--log json`` or ``LOKA_ONNX_LOG=json`` asks for it. Standard output stays the result, and nothing else is
written to standard error: what libraries log, warn of or print there becomes records too.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, ClassVar, TextIO

from pydantic import TypeAdapter

from loka_onnx.core.serde import STRICT

PIPE_SECONDS = 2.0
"""How long the end of a command waits for what its children still write."""


class LogFormat(StrEnum):
    """Formats of what a command prints as it goes along."""

    TEXT = "text"
    JSON = "json"


class Event(StrEnum):
    """Subject of a record."""

    STARTED = "started"
    STAGE_STARTED = "stage_started"
    PROGRESS = "progress"
    STAGE_ENDED = "stage_ended"
    MESSAGE = "message"
    ERROR = "error"
    ENDED = "ended"


class Level(StrEnum):
    """Severity of a record."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class LogLine:
    """One record; a key that does not apply is left out.

    Attributes:
        time: ISO 8601 in UTC with milliseconds.
        event: ``started`` and ``ended`` once each, first and last; ``stage_started`` and ``stage_ended`` for
            every stage; ``progress`` at the first and last report of a task, once a second between them;
            ``message`` for what libraries say; ``error`` for what ends the command.
        message: The command with ``started``, the words of ``message`` and ``error``.
        position: Number of the stage, from 1, of so many `stages` as far as it is known.
        reused: Whether the result of an earlier run was taken over (``stage_ended``).
        because: Inputs that changed since an earlier result, which was not taken over (``stage_ended``).
        done: Finished units of the task, of `total`; 0 where that is unknown.
        seconds: Wall time of the stage so far, of the stage, or of the command.
        seconds_left: Wall time that the task will still take at its pace; left out until it is known.
        logger: A logger of Python, ``py.warnings``, or ``stderr`` (``message``).
        kind: Class of the error in `loka_onnx.errors`, ``Usage``, ``Interrupted``, or of a bug its own.
        traceback: Of a bug, and with ``--debug`` of every error.
    """

    SCHEMA: ClassVar[str] = "log/1"
    __pydantic_config__ = STRICT

    schema: str
    time: str
    level: Level
    event: Event
    message: str | None = None
    stage: str | None = None
    position: int | None = None
    stages: int | None = None
    reused: bool | None = None
    because: str | None = None
    task: str | None = None
    done: int | None = None
    total: int | None = None
    seconds: float | None = None
    seconds_left: float | None = None
    logger: str | None = None
    kind: str | None = None
    exit_code: int | None = None
    traceback: str | None = None
    version: str | None = None


def line_schema() -> dict[str, Any]:
    """JSON Schema of a line."""
    schema = TypeAdapter(LogLine).json_schema()
    schema["properties"]["schema"]["const"] = LogLine.SCHEMA
    return schema


class JsonLog:
    """Writes records to a stream; may be used from several threads."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._lock = stream, threading.Lock()
        self._began = time.monotonic()

    def write(self, event: Event, level: Level = Level.INFO, **fields: Any) -> None:
        """Write one record; fields are those of `LogLine`."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = asdict(LogLine(LogLine.SCHEMA, now, level, event, **fields))
        said = {k: round(v, 3) if isinstance(v, float) else v for k, v in line.items() if v is not None}
        with self._lock:
            # ASCII is the same in every encoding of the stream, and leaves a record on one line.
            self._stream.write(json.dumps(said) + "\n")
            self._stream.flush()

    def ended(self, exit_code: int) -> None:
        """Write the last record of a command."""
        level = Level.ERROR if exit_code else Level.INFO
        self.write(Event.ENDED, level, exit_code=exit_code, seconds=time.monotonic() - self._began)


@contextmanager
def json_log() -> Iterator[JsonLog]:
    """The log of this process's standard error; all else that is written there becomes records of it.

    Libraries in C write to the file descriptor, and children inherit it: a pipe takes its place.
    """
    with _captured_stderr() as log, _captured_logging(log):
        yield log


@contextmanager
def _captured_stderr() -> Iterator[JsonLog]:
    error = sys.stderr
    try:
        number = error.fileno()
    except (OSError, ValueError):
        # Somebody else has put an object in place of the stream: its file is not ours.
        yield JsonLog(error)
        return
    error.flush()
    with os.fdopen(os.dup(number), "w", encoding="ascii") as stream:
        log = JsonLog(stream)
        reading, writing = os.pipe()
        os.dup2(writing, number)
        os.close(writing)
        # A child that outlives the command holds the pipe open: the thread must not hold the command up.
        reader = threading.Thread(target=_relay, args=(reading, log), name="stderr", daemon=True)
        reader.start()
        try:
            yield log
        finally:
            error.flush()
            os.dup2(stream.fileno(), number)
            reader.join(PIPE_SECONDS)


def _relay(reading: int, log: JsonLog) -> None:
    """Make a record of each line that is written to standard error."""
    with os.fdopen(reading, encoding="utf-8", errors="replace") as lines:
        for text in filter(None, map(str.rstrip, lines)):
            log.write(Event.MESSAGE, message=text, logger="stderr")


class _Handler(logging.Handler):
    """Makes records of what Python's libraries log."""

    def __init__(self, log: JsonLog) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        level = Level.ERROR if record.levelno >= logging.ERROR else Level.WARNING
        self._log.write(Event.MESSAGE, level, message=record.getMessage().strip(), logger=record.name)


@contextmanager
def _captured_logging(log: JsonLog) -> Iterator[None]:
    handler, root = _Handler(log), logging.getLogger()
    root.addHandler(handler)
    shown = warnings.showwarning
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        warnings.showwarning = shown
        root.removeHandler(handler)

"""Stages and work in progress on standard error.

A terminal gets one line per finished stage and, below, a line that moves for the one that runs: which of how
many stages, its task, how long it has been at work, and how long the task will still take. A pipe gets the
lines of the stages only, and a line now and then for a stage that takes minutes. A log in JSON gets the same
as records (`log_lines`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from loka_onnx.cli.log_lines import Event, JsonLog
from loka_onnx.cli.pace import Pace, clock
from loka_onnx.cli.terminal import Terminal
from loka_onnx.core.progress import UNTIL
from loka_onnx.core.progress import Progress as WorkProgress
from loka_onnx.pipeline.directory import Outcome

HEARTBEAT_SECONDS = 30.0
"""A log without a terminal gets a line this often while a stage runs."""
BEAT_SECONDS = 1.0
"""How often it is looked whether such a line is due."""
RECORD_SECONDS = 1.0
"""A log in JSON gets a record of a task this often at most; of its beginning and its end in any case."""
QUICK_SECONDS = 0.05
"""A stage that took less is not worth its time."""
WIDE, WIDER = 72, 96
"""Columns of a terminal that has room for a bar, and for a long one."""


class StageReporter:
    """Reports the stages of a run; pass `on_stage`, `on_stages` and `progress` to `RunOptions`.

    Args:
        terminal: Where to report; nothing is reported when it is quiet.
    """

    def __init__(self, terminal: Terminal) -> None:
        self._console, self._quiet, self._log = terminal.err, terminal.quiet, terminal.log
        self._live = not terminal.quiet and terminal.log is None and terminal.err.is_terminal
        self._bar = _line_of(terminal, self._left)
        self._task: TaskID | None = None
        self._stage, self._began, self._spoke = "", 0.0, 0.0
        self._begun, self._to_come = 0, list[str]()
        self._doing, self._pace = "", Pace(0.0, 0, 0)
        self._lock = threading.RLock()
        self._heart = _Heart(self._beat)

    def __enter__(self) -> Self:
        if self._live:
            self._bar.start()
        elif not self._quiet:
            self._heart.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._heart.stop()
        # What failed must not leave its line below the message.
        self._drop_line()
        if self._live:
            self._bar.stop()

    def on_stages(self, stages: Sequence[str]) -> None:
        """These stages are to come, in this order; some may turn out to be unnecessary."""
        self._to_come = list(stages)

    def on_stage(self, stage: str, outcome: Outcome | None) -> None:
        """A stage begins (None) or has ended."""
        with self._lock:
            self._drop_line()
            self._stage, self._began = "" if outcome else stage, time.monotonic()
            self._spoke, self._doing, self._pace = self._began, "", Pace(self._began, 0, 0)
            if outcome is None:
                self._begin(stage)
            elif not self._quiet:
                self._end(stage, outcome)

    def progress(self, task: str, done: int, total: int) -> None:
        """`done` of `total` units of a task of the running stage are finished."""
        with self._lock:
            now = time.monotonic()
            is_new = self._note(now, task, done, total)
            if self._live and self._task is not None:
                # A little short of the end: rich stops the clock of a task that is complete, and the next
                # task of the stage, or a last step without any report, would look dead.
                end = total + 1e-3 if total else None
                self._bar.update(
                    self._task, description=escape(self._text), completed=done, total=end, share=self._share
                )
            elif self._log is not None and not self._quiet:
                is_last = 0 < total <= done
                if is_new or is_last or now - self._spoke >= RECORD_SECONDS:
                    self._spoke = now
                    self._record(self._log, now)
        self._beat()

    def _begin(self, stage: str) -> None:
        if stage in self._to_come:
            del self._to_come[: self._to_come.index(stage) + 1]
        self._begun += 1
        if self._live:
            place = "{position} of {stages}".format(**self._position) if self._position else ""
            doing = DOING.get(stage, "")
            text = f"{stage}: {doing}" if doing else stage
            self._task = self._bar.add_task(escape(text), total=None, share="", place=place)
        elif self._log is not None and not self._quiet:
            self._log.write(Event.STAGE_STARTED, stage=stage, **self._position)

    def _end(self, stage: str, outcome: Outcome) -> None:
        if self._log is None:
            self._console.print(f"[green]✓[/green] {escape(stage):<14} {_duration(outcome)}")
            return
        self._log.write(
            Event.STAGE_ENDED,
            stage=stage,
            reused=outcome.reused,
            seconds=outcome.seconds,
            **self._position,
        )

    def _note(self, now: float, task: str, done: int, total: int) -> bool:
        """Take a report in; says whether it is the first of its task."""
        # A name may change as the work goes on ("build fp8-all", "build fp8-safe"): see `core.progress`.
        is_same = (
            task.split(" ", 1)[0] == self._doing.split(" ", 1)[0]
            and total == self._pace.total
            and done >= self._pace.done
        )
        self._doing = task
        if is_same:
            self._pace.note(now, done)
            return False
        self._pace = Pace(now, done, total)
        return True

    @property
    def _text(self) -> str:
        return self._doing if self._doing.startswith(self._stage) else f"{self._stage}: {self._doing}"

    @property
    def _share(self) -> str:
        return f"{self._pace.done / self._pace.total:4.0%}" if self._pace.total else ""

    @property
    def _position(self) -> dict[str, Any]:
        """Which stage of how many; nothing where it is not known how many there are."""
        known = self._begun + len(self._to_come)
        return {"position": self._begun, "stages": known} if known > 1 else {}

    def _left(self) -> str:
        left = self._pace.seconds_left(time.monotonic())
        at_most = "≤ " if left is not None and UNTIL in self._doing else ""
        return f"{at_most}{clock(left)}"

    def _record(self, log: JsonLog, now: float) -> None:
        left = self._pace.seconds_left(now)
        log.write(
            Event.PROGRESS,
            stage=self._stage,
            task=self._doing or None,
            done=self._pace.done,
            total=self._pace.total,
            seconds=now - self._began,
            seconds_left=left,
        )

    def _beat(self) -> None:
        """A line for a log without a terminal, where it has heard nothing for long."""
        if self._live or self._quiet:
            return
        with self._lock:
            now = time.monotonic()
            if not self._stage or now - self._spoke < HEARTBEAT_SECONDS:
                return
            self._spoke = now
            if self._log is not None:
                self._record(self._log, now)
                return
            text = self._text if self._doing else self._stage
            parts = (text, self._share, f"{clock(now - self._began)} so far", f"{self._left()} left")
            known = parts if self._pace.total else parts[:3]
            self._console.print(f"  {'  '.join(part for part in known if part)}", markup=False)

    def _drop_line(self) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None


@contextmanager
def reported(terminal: Terminal, stage: str) -> Iterator[WorkProgress]:
    """Report a block as the only stage of a command; yields what its progress is told to."""
    with StageReporter(terminal) as reporter:
        reporter.on_stage(stage, None)
        began = time.perf_counter()
        yield reporter.progress
        reporter.on_stage(stage, Outcome(stage, False, time.perf_counter() - began))


DOING = {
    "prepare data": "reading MovieLens 100K",
    "export": "writing the model as ONNX",
    "check data": "reading every row once",
    "split": "cutting the model at its embeddings",
    "plan": "choosing a precision for each site",
    "choose": "comparing the engines",
    "report": "writing the report",
    "bundle": "copying and verifying what is deployed",
    "replan": "bringing the plans to the new scales",
}
"""What stages do that report no task."""


class _Heart:
    """Calls a function now and then from a thread of its own, until it is stopped."""

    def __init__(self, beat: Callable[[], None]) -> None:
        self._beat, self._stopped = beat, threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(BEAT_SECONDS):
            self._beat()


class _Elapsed(ProgressColumn):
    """How long the stage has been at work."""

    def render(self, task: Task) -> Text:
        return Text(clock(task.elapsed or 0.0), style="progress.elapsed")


class _Left(ProgressColumn):
    """How long the task of the stage will still take."""

    def __init__(self, left: Callable[[], str]) -> None:
        super().__init__(Column(no_wrap=True, justify="right"))
        self._left = left

    def render(self, task: Task) -> Text:
        return Text(f"{self._left()} left", style="progress.remaining")


def _line_of(terminal: Terminal, left: Callable[[], str]) -> Progress:
    """The line that moves, as wide as the terminal has room."""
    width = terminal.err.width
    bar = [BarColumn(bar_width=24 if width >= WIDER else 12)] if width >= WIDE else []
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.fields[place]}", style="dim", table_column=Column(no_wrap=True)),
        TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
        *bar,
        TextColumn("{task.fields[share]}", table_column=Column(no_wrap=True)),
        _Elapsed(Column(no_wrap=True, justify="right")),
        _Left(left),
        console=terminal.err,
        transient=True,
        expand=True,
    )


def _duration(outcome: Outcome) -> str:
    if outcome.reused:
        return "[dim]reused[/dim]"
    return f"{outcome.seconds:.1f} s" if outcome.seconds >= QUICK_SECONDS else "< 0.1 s"

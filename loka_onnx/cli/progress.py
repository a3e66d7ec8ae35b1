"""Stages and work in progress on standard error.

A terminal gets one line per finished stage and, below, a line that moves for the running one. A pipe gets the
lines of the stages, and a line every 30 seconds of a long task. A log in JSON gets the same as records.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from loka_onnx.cli.log_lines import Event
from loka_onnx.cli.terminal import Terminal, print_words
from loka_onnx.core.progress import Progress as WorkProgress
from loka_onnx.pipeline.directory import StageOutcome
from loka_onnx.pipeline.outlook import Outlook

PIPE_SECONDS, RECORD_SECONDS = 30.0, 1.0
"""Least time between two reports of a task to a pipe, and to a log in JSON."""
QUICK_SECONDS = 0.05
"""The time of a shorter stage is not shown."""


class StageReporter:
    """Reports the stages of a run, unless the terminal is quiet; pass its `callbacks` to `RunOptions`."""

    def __init__(self, terminal: Terminal) -> None:
        self._console, self._quiet, self._log = terminal.err, terminal.quiet, terminal.log
        self._live = not terminal.quiet and terminal.log is None and terminal.err.is_terminal
        # rich measures the pace of tasks, also where it shows none.
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.fields[place]}", style="dim", table_column=Column(no_wrap=True)),
            TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            BarColumn(bar_width=12),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=terminal.err,
            transient=True,
            expand=True,
            get_time=time.monotonic,
        )
        self._task: TaskID | None = None
        self._stage, self._began, self._spoke = "", 0.0, 0.0
        self._begun, self._to_come = 0, list[str]()
        self._doing, self._done, self._total = "", 0, 0
        self._lock = threading.RLock()

    def __enter__(self) -> Self:
        if self._live:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        # The line of a failed stage must not stay below the message.
        self._drop_task()
        if self._live:
            self._bar.stop()

    @property
    def callbacks(self) -> dict[str, Any]:
        """Options of a run that is to be reported."""
        return {
            "progress": self.progress,
            "on_stage": self.on_stage,
            "on_stages": self.on_stages,
            "on_outlook": self.on_outlook,
        }

    def on_outlook(self, outlook: Outlook) -> None:
        """This is to be expected of the run."""
        for line in () if self._quiet else outlook.lines():
            if self._log is not None:
                self._log.write(Event.MESSAGE, message=line, logger="loka_onnx")
            else:
                print_words(self._console, Text(line))

    def on_stages(self, stages: Sequence[str]) -> None:
        """These stages are to come, in this order; some may turn out to be unnecessary."""
        self._to_come = list(stages)

    def on_stage(self, stage: str, outcome: StageOutcome | None) -> None:
        """A stage begins (None) or has ended."""
        with self._lock:
            self._drop_task()
            if outcome is None:
                self._begin(stage)
            elif not self._quiet and self._log is not None:
                ended = {"reused": outcome.reused, "seconds": outcome.seconds, **self._position}
                self._log.write(Event.STAGE_ENDED, stage=stage, because=outcome.because or None, **ended)
            elif not self._quiet:
                because = f"  again: {outcome.because}" if outcome.because else ""
                took = f"{outcome.seconds:.1f} s" if outcome.seconds >= QUICK_SECONDS else "< 0.1 s"
                took = "[dim]reused[/dim]" if outcome.reused else took
                text = f"[green]✓[/green] {escape(stage):<14} {took}{escape(because)}"
                print_words(self._console, Text.from_markup(text))

    def progress(self, task: str, done: int, total: int) -> None:
        """`done` of `total` units of a task of the running stage are finished."""
        with self._lock:
            # A name may change as the work goes on ("build fp8-all", "build fp8-safe"): see `core.progress`.
            is_same = task.split(" ", 1)[0] == self._doing.split(" ", 1)[0]
            is_new = not is_same or total != self._total or done < self._done
            self._doing, self._done, self._total = task, done, total
            if is_new:
                self._drop_task()
                self._add_task()
            if self._task is not None:
                self._bar.update(self._task, description=escape(self._text), completed=done)
            if not self._quiet and not self._live:
                self._report(is_end=is_new or 0 < total <= done)

    def _begin(self, stage: str) -> None:
        self._stage, self._began, self._spoke = stage, time.monotonic(), time.monotonic()
        self._doing, self._done, self._total = "", 0, 0
        if stage in self._to_come:
            del self._to_come[: self._to_come.index(stage) + 1]
        self._begun += 1
        self._add_task()
        if self._log is not None and not self._quiet:
            self._log.write(Event.STAGE_STARTED, stage=stage, **self._position)

    def _add_task(self) -> None:
        place = "{position} of {stages}".format(**self._position) if self._position else ""
        # rich stops the clock of a complete task, but the stage goes on.
        total = self._total + 1e-3 if self._total else None
        self._task = self._bar.add_task(escape(self._text), total=total, completed=self._done, place=place)

    def _drop_task(self) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None

    @property
    def _text(self) -> str:
        if not self._doing or self._doing.startswith(self._stage):
            return self._doing or self._stage
        return f"{self._stage}: {self._doing}"

    @property
    def _position(self) -> dict[str, Any]:
        """Number of the running stage and of all stages; empty if the latter is unknown."""
        known = self._begun + len(self._to_come)
        return {"position": self._begun, "stages": known} if known > 1 else {}

    @property
    def _seconds_left(self) -> float | None:
        """The time that the task will still take at its pace; None until it is known."""
        task = self._bar.tasks[-1]
        return round(task.remaining) / task.speed if task.remaining and task.speed else None

    def _report(self, *, is_end: bool) -> None:
        """Report the task where the last report is old; a log gets the ends of tasks in any case."""
        now = time.monotonic()
        if self._log is None and now - self._spoke >= PIPE_SECONDS:
            share = f"  {self._done / self._total:.0%}" if self._total else ""
            self._console.print(f"  {self._text}{share}  {now - self._began:.0f} s so far", markup=False)
        elif self._log is not None and (is_end or now - self._spoke >= RECORD_SECONDS):
            self._log.write(
                Event.PROGRESS,
                stage=self._stage,
                task=self._doing,
                done=self._done,
                total=self._total,
                seconds=now - self._began,
                seconds_left=self._seconds_left if self._done < self._total else None,
            )
        else:
            return
        self._spoke = now


@contextmanager
def reported(terminal: Terminal, stage: str) -> Iterator[WorkProgress]:
    """Report a block as the only stage of a command; yields its progress callback."""
    with StageReporter(terminal) as reporter:
        reporter.on_stage(stage, None)
        began = time.perf_counter()
        yield reporter.progress
        reporter.on_stage(stage, StageOutcome(stage, False, time.perf_counter() - began))

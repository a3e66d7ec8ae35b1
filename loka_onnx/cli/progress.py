"""Stages and work in progress on standard error.

A terminal gets one line per finished stage and, below, a line that moves for the one that runs: which of how
many stages, its task, how long it has been at work, and how long the task will still take. A pipe gets the
lines of the stages only, and a line now and then for a stage that takes minutes. A log in JSON gets the same
as records (`log_lines`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from loka_onnx.cli.log_lines import Event
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


class StageReporter:
    """Reports the stages of a run; pass its `callbacks` to `RunOptions`.

    Args:
        terminal: Where to report; nothing is reported when it is quiet.
    """

    def __init__(self, terminal: Terminal) -> None:
        self._console, self._quiet, self._log = terminal.err, terminal.quiet, terminal.log
        self._live = not terminal.quiet and terminal.log is None and terminal.err.is_terminal
        # rich keeps the pace of tasks, also where it shows none.
        self._bar = _line_of(terminal)
        self._task: TaskID | None = None
        self._stage, self._began, self._spoke = "", 0.0, 0.0
        self._begun, self._to_come = 0, list[str]()
        self._doing, self._done, self._total = "", 0, 0
        self._lock, self._ended = threading.RLock(), threading.Event()
        self._heart = threading.Thread(target=self._beats, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        if self._live:
            self._bar.start()
        elif not self._quiet:
            self._heart.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._heart.is_alive():
            self._heart.join()
        # What failed must not leave its line below the message.
        self._drop_task()
        if self._live:
            self._bar.stop()

    @property
    def callbacks(self) -> dict[str, Any]:
        """Options of a run that is to be reported."""
        return {"progress": self.progress, "on_stage": self.on_stage, "on_stages": self.on_stages}

    def on_stages(self, stages: Sequence[str]) -> None:
        """These stages are to come, in this order; some may turn out to be unnecessary."""
        self._to_come = list(stages)

    def on_stage(self, stage: str, outcome: Outcome | None) -> None:
        """A stage begins (None) or has ended."""
        with self._lock:
            self._drop_task()
            self._stage, self._began = "" if outcome else stage, time.monotonic()
            self._spoke, self._doing, self._done, self._total = self._began, "", 0, 0
            if outcome is None:
                self._begin(stage)
            elif not self._quiet and self._log is not None:
                ended = {"reused": outcome.reused, "seconds": outcome.seconds, **self._position}
                self._log.write(Event.STAGE_ENDED, stage=stage, **ended)
            elif not self._quiet:
                self._console.print(f"[green]✓[/green] {escape(stage):<14} {_duration(outcome)}")

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
            if self._log is not None and not self._quiet:
                now, is_last = time.monotonic(), 0 < total <= done
                if is_new or is_last or now - self._spoke >= RECORD_SECONDS:
                    self._record(now)
        self._beat()

    def _begin(self, stage: str) -> None:
        if stage in self._to_come:
            del self._to_come[: self._to_come.index(stage) + 1]
        self._begun += 1
        self._add_task()
        if self._log is not None and not self._quiet:
            self._log.write(Event.STAGE_STARTED, stage=stage, **self._position)

    def _add_task(self) -> None:
        place = "{position} of {stages}".format(**self._position) if self._position else ""
        # A little short of the end: rich stops the clock of a task that is complete, and the next task of the
        # stage, or a last step without any report, would look dead.
        total = self._total + 1e-3 if self._total else None
        text = escape(self._text)
        self._task = self._bar.add_task(
            text, total=total, completed=self._done, place=place, began=self._began
        )

    @property
    def _text(self) -> str:
        doing = self._doing or DOING.get(self._stage, "")
        if not doing or doing.startswith(self._stage):
            return doing or self._stage
        return f"{self._stage}: {doing}"

    @property
    def _position(self) -> dict[str, Any]:
        """Which stage of how many; nothing where it is not known how many there are."""
        known = self._begun + len(self._to_come)
        return {"position": self._begun, "stages": known} if known > 1 else {}

    @property
    def _rich_task(self) -> Task | None:
        return next((task for task in self._bar.tasks if task.id == self._task), None)

    def _record(self, now: float) -> None:
        self._spoke = now
        if self._log is not None:
            self._log.write(
                Event.PROGRESS,
                stage=self._stage,
                task=self._doing or None,
                done=self._done,
                total=self._total,
                seconds=now - self._began,
                seconds_left=_seconds_left(self._rich_task) if self._done < self._total else None,
            )

    def _beats(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            self._beat()

    def _beat(self) -> None:
        """A line for a log without a terminal, where it has heard nothing for long."""
        with self._lock:
            now = time.monotonic()
            if self._live or self._quiet or not self._stage or now - self._spoke < HEARTBEAT_SECONDS:
                return
            if self._log is not None:
                self._record(now)
                return
            self._spoke = now
            parts = [self._text if self._doing else self._stage, f"{clock(now - self._began)} so far"]
            task = self._rich_task
            if self._total and task is not None:
                parts = [parts[0], _share(task), parts[1], f"{_left(task)} left"]
            self._console.print(f"  {'  '.join(parts)}", markup=False)

    def _drop_task(self) -> None:
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


def clock(seconds: float | None) -> str:
    """A time as a clock shows it, ``0:07``, ``12:34``, ``1:02:03``; a dash where it is not known."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _seconds_left(task: Task | None) -> float | None:
    """Seconds that a task will still take at its pace; None until it can be known."""
    if task is None or not task.total or not task.speed:
        return None
    return round(task.total - task.completed) / task.speed or None


def _left(task: Task) -> str:
    seconds = _seconds_left(task)
    return f"{'≤ ' if seconds is not None and UNTIL in task.description else ''}{clock(seconds)}"


def _share(task: Task) -> str:
    return f"{task.completed / task.total:4.0%}" if task.total else ""


class _Column(ProgressColumn):
    """A fact of the task as text."""

    def __init__(self, text: Any, style: str = "") -> None:
        super().__init__(Column(no_wrap=True, justify="right"))
        self._of, self._style = text, style

    def render(self, task: Task) -> Text:
        return Text(self._of(task), style=self._style)


def _line_of(terminal: Terminal) -> Progress:
    """The line that moves, as wide as the terminal has room."""
    width = terminal.err.width
    bar = [BarColumn(bar_width=24 if width >= WIDER else 12)] if width >= WIDE else []
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.fields[place]}", style="dim", table_column=Column(no_wrap=True)),
        TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
        *bar,
        _Column(_share),
        _Column(lambda task: clock(time.monotonic() - task.fields["began"]), "progress.elapsed"),
        _Column(lambda task: f"{_left(task)} left", "progress.remaining"),
        console=terminal.err,
        transient=True,
        expand=True,
        get_time=time.monotonic,
    )


def _duration(outcome: Outcome) -> str:
    if outcome.reused:
        return "[dim]reused[/dim]"
    return f"{outcome.seconds:.1f} s" if outcome.seconds >= QUICK_SECONDS else "< 0.1 s"

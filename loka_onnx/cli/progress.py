"""Stages and work in progress on standard error.

A terminal gets one line per finished stage and, below, a bar for the one that runs. A pipe gets the lines
only, and a line now and then for a stage that takes minutes.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from loka_onnx.cli.terminal import Terminal
from loka_onnx.pipeline.directory import Outcome

HEARTBEAT_SECONDS = 30.0
"""A log without a terminal gets a line this often while a stage runs."""
QUICK_SECONDS = 0.05
"""A stage that took less is not worth its time."""


class StageReporter:
    """Reports the stages of a run; pass `on_stage` and `progress` to `RunOptions`.

    Args:
        terminal: Where to report; nothing is reported when it is quiet.
    """

    def __init__(self, terminal: Terminal) -> None:
        self._console = terminal.err
        self._quiet = terminal.quiet
        self._live = not terminal.quiet and terminal.err.is_terminal
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[share]}"),
            TimeElapsedColumn(),
            console=terminal.err,
            transient=True,
        )
        self._task: TaskID | None = None
        self._stage = ""
        self._spoke = time.monotonic()

    def __enter__(self) -> Self:
        if self._live:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What failed must not leave its bar below the message.
        self._drop_bar()
        if self._live:
            self._bar.stop()

    def on_stage(self, stage: str, outcome: Outcome | None) -> None:
        """A stage begins (None) or has ended."""
        self._drop_bar()
        self._stage = stage
        self._spoke = time.monotonic()
        if outcome is None:
            if self._live:
                self._task = self._bar.add_task(escape(stage), total=None, share="")
        elif not self._quiet:
            self._console.print(f"[green]✓[/green] {escape(stage):<14} {_duration(outcome)}")

    def progress(self, task: str, done: int, total: int) -> None:
        """`done` of `total` units of a task of the running stage are finished."""
        text = task if task.startswith(self._stage) else f"{self._stage}: {task}"
        share = f"{done / total:4.0%}" if total else ""
        now = time.monotonic()
        if self._live and self._task is not None:
            # A little short of the end: rich stops the clock of a task that is complete, and the next task of
            # the stage, or a last step without any report, would look dead.
            end = total + 1e-3 if total else None
            self._bar.update(self._task, description=escape(text), completed=done, total=end, share=share)
        elif not self._live and not self._quiet and now - self._spoke >= HEARTBEAT_SECONDS:
            self._spoke = now
            self._console.print(f"  {text} {share}", markup=False)

    def _drop_bar(self) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None


def _duration(outcome: Outcome) -> str:
    if outcome.reused:
        return "[dim]reused[/dim]"
    return f"{outcome.seconds:.1f} s" if outcome.seconds >= QUICK_SECONDS else "< 0.1 s"

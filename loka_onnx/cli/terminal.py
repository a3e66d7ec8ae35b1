"""Streams of the command line: results to standard output, everything else to standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TextIO

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from loka_onnx.bundle.format.documents import printable
from loka_onnx.cli.log_lines import JsonLog


@dataclass(frozen=True)
class Terminal:
    """The streams of results and of messages; with a `log` messages and progress are its records instead."""

    out: Console
    err: Console
    quiet: bool = False
    log: JsonLog | None = None

    @classmethod
    def open(cls, *, quiet: bool = False, log: JsonLog | None = None) -> Terminal:
        """A terminal over the process's own streams."""
        return cls(_console(sys.stdout), _console(sys.stderr), quiet, log)

    def say(self, *parts: str | tuple[str, str]) -> None:
        """Print texts, or pairs of a text and its style, as a line that is never wrapped."""
        self.out.print(Text.assemble(*parts), soft_wrap=True)


def print_words(console: Console, line: Text) -> None:
    """Print a line, wrapped at words on a terminal and indented below its first ones.

    It is whole in a pipe, and where a word, such as a path to copy, is longer than the terminal is wide.
    """
    indent = len(line.plain) - len(line.plain.lstrip()) + 2
    width = console.width - indent
    if not console.is_terminal or "\n" in line.plain or max(map(len, line.plain.split()), default=0) > width:
        console.print(line, soft_wrap=True)
        return
    for number, part in enumerate(line.wrap(console, width)):
        console.print(Text.assemble(" " * indent if number else "", part), soft_wrap=True)


def terminal_of(context: typer.Context) -> Terminal:
    """The terminal that the global options set up."""
    return context.find_object(Terminal) or Terminal.open()


def is_plain(stream: TextIO) -> bool:
    """True if a stream takes lines only: no cursor movement, and no colour unless FORCE_COLOR asks for it."""
    return not stream.isatty() or _is_without_colour()


def _is_without_colour() -> bool:
    """True if the user wants none anywhere; NO_COLOR (no-color.org) wins over FORCE_COLOR."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


class _SafeConsole(Console):
    """Shows escapes for what others wrote to move the cursor, set the title or hide text: see `printable`."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text = segment.text
            if segment.control or text.replace("\n", "").isprintable():
                yield segment
            else:
                yield Segment("\n".join(printable(line) for line in text.split("\n")), segment.style)


def _console(stream: TextIO) -> Console:
    if is_plain(stream):
        # FORCE_COLOR colours what goes through a pipe; rich would also move the cursor there.
        is_coloured = bool(os.environ.get("FORCE_COLOR")) and not _is_without_colour()
        colours: Literal["standard"] | None = "standard" if is_coloured else None
        return _SafeConsole(file=stream, force_terminal=False, color_system=colours, highlight=False)
    return _SafeConsole(file=stream, highlight=False)

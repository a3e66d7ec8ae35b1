"""A command on a terminal: a pseudo-terminal that it runs on, and the screen that a user would see."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_SEQUENCE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b[\]P][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[=>()][0B]?")


def screen(text: str) -> list[str]:
    """Lines that a terminal shows after this output, without the empty ones at its end.

    Knows what rich writes: carriage return, line feed, cursor up and erase line; colours are dropped.
    """
    lines, row, column, place = [""], 0, 0, 0
    while place < len(text):
        found = _SEQUENCE.match(text, place)
        if found is not None:
            count = int(found[1]) if (found[1] or "").isdigit() else 1
            if found[2] == "A":
                row = max(0, row - count)
            elif found[2] == "K":
                lines[row] = "" if found[1] == "2" else lines[row][:column]
            place = found.end()
            continue
        character = text[place]
        place += 1
        if character == "\r":
            column = 0
        elif character == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        elif character.isprintable():
            lines[row] = lines[row][:column].ljust(column) + character + lines[row][column + 1 :]
            column += 1
    shown = [line.rstrip() for line in lines]
    while shown and not shown[-1]:
        shown.pop()
    return shown


@dataclass
class Session:
    """A process on a pseudo-terminal.

    Attributes:
        process: The process.
        terminal: File descriptor of our end.
        text: All that it wrote so far.
    """

    process: subprocess.Popen[bytes]
    terminal: int
    text: str = ""
    _rest: bytes = field(default=b"", repr=False)

    def read_until(self, has_come: Callable[[str], bool], seconds: float = 60.0) -> bool:
        """Read until something was written, or the process has ended; says whether it was."""
        end = time.monotonic() + seconds
        while not has_come(self.text):
            ready, _, _ = select.select([self.terminal], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return False
            try:
                data = os.read(self.terminal, 65536)
            except OSError:  # EIO: the other end is closed
                return has_come(self.text)
            if not data:
                return has_come(self.text)
            self._rest += data
            whole = self._rest.decode("utf-8", "ignore")
            self._rest = self._rest[len(whole.encode()) :]
            self.text += whole
        return True

    def type(self, keys: str) -> None:
        """Type keys; ``\\x03`` is Ctrl-C."""
        os.write(self.terminal, keys.encode())

    def end(self, seconds: float = 60.0) -> int:
        """Read to the end; returns the exit code."""
        self.read_until(lambda text: False, seconds)
        os.close(self.terminal)
        return self.process.wait(seconds)


def start(
    command: Sequence[str | Path],
    *,
    columns: int = 100,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Session:
    """Run a command on a terminal of so many columns, which knows colours."""
    variables = {k: v for k, v in os.environ.items() if k not in {"NO_COLOR", "FORCE_COLOR", "COLUMNS"}}
    variables |= {"TERM": "xterm-256color", **(environment or {})}
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", _ATTACH, *command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=cwd,
        env=variables,
        start_new_session=True,
    )
    os.close(theirs)
    return Session(process, ours)


_ATTACH = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Makes the terminal the one that its session is controlled by, so that Ctrl-C reaches the command."""

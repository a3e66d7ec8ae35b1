"""What every child does: say that its imports are done, take one job, answer it. Needs nothing but Python."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any


def answer(packages: Sequence[str], work: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Do one job and end.

    Args:
        packages: Distributions whose versions are told.
        work: Does the job; what it returns is the answer, to which seconds of the clock and of the CPU are
            added where it gave none of its own. An exception is an answer too: its type and text, with the
            traceback in the log.
    """
    # What libraries print must not mix with the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    print(json.dumps({name: version(name) for name in packages}), file=answers)
    job = json.loads(sys.stdin.readline())
    began, used = time.perf_counter(), _cpu_seconds()
    try:
        found = work(job)
        found.setdefault("seconds", time.perf_counter() - began)
        found.setdefault("cpu_seconds", _cpu_seconds() - used)
    # Whatever a tool raises is its row in the table.
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        sys.stderr.flush()
        found = {"failure": f"{type(error).__name__}: {str(error) or _place_of(error)}"[:600]}
    print(json.dumps(found), file=answers)


def _place_of(error: BaseException) -> str:
    """The line that raised, for an error without a text."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"`{last.line}` in {Path(*Path(last.filename).parts[-3:])}, line {last.lineno}"


def _cpu_seconds() -> float:
    """Of all threads, and of the child processes that have ended."""
    return sum(os.times()[:4])

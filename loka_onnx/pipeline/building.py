"""Builds side by side, as many as memory allows, with their results in the order asked for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import psutil

from loka_onnx.engines.isolation import Cancelled, cancelled_by, interrupts_held

R = TypeVar("R")

CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Task(Generic[R]):
    """Named work of a thread, which runs it in a child process of its own (`engines.isolation`)."""

    name: str
    work: Callable[[], R]


def how_many(asked_for: int | None, limit_bytes: int, available_bytes: int | None = None) -> int:
    """Return the number of builds that may run at once: as many as fit into free memory, at least one.

    `asked_for` is the user's limit; None for half of the cores, because compilers have threads of their own.
    """
    wanted = max(1, len(os.sched_getaffinity(0)) // 2) if asked_for is None else asked_for
    free = available_memory() if available_bytes is None else available_bytes
    return max(1, min(wanted, free // limit_bytes))


def available_memory(cgroup: Path = CGROUP) -> int:
    """Free memory in bytes: of the machine, or less by the limit of a control group (v2, "Memory")."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
        lines = (cgroup / "memory.stat").read_text(encoding="ascii").splitlines()
        # Cached files, which the kernel gives up first, count as used.
        inactive = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    except (OSError, ValueError):
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - used + inactive))


def build_all(
    tasks: Iterable[Task[R]],
    workers: int,
    on_change: Callable[[Sequence[str], int], None] = lambda running, done: None,
) -> list[R]:
    """Do all tasks, so many at once; results are in the order of the tasks.

    Tasks are taken one by one in this thread, which also calls `on_change` with the names of those that run
    and how many are done; one worker is this thread. An error of one, or an interrupt, ends the children of
    all others before it is raised.
    """
    if workers == 1:
        results: list[R] = []
        for task in tasks:
            on_change([task.name], len(results))
            results.append(task.work())
        on_change([], len(results))
        return results
    stop = threading.Event()

    def work(task: Task[R]) -> R:
        if stop.is_set():
            raise Cancelled
        with cancelled_by(stop):
            return task.work()

    pool = ThreadPoolExecutor(workers, thread_name_prefix="build")
    names: dict[Future[R], str] = {}

    def tell() -> None:
        # The pool takes them in order.
        waiting = [name for future, name in names.items() if not future.done()]
        on_change(waiting[:workers], len(names) - len(waiting))

    try:
        for task in tasks:
            names[pool.submit(work, task)] = task.name
            tell()
            for future in names:
                if future.done():
                    # The error of a failed task is raised before the next one is made.
                    future.result()
        for future in as_completed(names):
            future.result()
            tell()
        return [future.result() for future in names]
    finally:
        # After an error, running children are ended and awaited.
        stop.set()
        with interrupts_held():
            pool.shutdown(cancel_futures=True)

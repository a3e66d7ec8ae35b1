"""How many builds run at once, in which order their results come, and what an error or Ctrl-C leaves."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from loka_onnx.pipeline.building import Task, available_memory, build_all, how_many

GIB = 1 << 30


@pytest.mark.parametrize(
    ("asked_for", "limit", "free", "expected"),
    [
        (4, 16 * GIB, 70 * GIB, 4),
        (4, 16 * GIB, 50 * GIB, 3),  # 3 × 16 fit into 50, 4 × 16 do not
        (4, 16 * GIB, 10 * GIB, 1),  # one always runs: it fails alone
        (1, GIB, 70 * GIB, 1),
        (None, GIB, 700 * GIB, max(1, len(os.sched_getaffinity(0)) // 2)),
    ],
)
def test_limits_never_add_up_to_more_than_is_free(asked_for, limit, free, expected):
    assert how_many(asked_for, limit, free) == expected


def test_a_container_has_what_it_is_allowed(tmp_path):
    free = psutil.virtual_memory().available
    # Not in a control group, or in one without a limit.
    assert available_memory(tmp_path) == pytest.approx(free, rel=0.2)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 400\ninactive_file 200\nactive_file 100\n")
    assert available_memory(tmp_path) == pytest.approx(free, rel=0.2)
    (tmp_path / "memory.max").write_text("1000\n")
    assert available_memory(tmp_path) == 1000 - 700 + 200


def test_results_keep_the_order_of_the_tasks_and_run_at_once():
    met, told = threading.Barrier(3), []

    def work(number: int) -> int:
        met.wait(10)  # passes only where three run at once
        time.sleep(0.02 * (3 - number % 3))
        return number

    tasks = [Task(f"t{i}", lambda i=i: work(i)) for i in range(6)]
    assert build_all(tasks, 3, lambda running, done: told.append((running, done))) == [0, 1, 2, 3, 4, 5]
    counts = [done for _, done in told]
    assert counts == sorted(counts) and told[-1] == ([], 6)
    assert {name for running, _ in told for name in running} == {f"t{i}" for i in range(6)}
    assert all(len(running) == min(3, 6 - done) for running, done in told[5:]), "those that run, no others"


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_ends_the_others(workers):
    begun: list[int] = []

    def work(number: int) -> int:
        begun.append(number)
        if number == 1:
            raise ValueError("option 'speed' is unknown")
        # Long enough for the thread that waits to see the error, however busy the machine is.
        time.sleep(0.05)
        return number

    with pytest.raises(ValueError, match="'speed'"):
        build_all([Task(str(i), lambda i=i: work(i)) for i in range(50)], workers)
    assert len(begun) < 50


PROGRAM = """
import sys
from pathlib import Path
import faulty_backends as faulty
from dataclasses import replace
from tiny_models import mlp
from loka_onnx.core.formats import Precision
from loka_onnx.core.job import BatchSizes
from loka_onnx.engines.request import BuildLimits, BuildRequest
from loka_onnx.pipeline.building import Task, build_all
here = Path(sys.argv[1])
model = mlp(here / "model", Precision.FP32, Precision.FP32, fp8=False)

def task(i):
    request = BuildRequest(model.path, model.plan, model.sites, "cpu", "cpu", BatchSizes(1, 8, 16),
                           here / str(i) / "engine", model.sample, limits=BuildLimits(600.0, 1 << 32))
    return Task(str(i), lambda: faulty.TellsAndHangs().build(request))

build_all([task(i) for i in range(5)], 2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_child_and_no_directory(tmp_path, number):
    contract = Path(__file__).parents[2] / "contract"
    # As the command does: SIGTERM ends the work like Ctrl-C; and a test in the background inherits no SIGINT.
    program = f"import signal\nsignal.signal({int(number)}, signal.default_int_handler)\n" + PROGRAM
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(contract), *sys.path])}
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], env=environment) as run:
        told = [tmp_path / str(i) / "worker" for i in range(2)]
        deadline = time.monotonic() + 40
        while not all(path.is_file() for path in told):
            assert time.monotonic() < deadline and run.poll() is None
            time.sleep(0.05)
        children = [int(path.read_text()) for path in told]
        assert all(psutil.pid_exists(child) for child in children)
        run.send_signal(number)
        assert run.wait(30) != 0
    for child in children:
        assert not psutil.pid_exists(child)
    assert list(tmp_path.glob("*/.engine.building-*")) == []
    assert not (tmp_path / "2").exists(), "a task that had not begun was begun"

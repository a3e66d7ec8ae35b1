"""Time of a request from host memory beside that of its kernels, by the engine of a bundle that runs here.

In turns: `Engine.infer` with NumPy arrays, with arrays of `Engine.buffers`, the engine's kernels alone with
the batch in device memory, and the launch of a request's CUDA graph with the wait for it, which no Python
around it can go below; behind them requests a second of 1, 2 and 4 sessions, a thread for each, and the 99th
percentile of their times::

    python -m benchmarks.micro.host_requests --bundles DIR... --sizes 256 2048 --out DIR

Requests have the values of the bundle's sample, repeated.
"""

from __future__ import annotations

import argparse
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines.timing import device_clock, device_facts, summary, timed_in_turns
from benchmarks.recording import write_record
from loka_onnx.engines.inductor.executors import Staging
from loka_onnx.runtime import Engine, Serving, load
from loka_onnx.runtime.requests import repeated
from loka_onnx.sessions.runner import Buffers, Resident

SESSIONS = (1, 2, 4)


def clock(resident: Resident) -> float:
    """Microseconds of one request."""
    began = time.perf_counter()
    resident.launch()
    return (time.perf_counter() - began) * 1e6


def figures(bundle: Path, sizes: list[int], turns: int, seconds: float) -> dict[str, Any]:
    """Times by batch size, and requests a second by number of sessions."""
    found: dict[str, Any] = {}
    with load(bundle, trust=True) as engine:
        found["engine"], found["columns"] = engine.entry.id, len(engine.inputs)
        for size in sizes:
            request = {name: repeated(value, size) for name, value in engine._request.items()}
            buffers = engine.buffers(size)
            for name, value in request.items():
                buffers[name][:] = value
            assert isinstance(buffers, Buffers)
            runner = engine.engine_for(size)._runner
            resident = runner.resident(request)
            alone = timed_in_turns({"device": resident}, turns, device_clock)
            whole = {
                "arrays": Resident(partial(engine.infer, request), str),
                "buffers": Resident(partial(engine.infer, buffers), str),
                "session alone": Resident(partial(runner.run, request), str),
            }
            if isinstance(buffers.memory, Staging):
                graph = Resident(buffers.memory.captured.replay, resident.wait)
                whole["launch and wait"] = Resident(graph, str)
            taken = timed_in_turns(whole, turns * 20, clock)
            found[str(size)] = {name: summary(values) for name, values in {**alone, **taken}.items()}
    for sessions in SESSIONS:
        with load(bundle, trust=True, serving=Serving(sessions=sessions)) as engine:
            for size in sizes:
                per_second, p99 = rate(engine, size, sessions, seconds)
                found[str(size)] |= {f"requests/s, {sessions}": per_second, f"p99 µs, {sessions}": p99}
    return found


def rate(engine: Engine, size: int, threads: int, seconds: float) -> tuple[float, float]:
    """Requests a second with a thread for each session, from arrays of `buffers`; the 99th percentile of the
    time of one, in microseconds.
    """
    taken: list[list[float]] = [[] for _ in range(threads)]
    stop = threading.Event()

    def ask(number: int) -> None:
        buffers = engine.buffers(size)
        for name, value in engine._request.items():
            buffers[name][:] = repeated(value, size)
        request = Resident(partial(engine.infer, buffers), str)
        while not stop.is_set():
            taken[number].append(clock(request))

    asking = [threading.Thread(target=ask, args=(number,)) for number in range(threads)]
    began = time.perf_counter()
    for thread in asking:
        thread.start()
    time.sleep(seconds)
    stop.set()
    for thread in asking:
        thread.join()
    seconds = time.perf_counter() - began
    return sum(map(len, taken)) / seconds, float(np.percentile(np.concatenate(taken), 99.0))


def main() -> None:
    """Print and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundles", type=Path, nargs="+", required=True)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = {}
    for bundle in options.bundles:
        name = bundle.parent.parent.name
        results[name] = figures(bundle, options.sizes, options.turns, options.seconds)
        print(name, results[name], flush=True)
    write_record("host_requests", results, {"device": device_facts(), "turns": options.turns}, options.out)


if __name__ == "__main__":
    main()

"""`bundle serve` under 64 clients at once: answers, errors, and memory of the server.

The server is a process of its own, and so are the clients: `tritonclient.http`, one connection each, in one
process (gevent). Each sends requests of many sizes without pause, in binary and in JSON in turns, and holds
every answer against `loka_onnx.runtime.load` of the same bundle, bit for bit. Memory of the server is read
twice a second; it may grow by at most 5 % after the first 10 s: the largest reading after that against the
one then. The model is one of the zoo with random weights: what is measured is the server::

    python -m benchmarks.pipeline.serve_soak
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil

from benchmarks.pipeline.calibration_cost import SPEC, make_case
from benchmarks.recording import write_record
from loka_onnx.bundle.format.files import read_manifest, read_sample
from loka_onnx.bundle.writer import DEFAULT_TOLERANCE, BundleContents, Expectation, write_bundle
from loka_onnx.core.artifact import ModelArtifact, OutputSpec
from loka_onnx.core.evaluation import Choice
from loka_onnx.core.manifest import BatchRange
from loka_onnx.core.plan import PlanSet
from loka_onnx.pipeline.versions import library_versions
from loka_onnx.runtime import load
from loka_onnx.sessions.onnx_session import OnnxSession
from loka_onnx.sessions.runner import Arrays

SIZES = (1, 3, 16, 64, 200)
"""Rows of a request; none is a size that an engine would be warmed up for."""
WARM_SECONDS = 10.0
MOST_GROWTH = 0.05
READ_SECONDS = 0.5
START_SECONDS = 60.0
SHOWN_ERRORS = 5

SERVE = """
import sys
from loka_onnx.cli.main import main
main(["bundle", "serve", *sys.argv[1:]])
"""


@dataclass(frozen=True)
class Served:
    """A server in a process of its own.

    Attributes:
        process: The process.
        host: ``address:port``.
        model: Name of its model.
        line: What it printed when it was ready.
    """

    process: subprocess.Popen[str]
    host: str
    model: str
    line: str

    @property
    def url(self) -> str:
        """URL of the model."""
        return f"http://{self.host}/v2/models/{self.model}"


@dataclass(frozen=True)
class Answers:
    """What clients saw.

    Attributes:
        count: Answers by ``binary`` and ``json``.
        wrong: Answers that differ from the engine's own in a bit.
        errors: Requests that had no answer.
        first_errors: What the first of them said.
        latency_ms: Median and 99th percentile of all requests, as a client sees them.
    """

    count: dict[str, int]
    wrong: int
    errors: int
    first_errors: list[str]
    latency_ms: dict[str, float]


@dataclass(frozen=True)
class Memory:
    """Memory of a server while it was used.

    Attributes:
        seconds: When it was read, since the first request.
        anonymous_mib: Anonymous resident memory.
        resident_mib: All resident memory, mapped files included.
    """

    seconds: list[float] = field(default_factory=list)
    anonymous_mib: list[float] = field(default_factory=list)
    resident_mib: list[float] = field(default_factory=list)

    def growth(self, readings: list[float], after: float) -> float:
        """Relative growth: the largest reading from `after` seconds on, over the first of them, less 1."""
        later = [value for when, value in zip(self.seconds, readings, strict=True) if when >= after]
        return max(later) / later[0] - 1


@contextmanager
def served(bundle: Path, *arguments: str) -> Iterator[Served]:
    """Start ``bundle serve`` on a free port, and end it as a service manager does.

    Raises:
        RuntimeError: It does not say that it is ready, or does not end with 0.
    """
    command = [sys.executable, "-c", SERVE, str(bundle), "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(START_SECONDS, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        timer.cancel()
        if not line.startswith("ready: http://"):
            raise RuntimeError(f"the server did not start: {line!r}, exit code {process.wait()}")
        host, _, path = line.split()[1].removeprefix("http://").partition("/")
        yield Served(process, host, path.rpartition("/")[2], line)
        process.send_signal(signal.SIGTERM)
        if process.wait(timeout=START_SECONDS):
            raise RuntimeError(f"the server ended with {process.returncode}")
    finally:
        timer.cancel()
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def requests_of(bundle: Path) -> list[Arrays]:
    """A request of each size, made of the rows of the bundle's sample."""
    manifest = read_manifest(bundle)
    inputs = read_sample(bundle, manifest, manifest.fallback).inputs
    random = np.random.default_rng(0)
    count = len(next(iter(inputs.values())))
    picks = [random.integers(0, count, size) for size in SIZES]
    return [{name: value[pick] for name, value in inputs.items()} for pick in picks]


def run_clients(bundle: Path, host: str, model: str, clients: int, seconds: float) -> Answers:
    """Send requests from so many clients at once; for a process of its own, because it uses gevent."""
    import gevent
    from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
    from tritonclient.utils import np_to_triton_dtype

    engine = load(bundle)
    requests = requests_of(bundle)
    expected = [engine.infer(request) for request in requests]
    engine.close()
    count: Counter[str] = Counter()
    errors: list[str] = []
    took: list[float] = []
    end = time.monotonic() + seconds

    def tensors(request: Arrays, is_binary: bool) -> list[InferInput]:
        found = []
        for name, value in request.items():
            tensor = InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
            found.append(tensor.set_data_from_numpy(value, binary_data=is_binary))
        return found

    def ask(client: InferenceServerClient, place: int, is_binary: bool) -> None:
        outputs = [InferRequestedOutput(name, binary_data=is_binary) for name in expected[place]]
        began = time.perf_counter()
        answer = client.infer(model, tensors(requests[place], is_binary), outputs=outputs)
        took.append(time.perf_counter() - began)
        count["binary" if is_binary else "json"] += 1
        for name, value in expected[place].items():
            got = answer.as_numpy(name)
            same = (got.dtype, got.shape) == (value.dtype, value.shape) and got.tobytes() == value.tobytes()
            count["wrong"] += not same

    def work(number: int) -> None:
        with InferenceServerClient(host) as client:
            for turn in itertools.count(number):
                if time.monotonic() >= end:
                    return
                try:
                    ask(client, turn % len(requests), bool(turn // len(requests) % 2))
                except Exception as error:
                    errors.append(f"{type(error).__name__}: {error}")

    gevent.joinall([gevent.spawn(work, number) for number in range(clients)], raise_error=True)
    p50, p99 = (float(x) for x in np.percentile(took, (50, 99)) * 1000)
    wrong = count.pop("wrong")
    latency = {"p50": round(p50, 2), "p99": round(p99, 2)}
    return Answers(dict(count), wrong, len(errors), errors[:SHOWN_ERRORS], latency)


def soak(server: Served, bundle: Path, clients: int, seconds: float) -> tuple[Answers, Memory]:
    """Run the clients and read the server's memory meanwhile."""
    process = psutil.Process(server.process.pid)
    memory = Memory()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(os.getpid).result()
        work: Future[Answers] = pool.submit(run_clients, bundle, server.host, server.model, clients, seconds)
        # The clients import for some seconds; before the first request there is nothing to measure.
        _wait_for_traffic(process, work)
        began = time.monotonic()
        while not work.done():
            memory.seconds.append(time.monotonic() - began)
            anonymous, resident = _memory_mib(server.process.pid)
            memory.anonymous_mib.append(anonymous)
            memory.resident_mib.append(resident)
            time.sleep(READ_SECONDS)
        return work.result(), memory


def _wait_for_traffic(process: psutil.Process, work: Future[Answers]) -> None:
    while not work.done() and len(process.net_connections("tcp")) <= 1:
        time.sleep(0.05)


def _memory_mib(pid: int) -> tuple[float, float]:
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    anonymous, resident = (int(fields[name].split()[0]) / 1024 for name in ("RssAnon", "VmRSS"))
    return anonymous, resident


def zoo_bundle(model: str, directory: Path) -> Path:
    """A bundle of a model of the zoo that ONNX Runtime runs in FP32."""
    case = make_case(model, directory, batches=1, threads=1)
    return make_bundle(case.artifact, SPEC, dict(next(case.data.batches(64)).inputs), directory / model)


def make_bundle(artifact: ModelArtifact, judged: OutputSpec, sample: Arrays, directory: Path) -> Path:
    """A bundle that holds an exported model and no other engine.

    Args:
        artifact: The model; its path is absolute.
        judged: One of its outputs.
        sample: Rows to ship.
        directory: Where the bundle goes.
    """
    answer = OnnxSession(artifact.path).run(sample)
    contents = BundleContents(
        root=artifact.path.parent,
        model=artifact,
        judged=(judged,),
        batch=BatchRange(1, 4096),
        engines=(),
        fallback=Expectation(answer, dict.fromkeys(answer, DEFAULT_TOLERANCE)),
        sample=sample,
        plans=PlanSet(()),
        choice=Choice(()),
        report=(),
        lineage=(),
        versions=library_versions(),
    )
    return write_bundle(contents, directory)


def main() -> None:
    """Run and record; fails where an answer is wrong, a request failed, or memory grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="dlrm")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    with TemporaryDirectory() as scratch:
        bundle = zoo_bundle(options.model, Path(scratch))
        with served(bundle) as server:
            print(server.line, end="", flush=True)
            answers, memory = soak(server, bundle, options.clients, options.seconds)
    figures = _figures(answers, memory)
    print(json.dumps(figures, indent=1))
    grown = figures["growth_after_10_s"]["anonymous"] > MOST_GROWTH
    if answers.wrong or answers.errors or grown:
        sys.exit("an answer is wrong, a request failed, or memory grew")
    settings = {"model": options.model, "clients": options.clients, "seconds": options.seconds, "rows": SIZES}
    print(write_record("serve_soak", figures, settings))


def _figures(answers: Answers, memory: Memory) -> dict[str, Any]:
    growth = {
        name: round(memory.growth(readings, WARM_SECONDS), 4)
        for name, readings in (("anonymous", memory.anonymous_mib), ("resident", memory.resident_mib))
    }
    return {
        "answers": asdict(answers),
        "growth_after_10_s": growth,
        "anonymous_mib": {
            f"at {at} s": round(value, 1)
            for at, value in zip(map(round, memory.seconds), memory.anonymous_mib, strict=True)
            if at % 10 == 0
        },
    }


if __name__ == "__main__":
    main()

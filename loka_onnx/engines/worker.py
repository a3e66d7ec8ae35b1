"""Child process of a build: ``python -m loka_onnx.engines.worker BACKEND DIRECTORY``.

Reads ``request.json`` from the directory, builds into ``engine/`` below it, runs the first batches, and
writes ``response.json``. ``phase`` holds the current step, so that the parent can name it after a crash.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from loka_onnx.core import serde
from loka_onnx.engines.base import Backend
from loka_onnx.engines.device_lock import device_alone
from loka_onnx.engines.request import ENGINE, PHASE, REQUEST, RESPONSE, WAITING, BuildRequest, BuildResponse
from loka_onnx.errors import DataError, EngineError, LokaError
from loka_onnx.sessions.backends import resolve
from loka_onnx.sessions.model_files import batched_outputs, read_model
from loka_onnx.sessions.runner import Arrays, Runner

PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str]) -> int:
    """Serve one request; return 0 when there is a response."""
    _die_with_parent()
    path, directory = arguments[0], Path(arguments[1])
    try:
        backend: Backend = resolve(path)()
        response = _serve(backend, serde.read(BuildRequest, directory / REQUEST), directory)
    except Exception as error:
        # Vendor libraries raise errors of any type.
        traceback.print_exc()
        known = isinstance(error, LokaError)
        response = BuildResponse(error=str(error) if known else f"{type(error).__name__}: {error}")
    serde.write(response, directory / RESPONSE)
    return 0


def _serve(backend: Backend, request: BuildRequest, directory: Path) -> BuildResponse:
    def enter(phase: str) -> None:
        (directory / PHASE).write_text(phase, encoding="utf-8")

    into = directory / ENGINE
    into.mkdir()
    waiting = directory / WAITING
    enter("compiling")
    with device_alone(request.architecture, waiting) if backend.times_kernels else nullcontext():
        started = time.monotonic()
        engine = backend.compile(request, into)
        seconds = time.monotonic() - started
    enter("reading the precision of the sites")
    sites = backend.read_precision(request, engine)
    not_run = backend.why_not_run(request.architecture)
    if not not_run:
        enter("running the first batches")
        with (
            device_alone(request.architecture, waiting),
            backend.load(engine, request.architecture) as runner,
        ):
            _first_batches(runner, request)
    return BuildResponse(
        engine=engine.relative_to(into).as_posix(),
        files=tuple(file.relative_to(into).as_posix() for file in backend.files(engine)),
        sites=sites,
        not_run=not_run,
        build_seconds=seconds,
        version=backend.availability().version,
    )


def _first_batches(runner: Runner, request: BuildRequest) -> None:
    """Run the smallest batch, and the largest that the sample has rows for."""
    with np.load(request.sample, allow_pickle=False) as arrays:
        sample = {name: np.asarray(arrays[name]) for name in arrays.files}
    rows = min((len(value) for value in sample.values()), default=0)
    if rows < request.batch.minimum:
        raise DataError(
            "E2822 the sample is too small for a first batch",
            where=str(request.sample),
            evidence=f"{rows} rows, the smallest batch has {request.batch.minimum}",
        )
    batched = batched_outputs(read_model(request.model))
    for size in sorted({request.batch.minimum, min(rows, request.batch.maximum)}):
        outputs: Arrays = runner.run({name: value[:size] for name, value in sample.items()})
        for name, value in outputs.items():
            if name in batched and value.shape[:1] != (size,):
                raise EngineError(
                    f"E2823 output '{name}' does not follow the batch",
                    evidence=f"a batch of {size} rows gave shape {value.shape}",
                    remedy="export the model with axis 0 of every input and output dynamic",
                )


def _die_with_parent() -> None:
    """Have Linux end this process when its parent dies, so that no build outlives its run."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

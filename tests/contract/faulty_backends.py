"""Backends whose hooks misbehave inside the build process, as engine makers do."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from loka_onnx.core.engine import SitePrecision
from loka_onnx.engines.onnxruntime.backend import OnnxRuntimeBackend
from loka_onnx.engines.request import BuildRequest
from loka_onnx.errors import EngineError
from loka_onnx.sessions.runner import Runner


class Segfaults(OnnxRuntimeBackend):
    def compile(self, request: BuildRequest, into: Path) -> Path:
        (into / "half-written").write_bytes(b"x")
        ctypes.string_at(0)
        raise AssertionError


class Hangs(OnnxRuntimeBackend):
    def compile(self, request: BuildRequest, into: Path) -> Path:
        while True:
            time.sleep(1)


class LeavesChild(OnnxRuntimeBackend):
    """Leaves a grandchild behind; its number goes to a file beside the output."""

    def compile(self, request: BuildRequest, into: Path) -> Path:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        request.output.with_name("grandchild").write_text(str(child.pid), encoding="utf-8")
        os._exit(1)


class TellsAndHangs(OnnxRuntimeBackend):
    """Hangs after leaving its process number beside the output."""

    def compile(self, request: BuildRequest, into: Path) -> Path:
        partial = request.output.with_name("worker.partial")
        partial.write_text(str(os.getpid()), encoding="utf-8")
        partial.rename(request.output.with_name("worker"))
        while True:
            time.sleep(1)


class Allocates(OnnxRuntimeBackend):
    def compile(self, request: BuildRequest, into: Path) -> Path:
        kept = []
        while True:
            kept.append(bytearray(os.urandom(1 << 20)))


class LeavesOut(OnnxRuntimeBackend):
    """Not faulty: prints what it left out, among other things."""

    def compile(self, request: BuildRequest, into: Path) -> Path:
        print("left out: the norm at 'n', which is too wide")
        print("something else", file=sys.stderr)
        return super().compile(request, into)

    def read_remarks(self, log: str) -> tuple[str, ...]:
        return tuple(line for line in log.splitlines() if line.startswith("left out: "))


class Raises(OnnxRuntimeBackend):
    def compile(self, request: BuildRequest, into: Path) -> Path:
        (into / "half-written").write_bytes(b"x")
        raise EngineError("no tactic for node 'mlp.fc0'", evidence="workspace 0 bytes", remedy="give it more")


class RaisesForeign(OnnxRuntimeBackend):
    def compile(self, request: BuildRequest, into: Path) -> Path:
        raise RuntimeError("Myelin pass.cpp:1500")


class IsKilled(OnnxRuntimeBackend):
    def compile(self, request: BuildRequest, into: Path) -> Path:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class Exits(OnnxRuntimeBackend):
    def compile(self, request: BuildRequest, into: Path) -> Path:
        print("the vendor library says goodbye", flush=True)
        os._exit(7)


class ExitsAsIfDone(OnnxRuntimeBackend):
    def compile(self, request: BuildRequest, into: Path) -> Path:
        os._exit(0)


class SegfaultsInFirstBatch(OnnxRuntimeBackend):
    def load(self, engine: Path, architecture: str) -> Runner:
        ctypes.string_at(0)
        raise AssertionError


class MisreadsPrecision(OnnxRuntimeBackend):
    def read_precision(self, request: BuildRequest, engine: Path) -> tuple[SitePrecision, ...]:
        raise ValueError("compiled graph in an unknown form")

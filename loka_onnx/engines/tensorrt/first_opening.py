"""First opening of a TensorRT engine on a host, in a child process.

Deserializing a plan runs the library's code, which may end the process (seen: SIGSEGV in the lean runtime of
TensorRT 11.4 without a driver that it accepts). A server would end with it before it tried the bundle's other
engines. A success is recorded in the cache directory, by the digests and versions that it depends on.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from loka_onnx.core.digests import digest_file, digest_json
from loka_onnx.core.installation import cache_directory
from loka_onnx.engines.isolation import Ending, run_child, tail
from loka_onnx.engines.request import BuildLimits
from loka_onnx.errors import EngineError, LokaError
from loka_onnx.sessions.cuda import CudaDevice, driver_version

_LOG = logging.getLogger("loka_onnx.sessions")
LIMITS = BuildLimits(seconds=900.0)
"""Of the child: TensorRT for RTX compiles kernels while it loads."""
BEGUN, REFUSED = "loka-onnx: opening", 3
"""Output of the child before the library reads the engine, and its exit status where the library refuses."""


def check_opens(module: str, version: str, engine: Path, device: CudaDevice) -> None:
    """Open and close an engine in a child process, unless it has opened here before. Raises EngineError if
    the child ends meanwhile; a refusal passes: the next opening raises it.
    """
    known = [digest_file(engine), module, version, driver_version(), device.name, device.index]
    marker = cache_directory() / "opened" / digest_json(known)
    if marker.is_file():
        return
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        try:
            done = run_child(__name__, [module, os.fspath(engine), str(device.index)], log, LIMITS)
        except OSError as error:
            _LOG.warning("%s is opened without a trial: no child process starts (%s)", engine, error)
            return
        has_begun, said = BEGUN in log.read_text(encoding="utf-8", errors="replace"), tail(log)
    if done.ending is Ending.EXITED and done.code == 0:
        with suppress(OSError):
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()
    elif not has_begun:
        _LOG.warning("%s is opened without a trial: %s", engine, said)
    elif done.ending is not Ending.EXITED or done.code != REFUSED:
        raise EngineError(
            f"E0897 the engine does not open: a process that opens it by {module} {version} ends",
            where=str(engine),
            evidence=f"it {done.ended(LIMITS)}; {said}",
            remedy=f"update the NVIDIA driver, for CUDA {driver_version()} now, or build the engine again",
        )


def main(module: str, engine: str, device: str) -> int:
    """Open and close an engine, in the child; the exit status."""
    from loka_onnx.engines.tensorrt.session import TensorRtSession

    trt = importlib.import_module(module)
    print(BEGUN, flush=True)
    try:
        TensorRtSession(trt, Path(engine), int(device)).close()
    except LokaError as error:
        print(error, file=sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

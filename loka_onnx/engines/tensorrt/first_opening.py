"""First opening of a TensorRT engine on a host, in a child process.

Deserializing a plan runs the library's code, which may end the process (seen: SIGSEGV in the lean runtime of
TensorRT 11.4 without a driver that it accepts). A server would end with it before it tried the bundle's other
engines. A success is recorded in the cache directory, by the digests and versions that it depends on.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from loka_onnx.core.cache_directory import cache_directory
from loka_onnx.core.digests import digest_file, digest_json
from loka_onnx.errors import EngineError, LokaError
from loka_onnx.sessions.cuda import CudaDevice, driver_version

_LOG = logging.getLogger("loka_onnx.sessions")
SECONDS = 900.0
"""Time limit of the child: TensorRT for RTX compiles kernels while it loads."""
BEGUN, REFUSED = "loka-onnx: opening", 3
"""Output of the child before the library reads the engine, and its exit status where the library refuses."""


def check_opens(module: str, version: str, engine: Path, device: CudaDevice) -> None:
    """Open and close an engine in a child process, unless it has opened here before.

    An engine that is refused without a crash passes: the next opening raises that error.

    Raises:
        EngineError: The child ended while the library opened the engine.
    """
    known = [digest_file(engine), module, version, driver_version(), device.name, device.index]
    marker = cache_directory() / "opened" / digest_json(known)
    if marker.is_file():
        return
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-P", "-m", __name__, module, os.fspath(engine), str(device.index)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EngineError(
            "E0896 the engine does not open",
            where=str(engine),
            evidence=f"a child process took over {SECONDS:.0f} s",
        ) from None
    except OSError as error:
        _LOG.warning("%s is opened without a trial: no child process starts (%s)", engine, error)
        return
    if done.returncode == 0:
        with suppress(OSError):
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()
    elif BEGUN not in done.stdout:
        _LOG.warning("%s is opened without a trial: %s", engine, _last_line(done.stderr))
    elif done.returncode != REFUSED:
        raise EngineError(
            f"E0897 opening the engine ends the process: {module} {version} crashes on it",
            where=str(engine),
            evidence=f"a child process {_ending(done.returncode)}; {_last_line(done.stderr)}",
            remedy=f"update the NVIDIA driver, for CUDA {driver_version()} now, or build the engine again",
        )


def _ending(code: int) -> str:
    if code >= 0:
        return f"exited with {code}"
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:400] if lines else "it printed nothing"


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

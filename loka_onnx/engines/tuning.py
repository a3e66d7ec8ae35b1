"""Latencies of kernels on this machine: products in BF16 and FP8, and the quantize step.

On a GPU each kernel is captured into a CUDA graph of several calls, so that a launch costs as much as in an
engine. Activations stay in the caches between calls, as a layer's do; large weights alternate with copies, so
that they are read from memory as in an engine. All kernels of a shape are timed in turns, so that changes of
clocks affect all of them. On the CPU single calls are timed.

Each product also gets the error of its own arithmetic, relative to the float64 product of the same rounded
operands: Hopper's FP8 tensor cores keep about 14 bits of a partial sum ("DeepSeek-V3 Technical Report", arXiv
2412.19437, section 3.3.2), which a Q/DQ simulation does not show.
"""

from __future__ import annotations

import datetime
import platform
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from statistics import median, quantiles

from loka_onnx.core.devices import CPU, SLICE, device_called
from loka_onnx.core.installation import versions_of
from loka_onnx.core.timing import QUANTIZE, Kernel, KernelTiming, Provenance, Shape
from loka_onnx.engines.tuned_kernels import (
    Operands,
    PreparedOperands,
    Run,
    calls_in_turn,
    kernels_of,
    turns_of,
)
from loka_onnx.errors import ConfigError, EngineError, MissingPackage

CUDA = "cuda"
"""Torch's name of an accelerator, including AMD's."""
ROUNDS, CALLS, ERROR_ROWS = 15, 20, 256
"""Repetitions of a kernel, of which the median is taken; fewest calls in a CUDA graph; rows for an error."""
_QUERY = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit"


@dataclass(frozen=True)
class Refused:
    """A kernel that does not run on a shape, with its error message."""

    kernel: Kernel
    shape: Shape
    reason: str


@dataclass(frozen=True)
class Tuned:
    """Results for one shape: kernels that ran, and kernels that did not."""

    measured: tuple[KernelTiming, ...]
    refused: tuple[Refused, ...] = ()


class KernelTimer:
    """Times `kernels` on a device of run files; None is the one of this machine."""

    def __init__(self, device: str | None = None, rounds: int = ROUNDS) -> None:
        if rounds < 1:
            raise ConfigError("E2815 kernels are timed at least once", evidence=f"rounds {rounds}")
        self.rounds = rounds
        self.device = device_to_time(device)
        self.kernels = kernels_of(self.device)
        self._torch_device = torch_device(self.device)
        self.device_name = device_name(self._torch_device)

    def wanted(self, shapes: Iterable[Shape]) -> tuple[tuple[Kernel, Shape], ...]:
        """All distinct pairs of kernel and product shape; those of the quantize step have no N."""
        pairs = (
            (kernel, Shape(shape.m, 0, shape.k) if kernel.name == QUANTIZE else shape)
            for shape in shapes
            for kernel in self.kernels
        )
        return tuple(dict.fromkeys(pairs))

    def measure(self, kernels: Collection[Kernel], operands: Operands) -> Tuned:
        """Time some of `kernels` on the shape of their operands, in turns."""
        import torch

        with torch.inference_mode():
            prepared = PreparedOperands(operands, self._torch_device)
            runs: dict[Kernel, Run] = {}
            timers: dict[Kernel, Callable[[], float]] = {}
            refused: list[Refused] = []
            for kernel in kernels:
                try:
                    run = prepared.run_of(kernel)
                    run()
                    self._synchronize()
                    timers[kernel] = self._timer(run, turns_of(kernel, operands.shape, self._torch_device))
                    runs[kernel] = run
                except (RuntimeError, ValueError, NotImplementedError) as error:
                    self._check_alive(kernel, operands.shape)
                    refused.append(Refused(kernel, operands.shape, _first_line(error)))
            # Microseconds of one call, by round.
            times: dict[Kernel, list[float]] = {kernel: [] for kernel in timers}
            for _ in range(self.rounds):
                for kernel, timer in timers.items():
                    times[kernel].append(timer())
            measured = (self._measured(kernel, times[kernel], prepared, run) for kernel, run in runs.items())
            return Tuned(tuple(measured), tuple(refused))

    def _timer(self, run: Run, turns: int) -> Callable[[], float]:
        if self._torch_device == CPU:
            return lambda: _clocked(run)
        return graph_timer(run, calls_in_turn(CALLS, turns))

    def _measured(
        self, kernel: Kernel, us: Sequence[float], prepared: PreparedOperands, run: Run
    ) -> KernelTiming:
        quartiles = quantiles(us, n=4) if len(us) > 1 else [us[0]] * 3
        spread = (quartiles[2] - quartiles[0]) / 2.0
        error = None if kernel.name == QUANTIZE else prepared.error(kernel, run(), ERROR_ROWS)
        return KernelTiming(kernel, prepared.shape, median(us), spread, self._provenance, len(us), error)

    @cached_property
    def _provenance(self) -> Provenance:
        # To the minute and once, so that the records of a run are one series.
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
        how = "single calls, kernels of one shape in turns, operands warm in the caches"
        if self._torch_device != CPU:
            how = f"CUDA graphs of {CALLS} calls or more, kernels of one shape in turns, activations warm in "
            how += "the caches, large weights from memory"
        device_clocks = "" if self._torch_device == CPU else clocks()
        return Provenance(self.device_name, kernel_versions(), device_clocks, now, how)

    def _synchronize(self) -> None:
        import torch

        if self._torch_device != CPU:
            torch.cuda.synchronize()

    def _check_alive(self, kernel: Kernel, shape: Shape) -> None:
        with EngineError(
            f"E2816 the device failed in kernel {kernel} on {shape}",
            remedy="run `loka-onnx tune` again: what was measured before is kept",
        ).in_place_of(RuntimeError, words=_first_line):
            self._synchronize()


def graph_timer(run: Callable[[], object], calls: int) -> Callable[[], float]:
    """Return a function that times a replay of a CUDA graph, in microseconds per call."""
    import torch

    # Initialization in a kernel's first calls must not be captured (torch.cuda.CUDAGraph, notes).
    warm = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    graph.replay()

    def once() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return 1000.0 * float(start.elapsed_time(end)) / calls

    return once


def _clocked(run: Run) -> float:
    """Microseconds of one call on the CPU."""
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1e6


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def torch_device(device: str | None) -> str:
    """Torch's name of a device of run files; None is the accelerator if torch sees one, else the CPU."""
    with MissingPackage(
        "E2817 kernels are timed with torch, which is not installed", remedy="pip install 'loka-onnx[export]'"
    ).in_place_of(ImportError):
        import torch
    if device == CPU or (device is None and not torch.cuda.is_available()):
        return CPU
    if not torch.cuda.is_available():
        raise ConfigError(
            f"E2818 this machine has no '{device}'",
            evidence=f"torch {torch.__version__} sees no GPU",
            remedy="tune on that device, and bring its times with --export and --import",
        )
    return CUDA


def device_to_time(device: str | None) -> str:
    """Device for timing kernels, as run files name it; a `ConfigError` where this machine has another."""
    if torch_device(device) == CPU:
        return CPU
    here, name = device_here(), device_name()
    elsewhere = "and bring its times with --export and --import"
    if here == SLICE:
        raise ConfigError(
            "E2819 this GPU is a slice, and what kernels take on it is no time of the device",
            evidence=f"its driver calls it '{name}'",
            remedy=f"tune on a whole GPU, {elsewhere}",
        )
    if not (device or here):
        raise ConfigError(
            "E2820 this GPU has no name that run files know",
            evidence=f"its driver calls it '{name}'",
            remedy="name it with --device",
        )
    if device and here and device != here:
        raise ConfigError(
            f"E2821 this machine has no '{device}'",
            evidence=f"it has '{here}'",
            remedy=f"tune on that device, {elsewhere}",
        )
    return device or here


def device_here() -> str:
    """Accelerator of this machine as run files name it; empty where it is unknown."""
    import torch

    if not torch.cuda.is_available():
        return ""
    major, minor = torch.cuda.get_device_capability(0)
    return device_called(device_name(), "" if torch.version.hip else f"sm{major}{minor}")


def device_name(torch_device: str = CUDA) -> str:
    """Driver's name of the accelerator; the processor's for ``cpu`` or without one."""
    import torch

    if torch_device != CPU and torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    return platform.processor() or platform.machine()


def kernel_versions() -> dict[str, str]:
    """Versions of the software that runs the kernels."""
    own = {"python": platform.python_version(), "loka-onnx": version("loka-onnx")}
    return own | versions_of(("torch", "triton"))


def clocks() -> str:
    """Clocks, their limits and the driver, from nvidia-smi; empty where it is unavailable."""
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"{_QUERY}: {done.stdout.strip()}"

"""Inductor: the planned graph lowered to PyTorch and compiled ahead of time into one package.

- **NVIDIA, sm80 and later**: the plan's base precision; INT8, and FP8 from sm89 on, through `torch._int_mm`
  and `torch._scaled_mm` (cuBLASLt or an autotuned Triton template) and the operators of `kernels`, on a host
  that has the GPU.
- **CPU**: FP32, BF16, FP16, and FP8 and INT8, simulated: their accuracy is meaningful, their speed is not.

Norms, softmax and other reductions compute in FP32 whatever the type of their tensors. Chains of elementwise
operators that Inductor fuses keep FP32 between them, where the ONNX graph rounds to BF16 after each.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from onnx import TensorProto

from loka_onnx.core.devices import CPU, FLOAT8_FROM, capability
from loka_onnx.core.engine import SitePrecision
from loka_onnx.core.formats import Precision
from loka_onnx.core.installation import cache_directory
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.engines.base import Availability, Backend
from loka_onnx.engines.inductor.fusions import fuse
from loka_onnx.engines.inductor.fusions.planned import PlannedGraph
from loka_onnx.engines.inductor.package import read_engine, read_sources
from loka_onnx.engines.inductor.session import import_torch
from loka_onnx.engines.inductor.site_precision import product_calls, site_precisions
from loka_onnx.engines.inductor.spec import INDUCTOR
from loka_onnx.engines.request import BuildRequest
from loka_onnx.errors import EngineError, MissingPackage
from loka_onnx.sessions.backends import BackendSpec
from loka_onnx.sessions.cuda import CudaDevice, list_cuda_devices

FIRST = 80
"""Lowest compute capability with BF16 and Triton products."""
BASES = {Precision.BF16: TensorProto.BFLOAT16, Precision.FP16: TensorProto.FLOAT16}
"""Base precisions that fused kernels multiply, and their ONNX types."""
_DECLINED = re.compile(r"^([\w -]+): declined (.+)$", re.MULTILINE)
"""Line of the build log about a declined fusion."""
MOST_PROGRAMS = 3
"""Most batch sizes that get programs of their own by default."""
STATIC, FUSE = "static", "fuse"
SYSTEM = ("/usr/bin/g++", "/usr/bin/gcc")
"""C++ and C compilers that are preferred to those of the environment."""
NO_COMPILER = "there is no C++ compiler, which Inductor needs"


@dataclass(frozen=True)
class Compilers:
    """Compilers of C++ and of C, as commands."""

    cxx: str
    cc: str

    @classmethod
    def find(cls, system: tuple[str, str] = SYSTEM) -> Compilers | None:
        """Compilers to build with, the system's GCC first; None where there are none. A package of another
        tool chain, with its own C++ library, builds without an error and crashes on loading (PyTorch 2.11).
        """
        for pair in (system, (os.environ.get("CXX", ""), os.environ.get("CC", "")), ("g++", "gcc")):
            # A variable may hold arguments as well.
            cxx, cc = (shutil.which((command.split() or [""])[0]) for command in pair)
            if cxx and cc:
                return cls(cxx, cc)
        return None

    @property
    def environment(self) -> dict[str, str]:
        """Variables to set before PyTorch reads them: kernels, tuning results and compiler probes stay in the
        environment's caches, else this user's, as plans of a model share most kernels.
        """
        caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
        variables = {
            name: str(cache_directory() / folder) for name, folder in caches.items() if name not in os.environ
        }
        return {"CXX": self.cxx, "CC": self.cc, **variables}


WORKER_BYTES = 1 << 30
"""Allowed for a compile worker of PyTorch, which holds .63 GB on a GPU host (PyTorch 2.11, H200)."""


def compile_workers(memory_bytes: int) -> int:
    """Processes that compile kernels for one build: one a core, in half of its memory limit at most. PyTorch
    starts one a core up to 32, which takes more than the limit of a build on a host of 16 cores.
    """
    return max(1, min(len(os.sched_getaffinity(0)), memory_bytes // 2 // WORKER_BYTES))


@dataclass(frozen=True)
class Settings:
    """Settings of the compiler.

    Attributes:
        max_autotune: Time the products of all libraries.
        search_launches: Search launch parameters of other kernels (coordinate descent): minutes a program.
        fast_accumulation: Allow FP8 sums of fewer bits than FP32 (Hopper).
        static: Compile a program for each served batch size, with a copy of the weights.
        fuse: Fuse the graph into the operators of `kernels`.
        choose: Choose the kernel of each fused product by timing on a GPU.
    """

    max_autotune: bool = False
    search_launches: bool = False
    fast_accumulation: bool = True
    static: bool = False
    fuse: bool = True
    choose: bool = True

    @classmethod
    def of(cls, request: BuildRequest) -> Settings:
        """Settings from the options of a request. On a GPU, up to `MOST_PROGRAMS` batch sizes get programs of
        their own: blanket FP8 of DLRM-DCNv2 at 256 took 83 µs with them and 109 µs without (H100).
        """
        on_gpu = request.architecture != CPU
        default = cls(static=on_gpu and 1 < len(request.batch.sizes) <= MOST_PROGRAMS)
        return replace(default, **{name: bool(value) for name, value in request.options.items()})


OPTIONS: Mapping[str, range] = dict.fromkeys(asdict(Settings()), range(2))


class InductorBackend(Backend):
    """AOTInductor of PyTorch."""

    spec: ClassVar[BackendSpec] = INDUCTOR
    options: ClassVar[Mapping[str, range]] = OPTIONS
    untouched: ClassVar[Mapping[str, int]] = MappingProxyType({FUSE: 0, "max_autotune": 1})

    def availability(self) -> Availability:
        """See `Backend.availability`; the CPU always runs, GPUs where PyTorch uses them."""
        try:
            torch = import_torch()
        except MissingPackage as error:
            return Availability.missing(error)
        gpus = tuple(f"{gpu.name} ({gpu.architecture})" for gpu in _usable_gpus())
        version, devices = str(torch.__version__), (CPU, *gpus)
        if Compilers.find() is None:
            return Availability(True, version, False, True, devices, NO_COMPILER, "install g++ and gcc")
        return Availability(True, version, True, True, devices, "", "")

    def decline(self, plan: PrecisionPlan, architecture: str) -> str | None:
        """FP8 needs E4M3FN and, on a GPU, sm89 or later; INT8 has zero point 0."""
        if architecture != CPU and plan.fp8_sites and capability(architecture) < FLOAT8_FROM:
            return f"{architecture} has no FP8 products (sm{FLOAT8_FROM} is the first that has)"
        return self.foreign_format(plan, architecture)

    def build_blocker(self, architecture: str) -> str:
        """A package for a GPU is compiled only on a host with that GPU."""
        reason = super().build_blocker(architecture)
        gpus = _usable_gpus()
        if reason or architecture == CPU or any(gpu.architecture == architecture for gpu in gpus):
            return reason
        here = ", ".join(f"{gpu.name} ({gpu.architecture})" for gpu in gpus)
        return (
            f"inductor builds for {architecture} only on a host with that GPU, and this one has "
            f"{here or 'no GPU that PyTorch uses'}; build there"
        )

    def fused_sites(self, model: Path, base: Precision) -> dict[str, str]:
        """See `Backend.fused_sites`: sites that `fusions` joins in a plan without quantized sites. A product
        whose kernel only adds an epilogue is not listed: a product of eight bits adds it as well.
        """
        return fuse(PlannedGraph.load(model, BASES[base])).joined if base in BASES else {}

    def read_remarks(self, log: str) -> tuple[str, ...]:
        """See `Backend.read_remarks`: the declined fusions."""
        return tuple(
            f"{fusion}: {reason}"
            for fusion, reasons in _DECLINED.findall(log)
            for reason in reasons.split("; ")
        )

    def is_simulated(self, plan: PrecisionPlan, architecture: str) -> bool:
        """FP8 and INT8 on the CPU are for accuracy only."""
        return architecture == CPU and bool(plan.quantized_sites)

    def portability(self, architecture: str) -> str:
        """One architecture, one release of PyTorch, one processor."""
        release = ".".join(self.availability().version.split(".")[:2])
        where = "" if architecture == CPU else f"one GPU architecture ({architecture}), "
        return f"{where}PyTorch {release}, and a processor with the vector instructions of the build host"

    def compile(self, request: BuildRequest, into: Path) -> Path:
        """Compile the package; sets compiler variables in this process's environment."""
        compilers = Compilers.find()
        if compilers is None:
            raise EngineError(NO_COMPILER, remedy="install g++ and gcc")
        os.environ.update(compilers.environment)
        os.environ.setdefault(
            "TORCHINDUCTOR_COMPILE_THREADS", str(compile_workers(request.limits.memory_bytes))
        )
        # It imports PyTorch, which reads them.
        from loka_onnx.engines.inductor.compile import compile_engine

        return compile_engine(request, into, compilers)

    def read_precision(self, request: BuildRequest, engine: Path) -> tuple[SitePrecision, ...]:
        """Read the exported program that the package describes, and its generated code."""
        manifest = read_engine(engine)
        calls = {each.name: product_calls(read_sources(engine, each.name)) for each in manifest.programs}
        return site_precisions(manifest, calls, request.planned)


def _usable_gpus() -> tuple[CudaDevice, ...]:
    gpus = [gpu for gpu in list_cuda_devices() if capability(gpu.architecture) >= FIRST]
    return tuple(gpus) if gpus and import_torch().cuda.is_available() else ()

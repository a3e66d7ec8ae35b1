"""TensorRT for RTX: FP8 engines for RTX GPUs, built without one.

Which sites engage FP8 was read from compiled graphs of TensorRT for RTX 1.7.1 for sm89 and sm120, with BF16,
FP16 and FP32 as base (the tests repeat it):

==========================================================  =============================================
site                                                        compiled product
==========================================================  =============================================
Gemm or MatMul, weight scale per tensor                     FP8 × FP8
weight scale per output channel (Gemm ``transB`` included)  FP8 × FP8, scale applied in the kernel after it
weight scale along K                                        **fallback**: both converted, base × base
activations of rank 3, constant on the left (W·X)           FP8 × FP8
interaction, both operands with Q/DQ                        FP8 × FP8
several sites on one Q/DQ                                   FP8 × FP8, merged into one product
N = 1, K = 8, K = 13, sizes not multiples of 16             FP8 × FP8, padded
Transpose or Flatten between DQ and product                 FP8 × FP8
LayerNormalization → Q                                      Q is part of the norm's kernel
Q/DQ missing on one operand                                 **fallback**: the other is converted
==========================================================  =============================================

What else the compiler does, seen there:

* An FP8 product stands alone: bias, activation function and the next quantization form a second kernel, where
  a BF16 product absorbs them (``FcAddRelu``). So a small site pays one more pass over its output in FP8.
* Q directly behind a product becomes part of it. If the product is several merged sites, their sums are
  written in FP8, then rescaled from FP8 to FP8: a rounding more than the ONNX graph has. The evidence of such
  sites says so.
* Q behind Concat or Gather moves in front of it: an embedding table that feeds only FP8 sites is stored in
  FP8, half the bytes. One that also feeds something else would be stored twice; `dialect` prevents that.
* BF16 attention becomes one kernel; FP8 attention (Q/DQ on Q, K, V and the softmax) becomes separate
  products, and with Q/DQ on half of the products that kernel is lost as well.
* Generated kernels are stored as source text, about 0.15 MB apiece; `contents` says what that does to the
  size of an FP8 engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from loka_onnx.core.engine import SitePrecision
from loka_onnx.core.formats import Float8, Precision
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.engines.base import Availability, Backend
from loka_onnx.engines.request import BuildRequest
from loka_onnx.engines.tensorrt_rtx.build import (
    OPTIMIZATION_LEVEL,
    BuildSettings,
    build_engine,
    known_capabilities,
)
from loka_onnx.engines.tensorrt_rtx.compiled_graph import ANY_ARCHITECTURE, read_compiled_graphs
from loka_onnx.engines.tensorrt_rtx.contents import read_contents
from loka_onnx.engines.tensorrt_rtx.site_precision import site_precisions
from loka_onnx.errors import EngineError, MissingPackage
from loka_onnx.sessions.cuda import list_cuda_devices
from loka_onnx.sessions.runner import Runner
from loka_onnx.sessions.tensorrt_session import import_tensorrt_rtx, open_tensorrt_rtx, why_no_gpu

ENGINE_FILE = "engine.trt"
FIRST_WITH_FP8, FIRST_WITH_BF16 = 89, 80


class TensorRtRtxBackend(Backend):
    """TensorRT for RTX."""

    name = "tensorrt_rtx"
    devices: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "nvidia-rtx-turing": ("sm75",),
        "nvidia-rtx-ampere": ("sm86",),
        "nvidia-rtx-ada": ("sm89",),
        "nvidia-rtx-blackwell": ("sm120",),
        "nvidia-gb10": ("sm121",),
        "nvidia-rtx": ("sm89", "sm120"),
    }
    options: ClassVar[Mapping[str, range]] = {OPTIMIZATION_LEVEL: range(6)}

    def availability(self) -> Availability:
        """Whether the library is installed, and which GPUs here its engines can run on."""
        try:
            trt = import_tensorrt_rtx()
        except MissingPackage as error:
            return Availability(False, "", False, False, (), error.what, error.remedy)
        version = str(trt.__version__)
        capabilities = known_capabilities(trt)
        gpus = [gpu for gpu in list_cuda_devices() if gpu.architecture in capabilities]
        if gpus:
            names = tuple(f"{gpu.name} ({gpu.architecture})" for gpu in gpus)
            return Availability(True, version, True, True, names, "", "")
        return Availability(
            True,
            version,
            True,
            False,
            (),
            "engines are built but cannot run: no GPU of a supported architecture here",
            f"run them on a machine with one of {', '.join(sorted(capabilities))}",
        )

    def decline(self, plan: PrecisionPlan, architecture: str) -> str | None:
        """FP8 needs E4M3FN and sm89 or later; BF16 needs sm80 or later."""
        capability = int(architecture.removeprefix("sm"))
        if plan.fp8_sites and capability < FIRST_WITH_FP8:
            return f"{architecture} has no FP8 products (sm{FIRST_WITH_FP8} is the first that has)"
        if plan.base is Precision.BF16 and capability < FIRST_WITH_BF16:
            return f"{architecture} has no BF16 products (sm{FIRST_WITH_BF16} is the first that has)"
        for decision in plan.decisions:
            recipe = decision.recipe
            if recipe is not None and recipe.format is not Float8.E4M3FN:
                return f"site '{decision.site}' asks for {recipe.format}; TensorRT multiplies E4M3FN only"
        return None

    def base_precision(self, plan: PrecisionPlan) -> Precision:
        """The plan's."""
        return plan.base

    def portability(self, architecture: str) -> str:
        """One architecture, one version, one operating system."""
        version = self.availability().version
        return f"one GPU architecture ({architecture}), one TensorRT-RTX version ({version}), one OS"

    def why_not_run(self, architecture: str) -> str:
        """A GPU of the architecture must be here."""
        reason = why_no_gpu(architecture)
        return f"{reason}; latency and accuracy not measured" if reason else ""

    def compile(self, request: BuildRequest, into: Path) -> Path:
        """Build the serialized engine; what its bytes are goes to the log."""
        engine = into / ENGINE_FILE
        settings = BuildSettings(request.architecture, request.batch, request.options.get(OPTIMIZATION_LEVEL))
        build_engine(import_tensorrt_rtx(), request.model, settings, engine)
        print(read_contents(engine).describe(), flush=True)
        return engine

    def read_precision(self, request: BuildRequest, engine: Path) -> tuple[SitePrecision, ...]:
        """Read the compiled graph in the engine.

        Raises:
            EngineError: The engine was compiled for another architecture than the one asked for.
        """
        graphs = read_compiled_graphs(engine)
        compiled_for = {architecture for graph in graphs for architecture in graph.architectures}
        compiled_for.discard(ANY_ARCHITECTURE)
        if compiled_for - {request.architecture}:
            raise EngineError(
                "the engine was compiled for another architecture",
                evidence=f"asked for {request.architecture}, found {', '.join(sorted(compiled_for))}",
            )
        planned = {decision.site: decision.precision for decision in request.plan.decisions}
        return site_precisions(graphs, [(site, planned[site.name]) for site in request.planned_sites])

    def load(self, engine: Path, architecture: str) -> Runner:
        """Deserialize the engine on the first GPU of its architecture."""
        return open_tensorrt_rtx(engine, architecture)

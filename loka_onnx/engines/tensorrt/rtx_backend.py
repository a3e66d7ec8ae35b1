"""TensorRT for RTX: FP8 engines for RTX GPUs, built without one.

FP8 sites, read from compiled graphs of TensorRT for RTX 1.7.1 for sm89 and sm120 with BF16, FP16 and FP32 as
base (the tests repeat it):

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

Also seen there:

* An FP8 product is a kernel of its own: bias, activation function and the next Q form a second one, while a
BF16
  product absorbs them (``FcAddRelu``). A small FP8 site therefore costs another pass over its output.
* Q directly behind a product becomes part of it. If several merged sites share the product, their sums are
written in
  FP8 and rescaled from FP8 to FP8: one rounding more than in the ONNX graph. The evidence of such sites says
  so.
* Q moves across Concat and Gather: an embedding table that feeds only FP8 sites is stored in FP8, in half the
bytes. A
  table with other readers would be stored twice; `dialect` prevents that.
* A merged query, key and value with scales per output channel is cut apart and leaves FP8 when its parts are
read by
  heads directly behind its Split; `merged_heads` prevents that.
* BF16 attention becomes one kernel; FP8 attention (Q/DQ on Q, K, V and the softmax) becomes separate
products, and Q/DQ
  on half of the products also loses that kernel.
* Generated kernels are stored as source text, about 0.15 MB each; see `contents`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from loka_onnx.core.engine import SitePrecision
from loka_onnx.engines.base import Availability
from loka_onnx.engines.request import BuildRequest
from loka_onnx.engines.tensorrt.build import BuildSettings, known_capabilities
from loka_onnx.engines.tensorrt.compiled_graph import ANY_ARCHITECTURE, read_compiled_graphs
from loka_onnx.engines.tensorrt.contents import read_contents
from loka_onnx.engines.tensorrt.family import TensorRtFamily, asked_settings
from loka_onnx.engines.tensorrt.site_precision import site_precisions
from loka_onnx.engines.tensorrt.spec import TENSORRT_RTX, TensorRtSpec
from loka_onnx.errors import EngineError, MissingPackage
from loka_onnx.sessions.cuda import list_cuda_devices


class TensorRtRtxBackend(TensorRtFamily):
    """TensorRT for RTX."""

    spec: ClassVar[TensorRtSpec] = TENSORRT_RTX

    def availability(self) -> Availability:
        """Report the library, and the GPUs here that run its engines."""
        try:
            trt = self.spec.load_library()
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

    def settings(self, trt: Any, request: BuildRequest) -> BuildSettings:
        """One profile and no timing cache: kernels are timed only when the engine is loaded."""
        return asked_settings(request)

    def compile(self, request: BuildRequest, into: Path) -> Path:
        """Build the serialized engine and log its contents."""
        engine = super().compile(request, into)
        print(read_contents(engine).describe(), flush=True)
        return engine

    def read_precision(self, request: BuildRequest, engine: Path) -> tuple[SitePrecision, ...]:
        """Read the compiled graph in the engine.

        Raises:
            EngineError: The engine was compiled for another architecture.
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

"""Settings beside an engine of ONNX Runtime that say how to load it, and the plans that a provider declines.

An engine need not be trusted to run code: its settings cannot name files or libraries.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from loka_onnx.core.formats import E4M3FNUZ, Precision
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.core.serde import STRICT
from loka_onnx.engines.onnxruntime.providers import CPU, CUDA, MIGRAPHX, PROVIDERS, TENSORRT, Provider
from loka_onnx.engines.request import BuildRequest
from loka_onnx.errors import EngineError, ModelError
from loka_onnx.sessions.model_files import read_model

SETTINGS_FILE = "settings.json"
"""File beside the engine."""
PROGRAMS = "programs"
"""Directory beside the engine with the programs that a provider compiled."""
CUDA_GRAPH, EXHAUSTIVE_TUNE, OPTIMIZATION_LEVEL = "cuda_graph", "exhaustive_tune", "optimization_level"
"""Options of a build: whether CUDA graphs are replayed (1), whether MIGraphX times all its kernels (0), and
TensorRT's effort in its search (0 to 5, default 3)."""
_NO_FLOAT8 = {
    TENSORRT.key: "the TensorRT provider does not tell which sites its engine runs in FP8: backend "
    "'tensorrt' builds the same engine and reads that",
    MIGRAPHX.key: "MIGraphX does not parse FLOAT8E4M3FN, and its provider has no dialect of it: backend "
    "'migraphx' writes one",
}


@dataclass(frozen=True)
class IoBindingSettings:
    """Settings of an engine, in the document beside it: provider, version of ONNX Runtime that built it, and
    options of the provider but the device and the directory of its programs. `sizes` are batch sizes with
    fixed buffers, ascending; if empty, every batch runs unpadded. With `programs`, the provider's programs
    are in `PROGRAMS`. Raises EngineError for an unknown provider or option, or sizes out of order.
    """

    SCHEMA: ClassVar[str] = "onnxruntime-engine/1"
    __pydantic_config__ = STRICT

    provider: str
    version: str
    options: dict[str, str] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()
    programs: bool = False

    def __post_init__(self) -> None:
        provider = PROVIDERS.get(self.provider)
        if provider is None:
            raise EngineError(
                f"E0874 there is no provider '{self.provider}'", evidence=f"known: {', '.join(PROVIDERS)}"
            )
        unknown = sorted(set(self.options) - provider.options)
        if unknown:
            raise EngineError(
                f"E0875 an engine cannot set option '{unknown[0]}' of {provider.name}",
                evidence=f"it may set {', '.join(sorted(provider.options)) or 'none'}",
            )
        if list(self.sizes) != sorted({*self.sizes}) or any(size < 1 for size in self.sizes):
            raise EngineError("E0876 sizes of an engine are out of order", evidence=str(list(self.sizes)))


def settings_beside(engine: Path) -> tuple[str, ...]:
    """Names of the files that the settings of an engine add beside it; none without settings."""
    if engine.suffix != ".onnx" or not engine.with_name(SETTINGS_FILE).is_file():
        return ()
    programs = (path for path in (engine.parent / PROGRAMS).rglob("*") if path.is_file())
    return (SETTINGS_FILE, *sorted(path.relative_to(engine.parent).as_posix() for path in programs))


def why_declined(provider: Provider, plan: PrecisionPlan) -> str | None:
    """Reason why a provider cannot honour a plan; None when it can."""
    if plan.fp8_sites and provider.key in _NO_FLOAT8:
        return _NO_FLOAT8[provider.key]
    for decision in plan.decisions if provider.key == CUDA.key else ():
        if decision.recipe is not None and decision.recipe.format == E4M3FNUZ:
            return f"site '{decision.site}' asks for E4M3FNUZ: the CUDA provider quantizes to E4M3FN and E5M2"
    if provider.key == TENSORRT.key and plan.base is Precision.FP32:
        return "the TensorRT provider has no option that keeps FP32 products from running in TF32"
    if provider.key == CPU.key and not plan.quantized_sites and plan.base is not Precision.FP32:
        lacks = f"the CPU provider has no {plan.base.upper()} products: it would run"
        if plan.id == plan.base:
            return f"{lacks} plan '{plan.id}' in FP32 between casts"
        unlike = f"no site of plan '{plan.id}' is quantized, which makes it plan '{plan.base}'"
        return f"{unlike}, and {lacks} it in FP32 between casts"
    return None


def settings_for(provider: Provider, request: BuildRequest, version: str) -> IoBindingSettings:
    """Settings for loading an engine, with fixed buffers for the request's batch sizes."""
    options = {provider.graph_option: "1"} if provider.graph_option else {}
    if provider.key == CUDA.key:
        # Buffers have fixed sizes: a larger step would waste memory. FP32 has more mantissa than TF32.
        options |= {"arena_extend_strategy": "kSameAsRequested", "use_tf32": "0"}
    elif provider.key == TENSORRT.key:
        # Without options such as trt_fp16_enable, TensorRT keeps the graph's types.
        options["trt_builder_optimization_level"] = str(request.options.get(OPTIMIZATION_LEVEL, 3))
        options |= _profiles(request)
    else:
        options["migraphx_exhaustive_tune"] = str(request.options.get(EXHAUSTIVE_TUNE, 0))
    settings = IoBindingSettings(provider.key, version, options, request.batch.sizes, provider.compiles)
    return settings if request.options.get(CUDA_GRAPH, 1) else without_graphs(settings)


def without_graphs(settings: IoBindingSettings) -> IoBindingSettings:
    """Same settings without CUDA graphs: only a provider that compiles for sizes still pads batches."""
    graph = PROVIDERS[settings.provider].graph_option
    if not graph:
        return settings
    options = {name: value for name, value in settings.options.items() if name != graph}
    sizes = settings.sizes if settings.programs else ()
    return replace(settings, options=options, sizes=sizes)


def _profiles(request: BuildRequest) -> dict[str, str]:
    """Optimization profile as the provider takes it: ``x:64x13,ids:64x26``."""
    graph = read_model(request.model).graph
    stored = {tensor.name for tensor in graph.initializer}
    shapes: dict[str, tuple[int, ...]] = {}
    for value in graph.input:
        if value.name in stored:
            continue
        dims = value.type.tensor_type.shape.dim
        if not dims or any(not dim.HasField("dim_value") for dim in dims[1:]):
            raise ModelError(
                f"E0877 input '{value.name}' has an open axis beside the batch",
                where=str(request.model),
                evidence=f"shape [{', '.join(dim.dim_param or str(dim.dim_value) for dim in dims)}]",
                remedy="export the model with the batch on axis 0 of every input and the other axes fixed",
            )
        shapes[value.name] = tuple(dim.dim_value for dim in dims[1:])
    batch = request.batch
    return {
        f"trt_profile_{name}_shapes": ",".join(
            f"{tensor}:{'x'.join(map(str, (rows, *tail)))}" for tensor, tail in shapes.items()
        )
        for name, rows in (("min", batch.minimum), ("opt", batch.serve), ("max", batch.maximum))
    }

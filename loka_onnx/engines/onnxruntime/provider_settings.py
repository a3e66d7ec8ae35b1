"""Options of each execution provider for a plan, and the plans that it declines."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import onnx

from loka_onnx.core.formats import E4M3FNUZ, Precision
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.engines.onnxruntime.io_binding_settings import IoBindingSettings
from loka_onnx.engines.onnxruntime.providers import CPU, CUDA, GRAPH_OPTIONS, MIGRAPHX, TENSORRT, Provider
from loka_onnx.engines.request import BuildRequest
from loka_onnx.errors import ModelError

CUDA_GRAPH, EXHAUSTIVE_TUNE, OPTIMIZATION_LEVEL = "cuda_graph", "exhaustive_tune", "optimization_level"
"""Options of a build: whether CUDA graphs are replayed (1), whether MIGraphX times all its kernels (0), and
TensorRT's effort in its search (0 to 5, default 3)."""


def why_declined(provider: Provider, plan: PrecisionPlan) -> str | None:
    """Reason why a provider cannot honour a plan; None when it can."""
    return _DECLINES[provider.key](plan)


def _cpu(plan: PrecisionPlan) -> str | None:
    if plan.fp8_sites or plan.base is Precision.FP32:
        return None
    lacks = f"the CPU provider has no {plan.base.upper()} products"
    if plan.id == plan.base:
        return f"{lacks}: it would run plan '{plan.id}' in FP32 between casts"
    return (
        f"no site of plan '{plan.id}' runs in FP8, which makes it plan '{plan.base}', and {lacks}: "
        "it would run it in FP32 between casts"
    )


def _cuda(plan: PrecisionPlan) -> str | None:
    for decision in plan.decisions:
        recipe = decision.recipe
        if recipe is not None and recipe.format == E4M3FNUZ:
            return f"site '{decision.site}' asks for E4M3FNUZ: the CUDA provider quantizes to E4M3FN and E5M2"
    return None


def _tensorrt(plan: PrecisionPlan) -> str | None:
    if plan.fp8_sites:
        return (
            "the TensorRT provider does not tell which sites its engine runs in FP8: backend 'tensorrt' "
            "builds the same engine and reads that"
        )
    if plan.base is Precision.FP32:
        return "the TensorRT provider has no option that keeps FP32 products from running in TF32"
    return None


def _migraphx(plan: PrecisionPlan) -> str | None:
    if plan.fp8_sites:
        return (
            "MIGraphX does not parse FLOAT8E4M3FN, and its provider has no dialect of it: backend 'migraphx' "
            "writes one"
        )
    return None


_DECLINES: Mapping[str, Callable[[PrecisionPlan], str | None]] = {
    CPU.key: _cpu,
    CUDA.key: _cuda,
    TENSORRT.key: _tensorrt,
    MIGRAPHX.key: _migraphx,
}


def settings_for(provider: Provider, request: BuildRequest, version: str) -> IoBindingSettings:
    """Settings for loading an engine, with fixed buffers for the request's batch sizes.

    Raises:
        ModelError: TensorRT needs the shape of every input, and one has a dynamic axis besides the batch.
    """
    options = {
        CUDA.key: _cuda_options,
        TENSORRT.key: _tensorrt_options,
        MIGRAPHX.key: _migraphx_options,
    }[provider.key](request)
    settings = IoBindingSettings(provider.key, version, options, request.batch.sizes, provider.compiles)
    return settings if request.options.get(CUDA_GRAPH, 1) else without_graphs(settings)


def without_graphs(settings: IoBindingSettings) -> IoBindingSettings:
    """Same settings without CUDA graphs: batches run unpadded, except on a provider that compiles for
    sizes.
    """
    graph = GRAPH_OPTIONS.get(settings.provider)
    if graph is None:
        return settings
    options = {name: value for name, value in settings.options.items() if name != graph}
    sizes = settings.sizes if settings.programs else ()
    return replace(settings, options=options, sizes=sizes)


def _cuda_options(request: BuildRequest) -> dict[str, str]:
    return {
        # Buffers have fixed sizes: a larger step would waste memory.
        "arena_extend_strategy": "kSameAsRequested",
        GRAPH_OPTIONS[CUDA.key]: "1",
        # A plan's FP32 has 23 bits of mantissa, not the 10 of TF32.
        "use_tf32": "0",
    }


def _tensorrt_options(request: BuildRequest) -> dict[str, str]:
    # Without options such as trt_fp16_enable, TensorRT keeps the graph's types.
    shapes = _input_shapes(request.model)
    batch = request.batch
    return {
        GRAPH_OPTIONS[TENSORRT.key]: "1",
        "trt_builder_optimization_level": str(request.options.get(OPTIMIZATION_LEVEL, 3)),
        "trt_profile_min_shapes": _profile(shapes, batch.minimum),
        "trt_profile_opt_shapes": _profile(shapes, batch.serve),
        "trt_profile_max_shapes": _profile(shapes, batch.maximum),
    }


def _migraphx_options(request: BuildRequest) -> dict[str, str]:
    return {"migraphx_exhaustive_tune": str(request.options.get(EXHAUSTIVE_TUNE, 0))}


def _profile(shapes: Mapping[str, tuple[int, ...]], rows: int) -> str:
    """Format an optimization profile for the provider: ``x:64x13,ids:64x26``."""
    return ",".join(
        f"{name}:{'x'.join(str(extent) for extent in (rows, *tail))}" for name, tail in shapes.items()
    )


def _input_shapes(model: Path) -> dict[str, tuple[int, ...]]:
    """Extents of each graph input behind the batch."""
    graph = onnx.load(os.fspath(model), load_external_data=False).graph
    stored = {tensor.name for tensor in graph.initializer}
    shapes: dict[str, tuple[int, ...]] = {}
    for value in graph.input:
        if value.name in stored:
            continue
        dims = value.type.tensor_type.shape.dim
        if not dims or any(not dim.HasField("dim_value") for dim in dims[1:]):
            raise ModelError(
                f"input '{value.name}' has an open axis beside the batch",
                where=str(model),
                evidence=f"shape [{', '.join(dim.dim_param or str(dim.dim_value) for dim in dims)}]",
                remedy="export the model with the batch on axis 0 of every input and the other axes fixed",
            )
        shapes[value.name] = tuple(dim.dim_value for dim in dims[1:])
    return shapes

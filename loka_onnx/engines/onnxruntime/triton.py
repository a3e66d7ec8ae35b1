"""Engines of ONNX Runtime in Triton."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from loka_onnx.core import serde
from loka_onnx.core.devices import CPU
from loka_onnx.engines.onnxruntime.io_binding_settings import SETTINGS_FILE, IoBindingSettings
from loka_onnx.engines.onnxruntime.providers import CUDA, MIGRAPHX, TENSORRT, Provider, provider_for
from loka_onnx.engines.triton.forms import BundledEngine, Form, Refusal, model_of
from loka_onnx.engines.triton.models import VERSION, Fields, ModelFile, map_field
from loka_onnx.sessions.model_files import data_locations, read_model
from loka_onnx.sessions.onnx_session import holds_float8

DISABLE_ALL = 2
"""`optimization.graph.level` that Triton's ONNX Runtime backend reads as ORT_DISABLE_ALL; -1 is BASIC."""
CUDA_OPTIONS = ("use_tf32",)
"""Options of the CUDA provider that are right under Triton as well."""


def triton_form(source: BundledEngine) -> Form | Refusal:
    """Return the model of Triton's ONNX Runtime backend for an engine, or why there is none."""
    provider = provider_for(source.entry.backend, source.entry.architecture)
    if provider.key == MIGRAPHX.key:
        return Refusal(
            "Triton's ONNX Runtime backend has the providers CPU, CUDA, TensorRT and OpenVINO, and not "
            f"{provider.name}: serve it with `loka-onnx bundle serve`"
        )
    data = data_locations(read_model(source.path))
    # External data keeps its name, because the model names it.
    file = "model.onnx" if "model.onnx" not in data else source.path.name
    settings = _settings(source)
    optimization, remarks = _session(source, provider, settings)
    parameters = dict(source.parameters)
    if source.entry.architecture == CPU and source.instances > 1:
        # One session is safe to run from several threads, and holds weights and tables once.
        parameters["share_session_between_instances"] = "true"
    model = model_of(source, ("onnxruntime", "onnxruntime_onnx", file), settings.sizes if settings else ())
    folder = source.entry.path.rpartition("/")[0]
    copied = [ModelFile(f"{VERSION}/{name}", f"{folder}/{name}") for name in data]
    model = replace(model, files=(*model.files, *copied), optimization=optimization, parameters=parameters)
    return Form(model, remarks)


def _settings(source: BundledEngine) -> IoBindingSettings | None:
    path = source.path.with_name(SETTINGS_FILE)
    return serde.read(IoBindingSettings, path) if path.is_file() else None


def _session(
    source: BundledEngine, provider: Provider, settings: IoBindingSettings | None
) -> tuple[Fields, tuple[str, ...]]:
    """Fields of the optimization policy, and remarks on settings that it cannot hold."""
    remarks: list[str] = []
    fields: list[tuple[str, Any]] = []
    is_float8 = holds_float8(read_model(source.path))
    if is_float8 and not provider.compiles:
        # This project's sessions use BASIC with session.disable_quant_qdq, which Triton does not pass on;
        # with all optimizations off the values are the same.
        remarks.append("graph optimizations are off: with them, ONNX Runtime changes the values of FP8")
    if is_float8 or provider.compiles:
        fields.append(("graph", (("level", DISABLE_ALL),)))
    options = {} if settings is None else settings.options
    accelerators: list[Fields] = []
    if provider.key == TENSORRT.key:
        profiles = {name: value for name, value in options.items() if name != "trt_cuda_graph_enable"}
        accelerators.append(_accelerator("tensorrt", profiles))
        accelerators.append(_accelerator("cuda", {"use_tf32": "0"}))
        remarks.append(
            "TensorRT compiles as the server loads the model: what the build compiled is found by a path on "
            "the server, which a repository cannot know (`trt_engine_cache_path`)"
        )
    if provider.key == CUDA.key:
        kept = {"use_tf32": "0"} | {name: options[name] for name in CUDA_OPTIONS if name in options}
        accelerators.append(_accelerator("cuda", kept))
    if accelerators:
        gpu: Fields = tuple(("gpu_execution_accelerator", fields) for fields in accelerators)
        fields.append(("execution_accelerators", gpu))
        remarks.append("runs without CUDA graphs: the server does not keep buffers where they were recorded")
    return tuple(fields), tuple(remarks)


def _accelerator(name: str, options: Mapping[str, str]) -> Fields:
    return (("name", name), *map_field("parameters", options))

"""Which backend of Triton serves an engine, and what that backend is told.

Every form is one function: an engine of the bundle in, a model or the reason why there is none out. What
Triton does not pass on to a library cannot be asked for; each form says what was left out.

Sources, all of github.com/triton-inference-server: `onnxruntime_backend` (README, and `src/onnxruntime.cc`
for what it parses), `tensorrt_backend` (`src/tensorrt_model.cc`, `src/instance_state.cc`), `pytorch_backend`
(`src/pt2/`), `python_backend` (README).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from loka_onnx.bundle.triton import python_model
from loka_onnx.bundle.triton.models import PARAMETER, VERSION, WARMUP, BackendModel, ModelFile
from loka_onnx.bundle.triton.packages import why_not_native
from loka_onnx.bundle.triton.ports import Port, ports_of
from loka_onnx.bundle.triton.text_format import Fields, entries
from loka_onnx.core import serde
from loka_onnx.core.artifact import TensorSpec
from loka_onnx.core.devices import CPU
from loka_onnx.core.manifest import EngineEntry
from loka_onnx.sessions.bound_settings import SETTINGS_FILE, IoBindingSettings
from loka_onnx.sessions.bundle_files import external_data_locations
from loka_onnx.sessions.inductor_package import InductorEngine, read_engine
from loka_onnx.sessions.onnx_session import holds_float8
from loka_onnx.sessions.providers import CUDA, MIGRAPHX, TENSORRT, Provider, provider_for

DISABLE_ALL = 2
"""`optimization.graph.level` that Triton's ONNX Runtime backend reads as ORT_DISABLE_ALL; -1 is BASIC."""
CUDA_OPTIONS = ("use_tf32",)
"""Options of the CUDA provider that are right under Triton as well."""

_CPU, _GPU, _OWN = "KIND_CPU", "KIND_GPU", "KIND_MODEL"


@dataclass(frozen=True)
class Source:
    """An engine of a bundle, as a form takes it.

    Attributes:
        bundle: Directory of the verified bundle.
        entry: The engine.
        name: Name of the model to make.
        inputs: What the engine takes.
        outputs: What it gives.
        sample: One array per input.
        parameters: Where it comes from.
        instances: Instances of the model on each device.
    """

    bundle: Path
    entry: EngineEntry
    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    sample: Mapping[str, npt.NDArray[Any]]
    parameters: Mapping[str, str]
    instances: int

    @property
    def path(self) -> Path:
        """The engine file."""
        return self.bundle / self.entry.path

    @property
    def folder(self) -> str:
        """Directory of the engine file, relative to the bundle."""
        return self.entry.path.rpartition("/")[0]


@dataclass(frozen=True)
class Form:
    """Form in which Triton serves an engine.

    Attributes:
        model: The model.
        remarks: What Triton does otherwise than this project's own loader, and what the host must have.
    """

    model: BackendModel
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """Reason why Triton does not serve an engine.

    Attributes:
        reason: Why, and what serves it instead.
    """

    reason: str


def form_of(source: Source) -> Form | Refusal:
    """The model that serves an engine, or why there is none.

    Raises:
        BundleError: An input or output is of a kind that Triton cannot have.
        LokaError: A document of the engine cannot be read.
    """
    make = _FORMS.get(source.entry.backend)
    if make is None:
        return Refusal(f"Triton has no backend for engines of {source.entry.backend}")
    return make(source)


def _onnxruntime(source: Source) -> Form | Refusal:
    provider = provider_for(source.entry.backend, source.entry.architecture)
    if provider.key == MIGRAPHX.key:
        return Refusal(
            "Triton's ONNX Runtime backend has the providers CPU, CUDA, TensorRT and OpenVINO, and not "
            f"{provider.name}: serve it with `loka-onnx bundle serve`"
        )
    data = external_data_locations(source.path)
    # External data keeps its name, because the model names it.
    file = "model.onnx" if "model.onnx" not in data else source.path.name
    settings = _settings(source)
    optimization, remarks = _session(source, provider, settings)
    parameters = dict(source.parameters)
    if source.entry.architecture == CPU and source.instances > 1:
        # One session is safe to run from several threads, and holds weights and tables once.
        parameters["share_session_between_instances"] = "true"
    model = _model(source, ("onnxruntime", "onnxruntime_onnx", file), settings.sizes if settings else ())
    copied = [ModelFile(f"{VERSION}/{name}", f"{source.folder}/{name}") for name in data]
    model = replace(model, files=(*model.files, *copied), optimization=optimization, parameters=parameters)
    return Form(model, remarks)


def _settings(source: Source) -> IoBindingSettings | None:
    path = source.path.with_name(SETTINGS_FILE)
    return serde.read(IoBindingSettings, path) if path.is_file() else None


def _session(
    source: Source, provider: Provider, settings: IoBindingSettings | None
) -> tuple[Fields, tuple[str, ...]]:
    """Fields of the optimization policy, and what could not be said in them."""
    remarks: list[str] = []
    fields: list[tuple[str, Any]] = []
    is_float8 = holds_float8(onnx.load(os.fspath(source.path), load_external_data=False))
    if is_float8 and not provider.compiles:
        # This project's sessions use BASIC with session.disable_quant_qdq, which Triton does not pass on;
        # with all optimizations off the values are the same.
        remarks.append("graph optimizations are off: with them, ONNX Runtime changes the values of FP8")
    if is_float8 or provider.compiles:
        fields.append(("graph", (("level", DISABLE_ALL),)))
    told = {} if settings is None else settings.options
    accelerators: list[Fields] = []
    if provider.key == TENSORRT.key:
        profiles = {name: value for name, value in told.items() if name != "trt_cuda_graph_enable"}
        accelerators.append(_accelerator("tensorrt", profiles))
        accelerators.append(_accelerator("cuda", {"use_tf32": "0"}))
        remarks.append(
            "TensorRT compiles as the server loads the model: what the build compiled is found by a path on "
            "the server, which a repository cannot know (`trt_engine_cache_path`)"
        )
    if provider.key == CUDA.key:
        kept = {"use_tf32": "0"} | {name: told[name] for name in CUDA_OPTIONS if name in told}
        accelerators.append(_accelerator("cuda", kept))
    if accelerators:
        gpu: Fields = tuple(("gpu_execution_accelerator", fields) for fields in accelerators)
        fields.append(("execution_accelerators", gpu))
        remarks.append("runs without CUDA graphs: the server does not keep buffers where they were recorded")
    return tuple(fields), tuple(remarks)


def _accelerator(name: str, options: Mapping[str, str]) -> Fields:
    return (("name", name), *entries("parameters", options))


def _tensorrt(source: Source) -> Form | Refusal:
    model = _model(source, ("tensorrt", "tensorrt_plan", "model.plan"), ())
    cuda: Fields = ()
    if model.sizes and not any(None in port.row_shape for port in model.inputs):
        specs = tuple(("graph_spec", _graph_spec(model.inputs, size)) for size in model.sizes)
        cuda = (("cuda", (("graphs", True), *specs)),)
    remarks = [
        f"needs TensorRT {source.entry.version} and a GPU of {source.entry.architecture}: pick the release "
        "of Triton that has this version",
        "runs in the profile for every size; the profiles for single sizes behind it are used where "
        "`instance_group.profile` names them",
    ]
    return Form(replace(model, optimization=cuda), tuple(remarks))


def _graph_spec(inputs: Sequence[Port], size: int) -> Fields:
    shapes = {
        port.name: tuple(("dim", length) for length in port.row_shape if length is not None)
        for port in inputs
    }
    return (("batch_size", size), *entries("input", shapes))


def _tensorrt_rtx(source: Source) -> Form | Refusal:
    return Refusal(
        "Triton's TensorRT backend does not load engines of TensorRT for RTX, which is another library: "
        "build for backend 'tensorrt', or serve it with `loka-onnx bundle serve`"
    )


def _migraphx(source: Source) -> Form | Refusal:
    return Refusal(
        "Triton has no MIGraphX backend, and its ONNX Runtime backend no provider for it: serve it with "
        "`loka-onnx bundle serve`"
    )


def _inductor(source: Source) -> Form | Refusal:
    engine = read_engine(source.path)
    taken, given = ({port.name for port in ports} for ports in (engine.inputs, engine.outputs))
    if taken != {spec.name for spec in source.inputs} or given != {spec.name for spec in source.outputs}:
        return Refusal(f"its document has other inputs or outputs than the bundle: {sorted(taken | given)}")
    loose = [port.name for port in engine.outputs if not port.batched]
    if loose:
        return Refusal(f"output '{loose[0]}' is one for the whole batch, and Triton cuts outputs by request")
    needs = f"needs PyTorch {engine.torch}, and the processor and the GPU that the engine was compiled for"
    reason = why_not_native(engine)
    return _python(source, engine, needs, reason) if reason else _torch(source, engine, needs)


def _torch(source: Source, engine: InductorEngine, needs: str) -> Form:
    names = {port.name: f"INPUT__{index}" for index, port in enumerate(engine.inputs)}
    names |= {port.name: f"OUTPUT__{index}" for index, port in enumerate(engine.outputs)}
    model = _model(source, ("pytorch", "torch_aoti", "model.pt2"), engine.sizes, names)
    # The backend finds positions by these names; in their order, nothing depends on that.
    inputs, outputs = (
        tuple(sorted(ports, key=lambda port: int(port.name.partition("__")[2])))
        for ports in (model.inputs, model.outputs)
    )
    package = ModelFile(f"{VERSION}/model.pt2", source.entry.path, program=engine.programs[0].name)
    others = tuple(file for file in model.files if file.path != package.path)
    # Under `platform: "torch_aoti"` the backend checks types, not versions: a wrong one is a crash.
    remarks = [f"{needs}; the server does not check that"]
    if source.entry.architecture != CPU:
        remarks.append("runs without CUDA graphs")
    return Form(replace(model, inputs=inputs, outputs=outputs, files=(package, *others)), tuple(remarks))


def _python(source: Source, engine: InductorEngine, needs: str, reason: str) -> Form:
    model = _model(source, ("python", "", "model.py"), engine.sizes)
    package = ModelFile(f"{VERSION}/model.pt2", source.entry.path)
    code = ModelFile(f"{VERSION}/model.py", content=Path(python_model.__file__).read_bytes())
    others = tuple(file for file in model.files if not file.path.startswith(f"{VERSION}/"))
    # The session picks the GPU of the engine's architecture itself.
    kind = _CPU if source.entry.architecture == CPU else _OWN
    remarks = (
        f"runs in Triton's Python backend: {reason}",
        f"{needs}, and loka-onnx in the server's Python",
    )
    return Form(replace(model, kind=kind, files=(code, package, *others)), remarks)


_FORMS: Mapping[str, Callable[[Source], Form | Refusal]] = {
    "onnxruntime": _onnxruntime,
    "onnxruntime_tensorrt": _onnxruntime,
    "tensorrt": _tensorrt,
    "tensorrt_rtx": _tensorrt_rtx,
    "migraphx": _migraphx,
    "inductor": _inductor,
}


def _model(
    source: Source,
    served_by: tuple[str, str, str],
    sizes: Sequence[int],
    names: Mapping[str, str] | None = None,
) -> BackendModel:
    """What every form begins with.

    Args:
        source: The engine.
        served_by: Backend, platform and name of the model file.
        sizes: Batch sizes that it was built for; those that it was measured at where there are none.
        names: Names of inputs and outputs in Triton, by those in the bundle; the same when None.
    """
    backend, platform, file = served_by
    entry = source.entry
    inputs, outputs = ports_of(source.inputs, names), ports_of(source.outputs, names)
    measured = () if entry.evaluation is None else (each.batch for each in entry.evaluation.latencies)
    low, high = entry.batch.min, entry.batch.max
    rows = {port.name: np.ascontiguousarray(source.sample[port.tensor][0]) for port in inputs}
    # Random rows would hold ids that no table has.
    warmup = {port.name: f"input{index}.bin" for index, port in enumerate(inputs)}
    return BackendModel(
        name=source.name,
        backend=backend,
        platform=platform,
        file=file,
        kind=_CPU if entry.architecture == CPU else _GPU,
        inputs=inputs,
        outputs=outputs,
        minimum=low,
        maximum=high,
        sizes=tuple(size for size in sorted({*(sizes or measured)}) if low <= size <= high),
        files=(
            ModelFile(f"{VERSION}/{file}", entry.path),
            *(ModelFile(f"{WARMUP}/{warmup[name]}", content=row.tobytes()) for name, row in rows.items()),
        ),
        warmup=warmup,
        warmup_dims={name: row.shape or (1,) for name, row in rows.items()},
        parameters={**source.parameters, f"{PARAMETER}architecture": entry.architecture},
    )

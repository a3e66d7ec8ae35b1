"""Backend of Triton for an engine, and its configuration.

Every form is one function, in `triton.py` of its backend: it takes an engine of the bundle, and returns a
model or the reason why there is none. A form reports the options that Triton does not pass on to its library.

Sources, all of github.com/triton-inference-server: `onnxruntime_backend` (README, `src/onnxruntime.cc`),
`tensorrt_backend` (`src/tensorrt_model.cc`, `src/instance_state.cc`), `pytorch_backend` (`src/pt2/`),
`python_backend` (README).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.core.artifact import TensorSpec
from loka_onnx.core.devices import CPU
from loka_onnx.core.manifest import EngineEntry
from loka_onnx.engines.triton.models import PARAMETER, VERSION, WARMUP, BackendModel, ModelFile, ports_of
from loka_onnx.sessions.backends import get_spec, has_spec, resolve

ON_CPU, ON_GPU, BY_MODEL = "KIND_CPU", "KIND_GPU", "KIND_MODEL"


@dataclass(frozen=True)
class BundledEngine:
    """An engine of a bundle (a verified directory), for the model `name`; `parameters` state its origin,
    `sample` has one array per input, `instances` is for each device.
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


@dataclass(frozen=True)
class Form:
    """A model, and remarks on differences between Triton and this project's own loader."""

    model: BackendModel
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """Reason why Triton does not serve an engine, and the way to serve it instead."""

    reason: str


def form_of(source: BundledEngine) -> Form | Refusal:
    """Return the model that serves an engine, or the reason why there is none; raises as `ports_of`."""
    if not has_spec(source.entry.backend):
        return Refusal(f"Triton has no backend for engines of {source.entry.backend}")
    spec = get_spec(source.entry.backend)
    if not spec.triton:
        return Refusal(f"{spec.no_triton}: serve it with `loka-onnx bundle serve`")
    form: Form | Refusal = resolve(spec.triton)(source)
    return form


def model_of(
    source: BundledEngine,
    served_by: tuple[str, str, str],
    sizes: Sequence[int],
    names: Mapping[str, str] | None = None,
) -> BackendModel:
    """Return the common part of a form, `served_by` a backend, platform and model file. Without `sizes` of
    the build, those that were measured count; `names` are Triton's of inputs and outputs, None for the same.
    """
    backend, platform, file = served_by
    entry = source.entry
    inputs, outputs = ports_of(source.inputs, names), ports_of(source.outputs, names)
    measured = () if entry.evaluation is None else (each.batch for each in entry.evaluation.latencies)
    low, high = entry.batch.min, entry.batch.max
    # Random rows would hold ids that no table has.
    rows = [np.ascontiguousarray(source.sample[port.tensor][0]) for port in inputs]
    warmup = {p.name: (f"input{i}.bin", rows[i].shape or (1,)) for i, p in enumerate(inputs)}
    first = (ModelFile(f"{WARMUP}/input{i}.bin", content=row.tobytes()) for i, row in enumerate(rows))
    return BackendModel(
        name=source.name,
        backend=backend,
        platform=platform,
        file=file,
        kind=ON_CPU if entry.architecture == CPU else ON_GPU,
        inputs=inputs,
        outputs=outputs,
        minimum=low,
        maximum=high,
        sizes=tuple(size for size in sorted({*(sizes or measured)}) if low <= size <= high),
        files=(ModelFile(f"{VERSION}/{file}", entry.path), *first),
        warmup=warmup,
        parameters={**source.parameters, f"{PARAMETER}architecture": entry.architecture},
    )

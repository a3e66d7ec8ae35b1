"""Export of a retrained module: its weights in the graph of its earlier export.

The exporter keeps the module's weight names, except for transposed weights: these are found by the values
that the graph was exported with. Such tensors are replaced, and the graph is compared with the module twice:
under the retrained weights, like every export, and under weights far from all trained ones, each value times
a factor of its own. Stale values, computed from weights and held under no name of the module, show then;
after a day of training they might hide in the tolerance. A graph that does not agree is rejected: the module
is exported anew.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from loka_onnx.core.artifact import ModelArtifact, OutputSpec
from loka_onnx.errors import LokaError
from loka_onnx.export.torch_module import Arrays, as_tensors, export_torch, import_torch, measure_parity
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.storage import read_proto
from loka_onnx.sessions.model_files import data_locations

if TYPE_CHECKING:
    import torch

MOVED_ROWS = 256
"""Rows on which graph and module are compared under weights far from the trained ones."""
LEAST, MOST = 0.5, 1.5
"""Factors of those weights: of one sign, because a variance must stay positive."""

State = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class EarlierExport:
    """Earlier export of the same module; `weights` reads what it was exported with, empty where they are
    gone.
    """

    model: ModelArtifact
    weights: Callable[[], State]


@dataclass(frozen=True)
class Declined:
    """Reason why weights cannot be put into the earlier graph."""

    reason: str


def export_retrained(
    module: torch.nn.Module,
    rows: Arrays,
    target: Path,
    outputs: tuple[OutputSpec, ...],
    earlier: EarlierExport,
) -> ModelArtifact:
    """Export a module into its earlier graph, or anew where the graph differs; see `export_torch`."""
    found = put_weights(module, rows, target, outputs, earlier)
    return export_torch(module, rows, target, outputs) if isinstance(found, Declined) else found


def put_weights(
    module: torch.nn.Module,
    rows: Arrays,
    target: Path,
    outputs: tuple[OutputSpec, ...],
    earlier: EarlierExport,
) -> ModelArtifact | Declined:
    """Return the earlier graph with the module's weights; arguments as in `export_retrained`."""
    module = module.eval()
    try:
        model = read_proto(earlier.model.path)
        if data_locations(model):
            # Writing the weights takes most of such an export, and is the same either way.
            return Declined("its weights stand beside the model file")
        state = {name: tensor.detach() for name, tensor in module.state_dict().items()}
        sources = _sources(model, state, earlier)
        few = {name: array[:MOVED_ROWS] for name, array in rows.items()}
        moved = _moved(module)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=target.parent) as scratch:
            raw = Path(scratch) / "raw.onnx"
            _write(model, sources, moved, raw)
            measure_parity(raw, few, _run(module, moved, as_tensors(few), outputs))
            _write(model, sources, state, raw)
            parity = measure_parity(raw, rows, _run(module, state, as_tensors(rows), outputs))
            digest = GraphModel.load(raw).save(target)
    except (LokaError, _NotTheGraph, RuntimeError, IndexError, TypeError) as error:
        # The export that follows reports any fault of rows or module.
        return Declined(" ".join(str(error).split()))
    return replace(earlier.model, path=target, digest=digest, parity=parity)


class _NotTheGraph(Exception):
    """The graph is not one of this module."""


def _moved(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return weights far from the trained ones; tensors under several names stay one."""
    torch = import_torch()
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Any] = {}
    shared: dict[tuple[int, tuple[int, ...]], Any] = {}
    for name, tensor in module.state_dict().items():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if not tensor.is_floating_point():
            found[name] = tensor
            continue
        if key not in shared or not tensor.numel():
            factors = torch.rand(tensor.shape, generator=generator, dtype=torch.float32)
            shared[key] = tensor.detach() * (LEAST + (MOST - LEAST) * factors).to(tensor.dtype)
        found[name] = shared[key]
    return found


@dataclass(frozen=True)
class _Source:
    """Weight of the module that a graph tensor's values come from."""

    name: str
    transposed: bool = False

    def values(self, state: Mapping[str, torch.Tensor]) -> npt.NDArray[Any]:
        values = state[self.name].numpy()
        return np.ascontiguousarray(values.T if self.transposed else values)


def _sources(
    model: onnx.ModelProto, state: Mapping[str, torch.Tensor], earlier: EarlierExport
) -> dict[str, _Source]:
    """Return the source of each tensor of the graph, by its name, for weights only."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    found = {name: _Source(name) for name in tensors if name in state}
    if not found:
        raise _NotTheGraph("none of its tensors is named like one of the module")
    matrices = [t for t in tensors.values() if len(t.dims) == 2 and t.name not in found]
    before = earlier.weights() if matrices else {}
    for tensor in matrices:
        values = numpy_helper.to_array(tensor)
        same = [
            name
            for name, weight in before.items()
            if name in state and weight.shape == values.shape[::-1] and np.array_equal(weight.T, values)
        ]
        if len(same) == 1:
            found[tensor.name] = _Source(same[0], transposed=True)
    for name, source in found.items():
        values, tensor = source.values(state), tensors[name]
        kind = onnx.helper.np_dtype_to_tensor_dtype(values.dtype)
        if (values.shape, kind) != (tuple(tensor.dims), tensor.data_type):
            raise _NotTheGraph(f"'{name}' is of another shape or type")
    return found


def _write(
    model: onnx.ModelProto, sources: Mapping[str, _Source], state: Mapping[str, torch.Tensor], path: Path
) -> None:
    """Write the graph with the values of a state."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for tensor in changed.graph.initializer:
        if tensor.name not in sources:
            continue
        replacement = numpy_helper.from_array(sources[tensor.name].values(state), tensor.name)
        if tensor.HasField("raw_data"):
            # The rest stays as the exporter wrote it, to the byte.
            tensor.raw_data = replacement.raw_data
        else:
            tensor.CopyFrom(replacement)
    onnx.save(changed, path)


def _run(
    module: torch.nn.Module,
    state: Mapping[str, torch.Tensor],
    tensors: tuple[torch.Tensor, ...],
    outputs: tuple[OutputSpec, ...],
) -> dict[str, torch.Tensor]:
    torch = import_torch()
    with torch.no_grad():
        results = torch.func.functional_call(module, dict(state), tensors)
    results = tuple(results) if isinstance(results, tuple | list) else (results,)
    if len(results) != len(outputs):
        raise _NotTheGraph(f"the module returns {len(results)} tensors")
    return dict(zip((spec.name for spec in outputs), results, strict=True))

"""A model file as a PyTorch module.

`forward` interprets the graph, one function per node. `torch.export` traces it, which leaves the operations
of those functions, with a symbolic batch where it is dynamic.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from loka_onnx.engines.inductor.lowering.evaluating import Step, evaluate
from loka_onnx.engines.inductor.lowering.folding import Stored, fold, store
from loka_onnx.engines.inductor.lowering.node import REMEDY, Node, Scope, load_directly
from loka_onnx.engines.inductor.lowering.operators import OPERATORS
from loka_onnx.engines.inductor.lowering.reading import read_graph
from loka_onnx.engines.inductor.lowering.registry import Operator, Registry
from loka_onnx.engines.inductor.lowering.strategies import LoweredSite, ProductStrategy, ScaledMatMul
from loka_onnx.engines.inductor.lowering.values import MOST_NUMBERS, Constant, Value
from loka_onnx.errors import EngineError


@dataclass(frozen=True)
class LoweringOptions:
    """Strategy of FP8 products, and the registry of lowerings."""

    products: ProductStrategy = field(default_factory=ScaledMatMul)
    operators: Registry = field(default_factory=lambda: OPERATORS)


@dataclass(frozen=True)
class _Program:
    """Contents of a module.

    Attributes:
        steps: Its nodes that were not folded.
        constants: Constants that the steps read, by name of the tensor.
        stored: Their buffers, by name of the constant.
    """

    inputs: tuple[str, ...]
    batched: frozenset[str]
    outputs: tuple[str, ...]
    steps: tuple[Step, ...]
    constants: Mapping[str, Constant]
    stored: Mapping[str, Stored]
    scope: Scope


class LoweredModel(nn.Module):
    """A graph that runs in torch; made by `lower`.

    Attributes:
        input_names: Names of the graph's inputs, in the order of `forward`.
        output_names: Names of its outputs, in the order of the results.
        batched: Inputs with a dynamic batch on axis 0.
    """

    def __init__(self, program: _Program) -> None:
        super().__init__()
        self.input_names, self.output_names = program.inputs, program.outputs
        self.batched = program.batched
        self.weights = nn.Module()
        self._steps, self._scope = program.steps, program.scope
        self._buffer_of: dict[str, tuple[str, bool]] = {}
        for name, held in program.stored.items():
            buffer = _attribute_name(self.weights, name)
            self.weights.register_buffer(buffer, held.tensor)
            self._buffer_of[name] = (buffer, held.columns)
        self._constants: dict[str, Value] = {
            name: _without_array(constant) if constant.name in program.stored else constant
            for name, constant in program.constants.items()
        }
        self._scope.load = self._load

    @property
    def sites(self) -> Mapping[str, LoweredSite]:
        """Lowered products by node name; filled when the module runs or is traced."""
        return MappingProxyType(self._scope.sites)

    def dynamic_shapes(self, batch: Any) -> tuple[tuple[dict[int, Any], ...]]:
        """Argument of `torch.export.export` for a dynamic batch (`torch.export.Dim`) on axis 0 of batched
        inputs.
        """
        return (tuple({0: batch} if name in self.batched else {} for name in self.input_names),)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the graph on one tensor per input, in the order of `input_names`; results are in
        `output_names`'s.

        Raises:
            EngineError: The number of inputs is wrong, a node cannot be lowered, or torch refuses it.
        """
        if len(inputs) != len(self.input_names):
            raise EngineError(
                f"the graph has {len(self.input_names)} inputs",
                evidence=f"it was given {len(inputs)}",
                remedy=f"pass {', '.join(self.input_names)}, in this order",
            )
        scope = self._scope
        scope.device = inputs[0].device if inputs else next(self.buffers(), torch.empty(0)).device
        values: dict[str, Value] = self._constants | dict(zip(self.input_names, inputs, strict=True))
        for step in self._steps:
            read = [values[name] if name else None for name in step.node.inputs]
            values |= zip(step.node.outputs, evaluate(step, read), strict=False)
            for name in step.last_uses:
                del values[name]
        return tuple(scope.tensor(values[name]) for name in self.output_names)

    def _load(self, constant: Constant) -> torch.Tensor:
        if constant.name not in self._buffer_of:
            return load_directly(constant).to(self._scope.device)
        buffer, columns = self._buffer_of[constant.name]
        tensor = self.weights.get_buffer(buffer)
        return tensor.t() if columns else tensor


def lower(model: Path, options: LoweringOptions | None = None) -> LoweredModel:
    """Lower an ONNX model to a module, on the CPU.

    Raises:
        ModelError: The file or its external data are missing, truncated or invalid.
        EngineError: An operator or a type of the model has no lowering.
    """
    options = options or LoweringOptions()
    scope = Scope(options.products)
    graph = read_graph(model, scope)
    found = [(node, _operator(node, options.operators)) for node in graph.nodes]
    constants = dict(graph.constants)
    with torch.no_grad():
        steps = fold(found, constants)
        stored = store(steps, constants, graph.outputs)
    scope.sites.clear()
    read = {name for step in steps for name in step.node.inputs} | {*graph.outputs}
    kept = {name: constant for name, constant in constants.items() if name in read}
    timed = _with_last_uses(steps, graph.outputs, kept)
    return LoweredModel(_Program(graph.inputs, graph.batched, graph.outputs, timed, kept, stored, scope))


def _operator(node: Node, registry: Registry) -> Operator:
    found = registry.find(node.domain, node.op_type)
    if found is not None:
        return found
    reason = "" if node.domain else registry.declined.get(node.op_type, "")
    if reason:
        raise node.error(f"{node.op_type} is not lowered", reason)
    domain = node.domain or "ai.onnx"
    known = sorted(op_type for where, op_type in registry.operators if where == node.domain)
    near = difflib.get_close_matches(node.op_type, known, n=3)
    evidence = f"{len(known)} operators of domain '{domain}' are"
    raise node.error(
        f"operator {node.op_type} of domain '{domain}' is not lowered",
        f"{evidence}; the nearest names are {', '.join(near)}" if near else evidence,
        f"{REMEDY}, or register a function for it with `Registry.operator`",
    )


def _with_last_uses(
    steps: list[Step], outputs: tuple[str, ...], constants: Mapping[str, Constant]
) -> tuple[Step, ...]:
    """Add to each step the tensors that it is the last to read."""
    seen, timed = {*outputs, *constants}, []
    for step in reversed(steps):
        touched = dict.fromkeys(name for name in (*step.node.inputs, *step.node.outputs) if name)
        timed.append(replace(step, last_uses=tuple(name for name in touched if name not in seen)))
        seen |= touched.keys()
    return tuple(reversed(timed))


def _attribute_name(holder: nn.Module, name: str) -> str:
    """Turn a tensor's name into a buffer's, which must be a unique attribute without dots."""
    readable = re.sub(r"\W+", "_", name).strip("_") or "constant"
    unique, count = readable, 0
    while hasattr(holder, unique):
        count += 1
        unique = f"{readable}_{count}"
    return unique


def _without_array(constant: Constant) -> Constant:
    """Drop the values of a long constant: its buffer holds them."""
    if constant.array is None or constant.array.size <= MOST_NUMBERS:
        return constant
    return replace(constant, array=None)

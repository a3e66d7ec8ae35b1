"""A graph node during lowering, and the table of lowering functions.

A function takes the node and one value per input and returns one or a tuple. Its registration decides on
them:

- by default, tensors;
- at the positions `numbers`, a `ShapeValue` where the input is a constant or comes from shapes, else the
  tensor (`Node.numbers` then reports the error);
- at the positions `scalars`, a `ShapeValue` where the input is a constant of rank 0, else a tensor;
- `moves`: the operator only moves elements of its first input, so that a `Dequantized` with a single scale
  stays FP8;
- `raw`: every value unchanged;
- `wide`: constants at these positions, such as scales, are stored in FP32, so that no kernel converts them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from loka_onnx.engines.inductor.lowering.strategies import ProductStrategy
from loka_onnx.engines.inductor.lowering.values import Constant, Dequantized, ShapeValue, Value, to_torch
from loka_onnx.engines.inductor.package import CompiledSite
from loka_onnx.errors import EngineError, InternalError

T = TypeVar("T")
Lowering = Callable[..., Any]
REMEDY = "let another backend build this model"


def load_directly(constant: Constant) -> torch.Tensor:
    """The tensor of a constant that has no buffer, on the CPU."""
    if constant.array is None:
        raise InternalError(f"constant '{constant.name}' has neither values nor a buffer")
    return to_torch(constant.array)


@dataclass
class Scope:
    """State that the nodes of one module share: strategy, buffers, device, and lowered products by name."""

    products: ProductStrategy
    load: Callable[[Constant], torch.Tensor] = field(default_factory=lambda: load_directly)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    sites: dict[str, CompiledSite] = field(default_factory=dict)

    def tensor(self, value: Value) -> torch.Tensor:
        """Convert a value to its tensor."""
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, Constant):
            return self.load(value)
        if isinstance(value, ShapeValue):
            return value.materialize(self.device)
        if isinstance(value, Dequantized):
            return value.materialize()
        raise TypeError("an input that is left out has no tensor")


@dataclass(frozen=True)
class Node:
    """One node of the graph; names are empty for ONNX's own domain, omitted inputs and unused outputs. A node
    without a name has that of its first output. Attributes are Python values, tensors constants.
    """

    op_type: str
    domain: str
    name: str
    attributes: Mapping[str, Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    scope: Scope

    def get(self, name: str, default: T) -> T:
        """Return an attribute or its default."""
        value: T = self.attributes.get(name, default)
        return value

    def tensor(self, value: Value) -> torch.Tensor:
        """Convert a value to its tensor."""
        return self.scope.tensor(value)

    def wants(self, output: int) -> bool:
        """True if an output has a name, so that something may read it."""
        return output < len(self.outputs) and bool(self.outputs[output])

    def error(self, what: str, evidence: str, remedy: str = REMEDY) -> EngineError:
        """Build an error about this node."""
        op = f"{self.domain}.{self.op_type}" if self.domain else self.op_type
        return EngineError(what, where=f"node '{self.name}' ({op})", evidence=evidence, remedy=remedy)

    def numbers(self, value: Value, what: str) -> list[Any]:
        """Return the numbers, plain or symbolic, of an input; refuse one with elements of tensors."""
        if isinstance(value, ShapeValue):
            return list(value.entries)
        raise self.error(
            f"'{what}' depends on the elements of a tensor",
            "shapes of a compiled module follow from the shapes of its inputs alone",
            f"export the model with shapes that follow from its inputs, or {REMEDY}",
        )

    def number(self, value: Value, what: str) -> Any:
        """Return the only number of such an input."""
        entries = self.numbers(value, what)
        if len(entries) != 1:
            raise self.error(f"'{what}' must be one number", f"it has {len(entries)}", "export it again")
        return entries[0]

    def axes(self, value: Value) -> list[int] | None:
        """Axes as plain numbers; None where omitted."""
        return None if value is None else [int(axis) for axis in self.numbers(value, "axes")]


@dataclass(frozen=True)
class Operator:
    """Lowering of an operator; see the module."""

    lower: Lowering
    numbers: Collection[int] = ()
    scalars: Collection[int] = ()
    moves: bool = False
    raw: bool = False
    wide: Collection[int] = ()


OPERATORS: dict[tuple[str, str], Operator] = {}
"""Lowerings by domain and type, complete once `lowering.model` is imported."""


def operator(*op_types: str, domain: str = "", **how: Any) -> Callable[[Lowering], Lowering]:
    """Register the decorated function for operators of a domain; `how` are the fields of `Operator`."""

    def register(function: Lowering) -> Lowering:
        OPERATORS.update({(domain, op_type): Operator(function, **how) for op_type in op_types})
        return function

    return register

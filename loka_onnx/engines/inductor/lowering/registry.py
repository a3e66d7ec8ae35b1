"""Registry of operators and their lowering functions.

A function takes the node and one value per input and returns a value or a tuple of values. Its inputs depend
on the registration:

- by default, tensors;
- at the positions `numbers`, a `ShapeValue` where the input is a constant or comes from shapes, else the
  tensor (`Node.numbers` then reports the error);
- at the positions `scalars`, a `ShapeValue` where the input is a constant of rank 0, else a tensor;
- `moves`: the operator only moves elements of its first input, so that a `Dequantized` with a single scale
  stays FP8;
- `raw`: every value unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

Lowering = Callable[..., Any]


@dataclass(frozen=True)
class Operator:
    """Lowering of an operator.

    Attributes:
        numbers: Positions of inputs that are read as numbers.
        scalars: Positions of inputs that are read as a number where they are scalar constants.
        moves: Whether it only moves the elements of its first input.
        raw: Whether it takes every kind of value.
        on_shapes: Its function on `ShapeValue`, which may return NotImplemented; or None.
        wide: Positions of constants that it reads in FP32, whatever their type in the graph.
    """

    lower: Lowering
    numbers: frozenset[int] = frozenset()
    scalars: frozenset[int] = frozenset()
    moves: bool = False
    raw: bool = False
    on_shapes: Lowering | None = None
    wide: frozenset[int] = frozenset()


@dataclass
class Registry:
    """Lowerings by domain and type; functions on shapes and reasons for refusal by type."""

    operators: dict[tuple[str, str], Operator] = field(default_factory=dict)
    shapes: dict[str, Lowering] = field(default_factory=dict)
    wide: dict[tuple[str, str], frozenset[int]] = field(default_factory=dict)
    declined: dict[str, str] = field(default_factory=dict)

    def operator(
        self,
        *op_types: str,
        domain: str = "",
        numbers: Collection[int] = (),
        scalars: Collection[int] = (),
        moves: bool = False,
        raw: bool = False,
    ) -> Callable[[Lowering], Lowering]:
        """Register the decorated function for operators of a domain."""

        def register(function: Lowering) -> Lowering:
            operator = Operator(function, frozenset(numbers), frozenset(scalars), moves, raw)
            for op_type in op_types:
                self.operators[domain, op_type] = operator
            return function

        return register

    def on_shapes(self, *op_types: str) -> Callable[[Lowering], Lowering]:
        """Register the decorated function for ONNX operators whose inputs are all numbers."""

        def register(function: Lowering) -> Lowering:
            for op_type in op_types:
                self.shapes[op_type] = function
            return function

        return register

    def store_in_float32(self, *op_types: str, positions: Collection[int], domain: str = "") -> None:
        """Store constants at these positions, such as scales, in FP32, so that no kernel converts them."""
        self.wide |= {(domain, op_type): frozenset(positions) for op_type in op_types}

    def decline(self, *op_types: str, reason: str) -> None:
        """Record the reason why ONNX operators have no lowering."""
        self.declined |= dict.fromkeys(op_types, reason)

    def find(self, domain: str, op_type: str) -> Operator | None:
        """Return the lowering of an operator; None where there is none."""
        found = self.operators.get((domain, op_type))
        if found is None:
            return None
        on_shapes = None if domain else self.shapes.get(op_type)
        return replace(found, on_shapes=on_shapes, wide=self.wide.get((domain, op_type), frozenset()))

    def copy(self) -> Registry:
        """Return a copy that can be extended on its own."""
        return Registry(dict(self.operators), dict(self.shapes), dict(self.wide), dict(self.declined))


OPERATORS = Registry()
"""Lowerings of this package, complete once `lowering.operators` is imported."""

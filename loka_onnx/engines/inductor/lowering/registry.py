"""Which function lowers which operator.

A function takes the node and one value per input and returns the outputs: a value, or a tuple of them. What
it is given is up to how it is registered:

- by default tensors, whatever kind of value the input was;
- at the positions `numbers`, a `ShapeValue` where the input is a constant or comes from shapes, and the
  tensor otherwise (`Node.numbers` then says what is wrong);
- at the positions `scalars`, a `ShapeValue` where the input is a constant of rank 0, otherwise a tensor;
- `moves`: the operator moves the elements of its first input and changes none, so a `Dequantized` with one
  scale for all passes through as FP8;
- `raw`: every value as it is.
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
        lower: Its function.
        numbers: Positions of inputs that are read as numbers.
        scalars: Positions of inputs that are read as a number where they are one.
        moves: Whether it only moves the elements of its first input.
        raw: Whether it takes every kind of value.
        on_shapes: Its function on `ShapeValue`, which may return NotImplemented; None where it has none.
        wide: Positions of constants that it computes with in FP32, whatever their type in the graph.
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
    """Operators by domain and type, functions on shapes and reasons by type."""

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
        """Register the decorated function for ONNX operators where all inputs are numbers."""

        def register(function: Lowering) -> Lowering:
            for op_type in op_types:
                self.shapes[op_type] = function
            return function

        return register

    def store_in_float32(self, *op_types: str, positions: Collection[int], domain: str = "") -> None:
        """Have constants at these positions, such as scales, stored in FP32: no kernel then widens them."""
        self.wide |= {(domain, op_type): frozenset(positions) for op_type in op_types}

    def decline(self, *op_types: str, reason: str) -> None:
        """Say why ONNX operators are not lowered."""
        self.declined |= dict.fromkeys(op_types, reason)

    def find(self, domain: str, op_type: str) -> Operator | None:
        """How an operator is lowered; None when it is not."""
        found = self.operators.get((domain, op_type))
        if found is None:
            return None
        on_shapes = None if domain else self.shapes.get(op_type)
        return replace(found, on_shapes=on_shapes, wide=self.wide.get((domain, op_type), frozenset()))

    def copy(self) -> Registry:
        """A registry to add to, which leaves this one as it is."""
        return Registry(dict(self.operators), dict(self.shapes), dict(self.wide), dict(self.declined))


OPERATORS = Registry()
"""What this package lowers, once `lowering.operators` is imported."""

"""Table of operators and their lowering functions.

A function takes the node and one value per input and returns a value or a tuple of values. Its inputs depend
on the registration:

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

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

Lowering = Callable[..., Any]


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

"""Evaluation of one node on the values of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from loka_onnx.engines.inductor.exported import marked
from loka_onnx.engines.inductor.lowering.node import Node
from loka_onnx.engines.inductor.lowering.registry import Operator
from loka_onnx.engines.inductor.lowering.shape_arithmetic import ON_SHAPES, OnShapes
from loka_onnx.engines.inductor.lowering.values import Constant, Dequantized, ShapeValue, Value, numbers_of
from loka_onnx.errors import LokaError


@dataclass(frozen=True)
class Step:
    """A node and its lowering; nothing reads the tensors of `last_uses` after it."""

    node: Node
    operator: Operator
    last_uses: tuple[str, ...] = ()

    @property
    def on_shapes(self) -> OnShapes | None:
        """Its function on `ShapeValue`; None where it has none."""
        return None if self.node.domain else ON_SHAPES.get(self.node.op_type)


def evaluate(step: Step, inputs: Sequence[Value]) -> tuple[Value, ...]:
    """The outputs of a node, whose operators are annotated with its name (`exported.marked`).

    Raises:
        EngineError: The node cannot be lowered, or torch refuses it.
    """
    try:
        done = _apply(step, inputs)
    except LokaError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError) as error:
        what = f"torch refuses the node: {type(error).__name__}: {error}"
        raise step.node.error(what, _describe(step.node, inputs)) from error
    return done if isinstance(done, tuple) else (done,)


def _apply(step: Step, inputs: Sequence[Value]) -> Any:
    numbers = None if step.on_shapes is None else _numbers(inputs)
    if step.on_shapes is not None and numbers is not None:
        done = step.on_shapes(step.node, *numbers)
        if done is not NotImplemented:
            return done
    first = inputs[0] if inputs else None
    if not step.operator.moves or not isinstance(first, Dequantized) or first.axis is not None:
        return _lowered(step, inputs)
    moved = _lowered(step, [first.values, *inputs[1:]])
    if isinstance(moved, tuple):
        return tuple(replace(first, values=part) for part in moved)
    return replace(first, values=moved)


def _numbers(inputs: Sequence[Value]) -> list[ShapeValue | None] | None:
    """Inputs as numbers if at least one comes from a shape and all others can be numbers."""
    if not any(isinstance(value, ShapeValue) for value in inputs):
        return None
    numbers = [numbers_of(value) if isinstance(value, Constant) else value for value in inputs]
    for number, value in zip(numbers, inputs, strict=True):
        if value is not None and not isinstance(number, ShapeValue):
            return None
    return numbers  # type: ignore[return-value]


def _lowered(step: Step, inputs: Sequence[Value]) -> Any:
    """Call the operator's function on the kinds of values that it takes."""
    node, operator = step.node, step.operator
    arguments: list[Value] = list(inputs) if operator.raw else []
    for position, value in enumerate([] if operator.raw else inputs):
        numbers = numbers_of(value) if isinstance(value, Constant) else value
        is_number = isinstance(numbers, ShapeValue) and (
            position in operator.numbers or (position in operator.scalars and numbers.scalar)
        )
        arguments.append(numbers if value is None or is_number else node.tensor(value))
    return marked(node.name, operator.lower, node, *arguments)


def _describe(node: Node, inputs: Sequence[Value]) -> str:
    """Types and shapes of a node's inputs."""
    parts = []
    for name, value in zip(node.inputs, inputs, strict=False):
        if value is None:
            continue
        held = value.values if isinstance(value, Dequantized) else value
        if isinstance(held, ShapeValue):
            parts.append(f"'{name}' {list(held.entries)}")
        else:
            parts.append(f"'{name}' {str(held.dtype).removeprefix('torch.')}{list(held.shape)}")
    return f"inputs {', '.join(parts) or 'none'}"

"""Recurrent layers, step by step: one product for the inputs of all steps, one for the state at each.

With gates x W + b of an input and h R + b of a state, σ the sigmoid, ⊙ the product by elements::

    RNN     h' = tanh(x W + h R)
    GRU     z, r = σ(x W + h R)     n = tanh(x W + r ⊙ (h R))  or  tanh(x W + (r ⊙ h) R)
            h' = (1 − z) ⊙ n + z ⊙ h
    LSTM    i, o, f = σ(x W + h R)     c' = f ⊙ c + i ⊙ tanh(x W + h R)     h' = o ⊙ tanh(c')

The number of steps is part of the program. A row of fewer steps (`sequence_lens`) keeps its state at the
others, and gives 0 there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from loka_onnx.engines.inductor.lowering.node import Node, operator

Tensor = torch.Tensor
State = tuple[Tensor, ...]
_GATES = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}
"""Activations that are the default of each layer."""
_BACKWARD = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


@dataclass(frozen=True)
class Direction:
    """One direction of a layer: weights (gates · hidden, input) and (gates · hidden, hidden), and biases."""

    node: Node
    weight: Tensor
    recurrence: Tensor
    bias: Tensor | None
    recurrent_bias: Tensor | None

    def run(self, x: Tensor, state: State, lengths: Tensor | None, *, backward: bool) -> tuple[Tensor, State]:
        """Return hidden states (steps, batch, hidden) of inputs (steps, batch, input), and the last state."""
        gates = functional.linear(x, self.weight, self.bias)
        step, steps = _STEPS[self.node.op_type], range(x.shape[0])
        hidden: list[Tensor] = []
        for position in reversed(steps) if backward else steps:
            new = step(self, gates[position], state)
            shown = new[0]
            if lengths is not None:
                is_inside = (position < lengths).unsqueeze(-1)
                shown = torch.where(is_inside, shown, 0.0)
                new = tuple(torch.where(is_inside, *each) for each in zip(new, state, strict=True))
            state = new
            hidden.append(shown)
        return torch.stack(hidden[::-1] if backward else hidden), state

    def of_state(self, hidden: Tensor, gates: slice = slice(None)) -> Tensor:
        """Multiply a state with the recurrent weights of some gates."""
        bias = None if self.recurrent_bias is None else self.recurrent_bias[gates]
        return functional.linear(hidden, self.recurrence[gates], bias)


def _rnn(layer: Direction, gates: Tensor, state: State) -> State:
    name = layer.node.get("activations", ["Tanh"])[0]
    return ((torch.relu if name == "Relu" else torch.tanh)(gates + layer.of_state(state[0])),)


def _gru(layer: Direction, gates: Tensor, state: State) -> State:
    (hidden,), width = state, gates.shape[-1] // 3
    x_update, x_reset, x_new = gates.chunk(3, -1)
    if layer.node.get("linear_before_reset", 0):
        h_update, h_reset, h_new = layer.of_state(hidden).chunk(3, -1)
        new = torch.tanh(x_new + torch.sigmoid(x_reset + h_reset) * h_new)
    else:
        h_update, h_reset = layer.of_state(hidden, slice(2 * width)).chunk(2, -1)
        kept = torch.sigmoid(x_reset + h_reset) * hidden
        new = torch.tanh(x_new + layer.of_state(kept, slice(2 * width, None)))
    update = torch.sigmoid(x_update + h_update)
    return ((1.0 - update) * new + update * hidden,)


def _lstm(layer: Direction, gates: Tensor, state: State) -> State:
    hidden, cell = state
    entering, leaving, keeping, new = (gates + layer.of_state(hidden)).chunk(4, -1)
    cell = torch.sigmoid(keeping) * cell + torch.sigmoid(entering) * torch.tanh(new)
    return torch.sigmoid(leaving) * torch.tanh(cell), cell


_STEPS: dict[str, Callable[[Direction, Tensor, State], State]] = {"RNN": _rnn, "GRU": _gru, "LSTM": _lstm}


@operator("RNN", "GRU", "LSTM")
def recurrent(
    node: Node,
    x: Tensor,
    weight: Tensor,
    recurrence: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    *initial: Tensor | None,
) -> Any:
    """Y (steps, directions, batch, hidden), and the last states Y_h and, of an LSTM, Y_c (directions, …)."""
    backward = _BACKWARD[node.get("direction", "forward")]
    count = 2 if node.op_type == "LSTM" else 1
    _check(node, len(backward), initial[count:])
    zeros = x.new_zeros((len(backward), x.shape[1], recurrence.shape[-1]))
    states = [zeros if each is None else each for each in [*initial, None, None][:count]]
    runs = []
    for index, is_backward in enumerate(backward):
        biases = (None, None) if bias is None else bias[index].chunk(2)
        layer = Direction(node, weight[index], recurrence[index], *biases)
        first = tuple(each[index] for each in states)
        runs.append(layer.run(x, first, lengths, backward=is_backward))
    every = torch.stack([hidden for hidden, _ in runs], 1)
    last = [torch.stack(ends) for ends in zip(*(state for _, state in runs), strict=True)]
    return (every, *last)[: len(node.outputs)]


def _check(node: Node, directions: int, peepholes: tuple[Tensor | None, ...]) -> None:
    """Refuse what no exporter of PyTorch writes."""
    usual = _GATES[node.op_type] * directions
    named = node.get("activations", usual)
    is_relu = node.op_type == "RNN" and named == ["Relu"] * directions
    others = [name for name in ("clip", "input_forget", "layout") if node.get(name, 0)]
    others += ["P"] if any(each is not None for each in peepholes) else []
    if others or not (named == usual or is_relu):
        evidence = f"its activations are {', '.join(named)}; it has {', '.join(others) or 'nothing else'}"
        raise node.error(f"a recurrent layer of this form is not lowered: {node.op_type}", evidence)

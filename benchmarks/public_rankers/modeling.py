"""What a builder of a library returns, and how it is fed, trained and exported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.public_rankers.catalog import Exporter
from loka_onnx.core.artifact import OutputKind

STEPS, SLOW_STEPS, BATCH, LEARNING_RATE = 150, 60, 2048, 5e-3
SLOW = frozenset(
    {
        "deepctr-afn",
        "deepctr-din",
        "deepctr-pnn",
        "deepctr-xdeepfm",
        "rechub-autoint",
        "rechub-bst",
        "rechub-dcnv2",
        "rechub-fatdeepffm",
    }
)
"""Rankers that take a batch of half the rows, and fewer: they take more than a minute otherwise."""
EXPORT_ROWS = 8
LABELS = {"ctr": "clicked", "ctcvr": "bought"}


@dataclass(frozen=True)
class Input:
    """One input of a model.

    Attributes:
        name: Of the graph input.
        columns: Columns of the rows; one gives (batch,), or (batch, length) where it holds lists; several are
            stacked to (batch, columns), lists beside scalars too.
        dtype: NumPy name.
    """

    name: str
    columns: tuple[str, ...]
    dtype: str = "int64"


@dataclass(frozen=True)
class Built:
    """A model of a library.

    Attributes:
        module: Takes tensors in the order of `inputs`; returns a tensor or a tuple, in the order of `kinds`.
        inputs: How it is fed.
        kinds: Graph output → kind, in the order that the module returns them.
        export: The library's own exporter: takes the path and example tensors.
        loss: Beside the log loss, from the last forward; None where the library has no other.
    """

    module: nn.Module
    inputs: tuple[Input, ...]
    kinds: Mapping[str, OutputKind]
    export: Callable[[Path, tuple[Tensor, ...]], None] | None = None


def feed(inputs: Sequence[Input], columns: Mapping[str, np.ndarray], rows: np.ndarray) -> tuple[Tensor, ...]:
    """Tensors of some rows, in the order of the inputs."""
    return tuple(torch.from_numpy(array_of(one, columns, rows)) for one in inputs)


def array_of(one: Input, columns: Mapping[str, np.ndarray], rows: np.ndarray | slice) -> np.ndarray:
    """What an input is fed with."""
    parts = [columns[name][rows] for name in one.columns]
    if len(parts) == 1:
        return np.ascontiguousarray(parts[0].astype(one.dtype))
    wide = [part if part.ndim == 2 else part[:, None] for part in parts]
    return np.concatenate(wide, axis=1).astype(one.dtype)


def train(
    built: Built, columns: Mapping[str, np.ndarray], steps: int = STEPS, batch: int = BATCH, seed: int = 0
) -> float:
    """Train on drawn rows with Adam on the sum of the outputs' log losses.

    Returns:
        Mean loss of the last tenth of the steps.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    module = built.module.train()
    optimizer = torch.optim.Adam(module.parameters(), lr=LEARNING_RATE)
    losses = []
    size = len(columns["clicked"])
    for _ in range(steps):
        rows = rng.integers(0, size, batch)
        outputs = module(*feed(built.inputs, columns, rows))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        total = torch.zeros(())
        for output, (name, kind) in zip(outputs, built.kinds.items(), strict=True):
            label = torch.from_numpy(columns[LABELS[name]][rows])
            total = total + _log_loss(output.reshape(-1), label, kind)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        losses.append(float(total.detach()))
    module.eval()
    return float(np.mean(losses[-max(1, steps // 10) :]))


def _log_loss(output: Tensor, label: Tensor, kind: OutputKind) -> Tensor:
    if kind is OutputKind.LOGIT:
        return nn.functional.binary_cross_entropy_with_logits(output, label)
    return nn.functional.binary_cross_entropy(output.clamp(1e-7, 1 - 1e-7), label)


def export(built: Built, exporter: Exporter, columns: Mapping[str, np.ndarray], path: Path) -> None:
    """Write the ONNX file as a user of the library would."""
    example = feed(built.inputs, columns, np.arange(EXPORT_ROWS))
    built.module.eval()
    if exporter is Exporter.OWN:
        if built.export is None:
            raise ValueError("the library has no exporter of its own")
        built.export(path, example)
        return
    names = {"input_names": [one.name for one in built.inputs], "output_names": list(built.kinds)}
    if exporter is Exporter.DYNAMO:
        shapes = _batch_axes(built, example, minimum=1)
        torch.onnx.export(built.module, example, path, dynamo=True, dynamic_shapes=shapes, **names)
        return
    axes = {name: {0: "batch"} for group in names.values() for name in group}
    torch.onnx.export(built.module, example, path, dynamo=False, dynamic_axes=axes, **names)


def _batch_axes(built: Built, example: tuple[Tensor, ...], minimum: int) -> tuple[Any, ...]:
    batch = torch.export.Dim("batch", min=minimum, max=1 << 16)
    shapes: tuple[Any, ...] = tuple({0: batch} for _ in example)
    kinds = {parameter.kind for parameter in signature(built.module.forward).parameters.values()}
    return (shapes,) if Parameter.VAR_POSITIONAL in kinds else shapes


def save_program(built: Built, columns: Mapping[str, np.ndarray], outputs: Sequence[str], path: Path) -> None:
    """Write the module as a graph of PyTorch's operators, which a host without the library can compile.

    Nothing is written of a module that `torch.export` cannot follow, such as one with loops over data.

    Args:
        built: In evaluation mode.
        columns: Rows to trace with.
        outputs: Names in the exported model, in order.
        path: A pickle of ``program`` (takes tensors in the order of ``inputs``, returns a tuple), ``inputs``,
            ``outputs``, and ``columns`` of each input.
    """
    example = feed(built.inputs, columns, np.arange(EXPORT_ROWS))
    try:
        exported = torch.export.export(
            built.module, example, dynamic_shapes=_batch_axes(built, example, minimum=2), strict=False
        )
    except Exception as error:
        print(f"no program: {str(error)[:200]}", flush=True)
        return
    program = exported.module(check_guards=False)
    for node in program.graph.find_nodes(
        op="call_function", target=torch.ops.aten._assert_tensor_metadata.default
    ):
        program.graph.erase_node(node)
    program.graph.set_codegen(torch.fx.CodeGen())
    # What else the exported module holds cannot be pickled.
    program = torch.fx.GraphModule(program, program.graph)
    # A reader traces the code again, by the tracer that is named here.
    program._tracer_cls = None
    saved = {
        "program": program,
        "inputs": [one.name for one in built.inputs],
        "outputs": list(outputs),
        "columns": {one.name: list(one.columns) for one in built.inputs},
    }
    torch.save(saved, path)

"""Rankers of DeepCTR-Torch. Its models take one matrix of ids and numbers, and cut it themselves."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.ctr_models import Columns, import_library
from benchmarks.public_rankers.catalog import Inputs
from benchmarks.public_rankers.modeling import Built, Input
from benchmarks.public_rankers.rows import LENGTH, Rows
from loka_onnx.core.artifact import OutputKind

WIDTH = 16


class FromMatrix(nn.Module):
    """A model with its outputs each by itself; the library joins them in one matrix.

    Args:
        model: Of the library.
        tasks: How many outputs.
    """

    def __init__(self, model: nn.Module, tasks: int) -> None:
        super().__init__()
        self.model = model
        self.tasks = tasks

    def forward(self, matrix: Tensor) -> tuple[Tensor, ...]:
        """(batch, 1) of each task.

        The library wants one float matrix. Ids that come as integers stay so (`Columns`).
        """
        if not matrix.is_floating_point():
            matrix = Columns(matrix, torch.zeros(matrix.shape[0], 0))
        output = self.model(matrix)
        return tuple(output[:, task : task + 1] for task in range(self.tasks))


def build_deepctr(model: str, rows: Rows, inputs: Inputs, library: Path) -> Built:
    """An untrained model with the sizes that the library has by default.

    Args:
        model: Class of the library.
        rows: Sizes of the tables.
        inputs: `MIXED` for ids and numbers in one float matrix; ids alone otherwise.
        library: Where it is installed.
    """
    models: Any = import_library(library)
    kinds = importlib.import_module("deepctr_torch.inputs")
    columns = [kinds.SparseFeat(name, size, WIDTH) for name, size in rows.categorical.items()]
    names = list(rows.categorical)
    outputs = {"ctr": OutputKind.PROBABILITY}
    if model == "DIN":
        columns = [one for one in columns if one.name != "item_id"]
        items = rows.categorical["item_id"] + 1
        columns.append(kinds.SparseFeat("item", items, WIDTH))
        history = kinds.SparseFeat("hist_item", items, WIDTH, embedding_name="item")
        columns += [kinds.VarLenSparseFeat(history, LENGTH, length_name="history_length")]
        names = [one.name for one in columns[:-1]] + ["history", "history_length"]
    if inputs is Inputs.MIXED:
        columns += [kinds.DenseFeat(name, 1) for name in rows.numeric]
        names += rows.numeric
    if model == "DIN":
        module: nn.Module = models.DIN(columns, ["item"], att_weight_normalization=True)
    elif model == "PNN":
        module = models.PNN(columns, use_outter=True)
    elif model == "MMOE":
        multi = importlib.import_module("deepctr_torch.models.multitask")
        module = multi.MMOE(columns, task_types=("binary",) * 2, task_names=("ctr", "ctcvr"))
        outputs["ctcvr"] = OutputKind.PROBABILITY
    else:
        module = getattr(models, model)(columns, columns)
    dtype = "float32" if inputs is Inputs.MIXED else "int64"
    fed = ("ids",) if inputs is Inputs.LIST else tuple(names)
    return Built(FromMatrix(module, len(outputs)), (Input("matrix", fed, dtype),), outputs)

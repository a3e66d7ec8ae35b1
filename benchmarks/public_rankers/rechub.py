"""Rankers of Torch-RecHub. Its models take a mapping of features; an ONNX file has an input for each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from benchmarks.public_rankers.modeling import Built, Input
from benchmarks.public_rankers.rows import LENGTH, Rows
from loka_onnx.core.artifact import OutputKind

WIDTH = 16


class ByName(nn.Module):
    """A model that takes a mapping, behind positional inputs; the exporters take no mapping.

    Args:
        model: Of the library.
        names: Of its features, in the order of the inputs.
        tasks: Columns of the model's output that are returned, each by itself; empty for the output.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...], tasks: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.model = model
        self.names = names
        self.tasks = tasks

    def forward(self, *features: Tensor) -> Tensor | tuple[Tensor, ...]:
        """(batch,) or (batch, 1) of each output."""
        output = self.model(dict(zip(self.names, features, strict=True)))
        if isinstance(output, tuple):  # DIEN: its auxiliary loss
            output = output[0]
        return tuple(output[:, task : task + 1] for task in self.tasks) if self.tasks else output


class Features:
    """Feature objects of the library for the rows' columns."""

    def __init__(self, rows: Rows) -> None:
        from torch_rechub.basic.features import DenseFeature, SequenceFeature, SparseFeature

        self.dense = [DenseFeature(name) for name in rows.numeric]
        self.sparse = [SparseFeature(name, size, WIDTH) for name, size in rows.categorical.items()]
        self.by_name = {feature.name: feature for feature in self.sparse}
        items, genres = rows.categorical["item_id"] + 1, rows.categorical["genre1"] + 1
        self.profile = [f for f in self.sparse if f.name not in ("item_id", "genre1")]
        self.target = [
            SparseFeature("item", items, WIDTH, padding_idx=0),
            SparseFeature("item_genre", genres, WIDTH, padding_idx=0),
        ]
        self.history = [
            SequenceFeature("history", items, WIDTH, pooling="concat", shared_with="item", padding_idx=0),
            SequenceFeature(
                "history_genre", genres, WIDTH, pooling="concat", shared_with="item_genre", padding_idx=0
            ),
        ]
        # DIEN's auxiliary loss compares each step with an item that was not taken: the history reversed
        # stands for one, because the rows hold none.
        self.other = [
            SequenceFeature("other", items, WIDTH, pooling="concat", shared_with="item", padding_idx=0),
        ]


def build_rechub(model: str, rows: Rows) -> Built:
    """An untrained model.

    Args:
        model: Class of the library.
        rows: Sizes of the tables.
    """
    module, used, tasks = _BUILDERS[model](Features(rows))
    names = tuple(dict.fromkeys(feature.name for feature in used))
    inputs = tuple(
        Input(name, (_COLUMNS.get(name, name),), "float32" if name in rows.numeric else "int64")
        for name in names
    )

    def own(path: Path, example: tuple[Tensor, ...]) -> None:
        from torch_rechub.utils.onnx_export import ONNXExporter

        by_name = dict(zip(names, example, strict=True))
        ONNXExporter(module).export(str(path), dummy_input=by_name, seq_length=LENGTH)

    kinds = dict.fromkeys(("ctr", "ctcvr") if tasks else ("ctr",), OutputKind.PROBABILITY)
    return Built(ByName(module, names, tasks), inputs, kinds, own)


Made = tuple[Any, list[Any], tuple[int, ...]]
"""A model, the features that it reads, and the columns of its output that are tasks (none: all of it)."""
_COLUMNS = {"other": "history_reversed"}


def _deepfm(f: Features) -> Made:
    from torch_rechub.models.ranking import DeepFM

    return DeepFM(f.dense + f.sparse, f.sparse, dict(_MLP)), f.dense + f.sparse, ()


def _dcnv2(f: Features) -> Made:
    from torch_rechub.models.ranking import DCNv2

    return DCNv2(f.dense + f.sparse, n_cross_layers=3, mlp_params=dict(_MLP)), f.dense + f.sparse, ()


def _edcn(f: Features) -> Made:
    from torch_rechub.models.ranking import EDCN

    made = EDCN(f.sparse, n_cross_layers=3, mlp_params={"dropout": 0.2, "activation": "relu"})
    return made, f.sparse, ()


def _autoint(f: Features) -> Made:
    from torch_rechub.models.ranking import AutoInt

    return AutoInt(f.sparse, f.dense, mlp_params=dict(_MLP)), f.sparse + f.dense, ()


def _fibinet(f: Features) -> Made:
    from torch_rechub.models.ranking import FiBiNet

    return FiBiNet(f.sparse, dict(_MLP)), f.sparse, ()


def _fatdeepffm(f: Features) -> Made:
    from torch_rechub.basic.features import SparseFeature
    from torch_rechub.models.ranking import FatDeepFFM

    linear = [SparseFeature(one.name, one.vocab_size, 1) for one in f.sparse]
    crossed = [SparseFeature(one.name, one.vocab_size * len(f.sparse), WIDTH) for one in f.sparse]
    made = FatDeepFFM(linear, crossed, embed_dim=WIDTH, reduction_ratio=1, mlp_params=dict(_MLP))
    return made, f.sparse, ()


def _din(f: Features) -> Made:
    from torch_rechub.models.ranking import DIN

    made = DIN(f.profile, f.history, f.target, {"dims": [256, 128]}, {"dims": [64, 32]})
    return made, f.profile + f.history + f.target, ()


def _bst(f: Features) -> Made:
    from torch_rechub.models.ranking import BST

    made = BST(f.profile, f.history, f.target, {"dims": [256, 128]}, nhead=4, max_seq_len=LENGTH + 1)
    return made, f.profile + f.history + f.target, ()


def _dien(f: Features) -> Made:
    from torch_rechub.models.ranking import DIEN

    made = DIEN(f.profile, f.history[:1], f.other, f.target[:1], {"dims": [256, 128]})
    return made, f.profile + f.history[:1] + f.other + f.target[:1], ()


def _mmoe(f: Features) -> Made:
    from torch_rechub.models.multi_task import MMOE

    towers = [{"dims": [64]}] * 2
    made = MMOE(f.dense + f.sparse, ["classification"] * 2, 8, {"dims": [128, 64]}, towers)
    return made, f.dense + f.sparse, (0, 1)


def _ple(f: Features) -> Made:
    from torch_rechub.models.multi_task import PLE

    towers = [{"dims": [64]}] * 2
    made = PLE(f.dense + f.sparse, ["classification"] * 2, 2, 2, 1, {"dims": [128, 64]}, towers)
    return made, f.dense + f.sparse, (0, 1)


def _esmm(f: Features) -> Made:
    from torch_rechub.models.multi_task import ESMM

    users = f.sparse[:5]
    made = ESMM(users, f.sparse[5:], {"dims": [128, 64]}, {"dims": [128, 64]})
    return made, f.sparse, (1, 2)


_MLP = {"dims": [256, 128], "dropout": 0.2, "activation": "relu"}
_BUILDERS: dict[str, Callable[[Features], Made]] = {
    "DeepFM": _deepfm,
    "DCNv2": _dcnv2,
    "EDCN": _edcn,
    "AutoInt": _autoint,
    "FiBiNet": _fibinet,
    "FatDeepFFM": _fatdeepffm,
    "DIN": _din,
    "BST": _bst,
    "DIEN": _dien,
    "MMOE": _mmoe,
    "PLE": _ple,
    "ESMM": _esmm,
}

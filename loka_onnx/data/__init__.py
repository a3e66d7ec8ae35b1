"""Rows on disk as batches: binding of columns to model inputs, checks and splits."""

from loka_onnx.data.batch import Batch, InputBinding
from loka_onnx.data.dataset import Dataset
from loka_onnx.data.selection import HashRows, RowRange, RowSelection
from loka_onnx.data.splits import SplitRule, Splits, ensure_disjoint, open_dataset, split_file

__all__ = [
    "Batch",
    "Dataset",
    "HashRows",
    "InputBinding",
    "RowRange",
    "RowSelection",
    "SplitRule",
    "Splits",
    "ensure_disjoint",
    "open_dataset",
    "split_file",
]

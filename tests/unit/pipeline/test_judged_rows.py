"""Requests that engines are judged by."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from loka_onnx.data import InputBinding, open_dataset
from loka_onnx.pipeline.steps import JUDGED_ROWS, Steps

ROWS = 10_250


@pytest.mark.parametrize("largest", [100, 10_000])
def test_no_request_is_larger_than_what_engines_were_built_for(tmp_path: Path, largest: int) -> None:
    np.savez(tmp_path / "rows.npz", x=np.arange(ROWS, dtype=np.float32))
    data = open_dataset(
        tmp_path / "rows.npz", (InputBinding("x", ("x",), "float32", 1),), (), None, frozenset()
    )
    steps = object.__new__(Steps)
    steps.config = SimpleNamespace(  # type: ignore[assignment] - what is read of a run file
        batch=SimpleNamespace(max=largest), columns=(), data=SimpleNamespace(group=None, slices=())
    )
    steps.looks = 1
    steps.__dict__["splits"] = SimpleNamespace(selection=data, certification=data)
    splits = steps._judged_splits()
    assert [split.name for split in splits] == ["selection", "certification"]
    for split in splits:
        sizes = [batch.rows for batch in split.batches()]
        assert sum(sizes) == ROWS
        assert max(sizes) == min(largest, JUDGED_ROWS)

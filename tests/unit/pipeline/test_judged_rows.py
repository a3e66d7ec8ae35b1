"""Requests that engines are judged by."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from loka_onnx.core.rewrite import Part
from loka_onnx.data import InputBinding, open_dataset
from loka_onnx.errors import EngineError
from loka_onnx.evaluation.engines import REQUEST_ROWS
from loka_onnx.pipeline.context import Context
from loka_onnx.pipeline.judging import Judging

ROWS = 10_250


class Strict:
    """An engine that refuses what it was not built for, as compiled ones do."""

    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, most

    def __enter__(self) -> Strict:
        return self

    def __exit__(self, *error: object) -> None: ...

    def run(self, inputs: dict[str, Any]) -> dict[str, Any]:
        if not self.least <= len(inputs["x"]) <= self.most:
            raise EngineError(f"{len(inputs['x'])} rows")
        return {"y": 2 * inputs["x"]}


# 10 250 rows end with a request of 50, of 50 again, of 10, of 250, and of 1 250.
@pytest.mark.parametrize(
    ("least", "largest"), [(1, 100), (64, 100), (64, 10_000), (2_500, 4_096), (9_000, 9_000)]
)
def test_engines_are_asked_for_what_they_were_built_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: int, largest: int
) -> None:
    np.savez(tmp_path / "rows.npz", x=np.arange(ROWS, dtype=np.float32))
    data = open_dataset(
        tmp_path / "rows.npz", (InputBinding("x", ("x",), "float32", 1),), (), None, frozenset()
    )
    config: Any = SimpleNamespace(
        batch=SimpleNamespace(min=least, max=largest),
        columns=(),
        data=SimpleNamespace(group=None, slices=()),
        threads=1,
    )
    context = Context(config, cast(Any, None), exported=cast(Any, None))
    context.__dict__["splits"] = SimpleNamespace(selection=data, certification=data)
    splits = (context.selection, context.attempt(0))
    assert [split.name for split in splits] == ["selection", "certification"]
    judging = Judging(context, None)
    monkeypatch.setattr(Judging, "open_alone", lambda self, engine: Strict(least, largest))
    for split in splits:
        with ExitStack() as stack:
            run = judging.open_engine(SimpleNamespace(part=Part.WHOLE), stack)  # type: ignore[arg-type]
            found = [run(batch.inputs)["y"] for batch in split.batches()]
        np.testing.assert_array_equal(np.concatenate(found), 2 * np.arange(ROWS))
        assert max(map(len, found)) == max(least, min(largest, REQUEST_ROWS))

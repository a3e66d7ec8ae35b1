"""Dynamic axes besides the batch: where a column has one width in all rows of the data, it is that number."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from onnx.reference import ReferenceEvaluator
from onnx_text import parsed
from small_configs import config_of

from loka_onnx.core.artifact import ModelArtifact, OutputSpec
from loka_onnx.core.manifest import BatchRange
from loka_onnx.errors import DataError
from loka_onnx.export.onnx_model import import_onnx
from loka_onnx.graph.entry import open_inputs
from loka_onnx.graph.model import GraphModel, shape_of
from loka_onnx.pipeline.accepting import export_model
from loka_onnx.pipeline.rows import fixed_widths
from loka_onnx.runtime.requests import RequestSpec
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions

# A mean over a history whose length is read from the history, beside scores of as many positions.
BODY = """rows = Gather(table, history)
    tall = Unsqueeze(weight, last)
    scaled = Mul(rows, tall)
    pooled = ReduceSum<keepdims=0>(scaled, middle)
    shape = Shape<start=1, end=2>(history)
    length = Cast<to=1>(shape)
    mean = Div(pooled, length)
    flat = MatMul(dense, w)
    out = Add(mean, flat)
    scores = Sigmoid(weight)"""
OUTPUTS = (OutputSpec("out", "logit", "clicked"),)
SPLITS = ("calibration", "selection", "certification")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    constants = {name: generator.normal(size=shape) for name, shape in (("table", (9, 4)), ("w", (3, 4)))}
    proto = parsed(
        BODY,
        constants | {"last": np.array([-1]), "middle": np.array([1])},
        inputs="int64[n, L] history, float[n, L] weight, float[n, M] dense",
        outputs="float[n, 4] out, float[n, L] scores",
    )
    onnx.save(proto, tmp_path / "ranker.onnx")
    return tmp_path


def write(path: Path, history: Any, weight: Any) -> None:
    columns = {"history": history, "weight": weight}
    pq.write_table(pa.table({**columns, **{n: np.arange(6.0) for n in "abc"}, "clicked": [0, 1] * 3}), path)


def lists(*lengths: int) -> pa.Array:
    return pa.array([[*range(n)] for n in lengths], pa.list_(pa.int64()))


def fixed(width: int) -> pa.Array:
    return pa.array([[*range(width)]] * 6, pa.list_(pa.int64(), width))


def widths_in(place: Path, *files: tuple[Any, Any]) -> dict[str, int]:
    for index, columns in enumerate(files):
        write(place / f"{index}.parquet", *columns)
    names = (f"{index % len(files)}.parquet" for index in range(3))
    data = dict(zip(SPLITS, names, strict=True))
    config = config_of(place, data={**data, "inputs": {"dense": ["a", "b", "c"]}})
    return fixed_widths(config, open_inputs(place / "ranker.onnx"))


def request(width: int) -> dict[str, Any]:
    generator = np.random.default_rng(width)
    return {
        "history": generator.integers(0, 9, (5, width)),
        "weight": generator.normal(size=(5, width)).astype(np.float32),
        "dense": generator.normal(size=(5, 3)).astype(np.float32),
    }


@pytest.mark.parametrize("history", [fixed(4), lists(*[4] * 6)], ids=["stated", "read"])
def test_one_width_in_all_rows_is_the_width(place: Path, history: Any) -> None:
    assert widths_in(place, (history, fixed(4))) == {"history": 4, "weight": 4, "dense": 3}


@pytest.mark.parametrize(
    "files",
    [
        [(lists(4, 4, 3, 4, 4, 4), fixed(4))],
        [(lists(*[4] * 6), fixed(4)), (lists(*[5] * 6), fixed(4))],
        [(lists(0, 0, 0, 0, 0, 0), fixed(4))],
        [(pa.array([[1, 2, 3, 4]] * 5 + [None], pa.list_(pa.int64())), fixed(4))],
    ],
    ids=["in a file", "between files", "empty", "null"],
)
def test_several_widths_leave_the_axis_as_it_is(place: Path, files: Any) -> None:
    assert widths_in(place, *files) == {"weight": 4, "dense": 3}


def test_other_symbols_follow_and_answers_stay(place: Path) -> None:
    source = place / "ranker.onnx"
    open_ = import_onnx(source, place / "open.onnx", OUTPUTS)
    closed = import_onnx(
        source, place / "closed.onnx", OUTPUTS, widths={"history": 4, "weight": 4, "dense": 3}
    )
    assert [spec.shape for spec in open_.inputs] == [(None, None)] * 3
    assert [spec.shape for spec in closed.inputs] == [(None, 4), (None, 4), (None, 3)]
    assert [spec.shape for spec in closed.outputs] == [(None, 4), (None, 4)]
    assert [note.partition(" fixed to ")[0] for note in closed.notes if " fixed to " in note] == [
        "axis 1 of 'dense'",
        "axis 1 of 'history', 'weight'",
    ]
    exact = ReferenceEvaluator(onnx.load(source)).run(None, request(4))
    answers = OnnxSession(closed.path, SessionOptions(threads=1)).run(request(4))
    for found, wanted in zip(answers.values(), exact, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_symbol_of_two_widths_is_left_where_it_is_not_an_input(place: Path) -> None:
    closed = import_onnx(place / "ranker.onnx", place / "c.onnx", OUTPUTS, widths={"history": 4})
    assert [spec.shape for spec in closed.inputs] == [(None, 4), (None, None), (None, None)]
    model = GraphModel.load(closed.path)
    assert shape_of(model.outputs[1])[1] == "L"


def test_a_run_imports_with_the_width_and_requests_of_another_are_refused(place: Path) -> None:
    write(place / "rows.parquet", fixed(4), fixed(4))
    config = config_of(
        place, data={**dict.fromkeys(SPLITS, "rows.parquet"), "inputs": {"dense": ["a", "b", "c"]}}
    )
    made: list[Any] = []

    def document(stage: Any, reads: Any, make: Any) -> ModelArtifact:
        made.append(reads["widths"])
        return cast(ModelArtifact, make())

    settings = SimpleNamespace(
        config=config,
        specs=OUTPUTS,
        outputs_without_limits=[],
        path=lambda name: place / Path(name).name,
        directory=SimpleNamespace(document=document),
    )
    exported = export_model(cast(Any, settings))
    # Data of another width are another import.
    assert made == [{"history": 4, "weight": 4, "dense": 3}]
    layout = RequestSpec(exported.inputs, BatchRange(1, 8), "model")
    assert layout.rows_of(request(4)) == 5
    with pytest.raises(DataError) as caught:
        layout.rows_of({**request(4), "history": request(5)["history"]})
    assert caught.value.code == "E1317"

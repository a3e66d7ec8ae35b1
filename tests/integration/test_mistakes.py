"""Mistakes of new users: each is refused with its code in seconds, before calibration begins.

``python tests/integration/test_mistakes.py`` prints the table: the mistake, exit code, error codes, seconds.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from synthetic_runs import (
    ROWS,
    RUN_VALUES,
    Command,
    Workplace,
    make_columns,
    make_workplace,
    tree,
    write_rows,
)

LIMIT_SECONDS = 10.0
NOWHERE = {"device": "amd-mi300x", "backends": ["migraphx"]}
CTR = {"name": "ctr", "kind": "logit", "label": "clicked"}
Spoil = Callable[[Workplace], object]


def run_file(**changes: Any) -> Spoil:
    return lambda place: place.write_run_file(**changes)


def output(**changes: Any) -> Spoil:
    return run_file(outputs=[{**CTR, **changes}])


def target(**changes: Any) -> Spoil:
    return run_file(targets=[{"device": "cpu", "backends": ["onnxruntime"], **changes}])


def data(**changes: Any) -> Spoil:
    return run_file(data=changes)


def rows(count: int = 400, **changes: Callable[[np.ndarray], Any]) -> Spoil:
    def spoil(place: Workplace) -> None:
        columns: dict[str, Any] = make_columns(count)
        write_rows(place.path / "rows.parquet", columns | {n: f(columns[n]) for n, f in changes.items()})

    return spoil


def model(change: Callable[[onnx.ModelProto], None]) -> Spoil:
    def spoil(place: Workplace) -> None:
        written = onnx.load(place.path / "ranker.onnx")
        change(written)
        onnx.save(written, os.fspath(place.path / "ranker.onnx"))

    return spoil


def node(written: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(each for each in written.graph.node if each.name == name)


def bare_squeeze(written: onnx.ModelProto) -> None:
    """`.squeeze()` without an axis: a batch of one row loses its batch axis."""
    del node(written, "squeeze0").input[1]


def static_batch(written: onnx.ModelProto) -> None:
    for value in (*written.graph.input, *written.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 64


def in_a_loop(written: onnx.ModelProto) -> None:
    """Every product in the body of a loop."""
    graph = written.graph
    inner = [each for each in graph.node if each.name.startswith(("fc", "relu", "heads"))]
    body = h.make_graph(
        [*inner, h.make_node("Identity", ["keep"], ["kept"])],
        "body",
        [h.make_tensor_value_info("i", T.INT64, []), h.make_tensor_value_info("keep", T.BOOL, [])],
        [h.make_tensor_value_info("kept", T.BOOL, []), h.make_tensor_value_info("scores", T.FLOAT, None)],
    )
    loop = h.make_node("Loop", ["one_trip", ""], ["stacked"], "steps", body=body)
    out = h.make_node("Squeeze", ["stacked", "first"], ["scores_1"], "unstack")
    rest = [each for each in graph.node if each not in inner]
    node(written, "split").input[0] = "scores_1"
    place = next(i for i, each in enumerate(rest) if each.name == "split")
    del graph.node[:]
    graph.node.extend([*rest[:place], loop, out, *rest[place:]])
    for name, value in {"one_trip": np.array(1), "first": np.array([0])}.items():
        graph.initializer.append(onnx.numpy_helper.from_array(value, name))


def gives_nan(written: onnx.ModelProto) -> None:
    """A logarithm of an activation that may be negative."""
    node(written, "relu2").op_type = "Log"


def random_rows(written: onnx.ModelProto) -> None:
    """Dropout in training mode: the model was exported without `eval()`."""
    dropout = node(written, "relu2")
    dropout.op_type = "Dropout"
    dropout.input.extend(["half", "training"])
    for name, value in {"half": np.array(0.5, np.float32), "training": np.array(True)}.items():
        written.graph.initializer.append(onnx.numpy_helper.from_array(value, name))


def csv(place: Workplace) -> None:
    (place.path / "rows.csv").write_text("d0,clicked\n1,0\n")
    data(path="rows.csv")(place)


def truncated(name: str) -> Spoil:
    def spoil(place: Workplace) -> None:
        file = place.path / name
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    return spoil


def unwritable(place: Workplace) -> None:
    (place.path / "file").write_text("mine")
    run_file(output="file/run")(place)


def output_exists(place: Workplace) -> None:
    (place.path / "mine").mkdir()
    (place.path / "mine" / "thesis.txt").write_text("ten years of work")
    run_file(output="mine")(place)


def duplicate_columns(place: Workplace) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = make_columns(400)
    names = [*columns, "d3"]
    arrays = [pa.array(columns[name]) for name in names]
    pq.write_table(pa.Table.from_arrays(arrays, names=names), place.path / "rows.parquet")


def nulls(column: np.ndarray) -> list[Any]:
    return [None, *column[1:].tolist()]


MISTAKES: dict[str, tuple[Spoil, str]] = {
    # The run file
    "a mistyped key": (run_file(bacth={"max": 8}), "E0114"),
    "a missing key": (run_file(outputs=[{"name": "ctr", "label": "clicked"}]), "E0116"),
    "budget: 5": (output(budget=5), "E0113"),
    'budget: "0.02%"': (output(budget="0.02%"), "E0113"),
    "no targets": (run_file(targets=[]), "E0113"),
    "device: h100": (target(device="h100", backends=["inductor"]), "E0801"),
    "backends: [onnxruntimes]": (target(backends=["onnxruntimes"]), "E0113"),
    "a backend that has nothing for the device": (target(backends=["tensorrt"]), "E0801"),
    "an option that the backend lacks": (target(options={"onnxruntime": {"statik": 1}}), "E0807"),
    "a served batch above batch.max": (run_file(batch={"serve": [4096]}), "E0115"),
    "mods.skip names no mod": (run_file(mods={"skip": ["smoothing"]}), "E1520"),
    # Files
    "a missing run file": (lambda place: place.run_file.unlink(), "E0101"),
    "a missing data file": (lambda place: (place.path / "rows.parquet").unlink(), "E0105"),
    "a CSV file": (csv, "E0220"),
    "a Parquet file cut short": (truncated("rows.parquet"), "E0222"),
    "a model cut short": (truncated("ranker.onnx"), "E0312"),
    "the output cannot be made": (unwritable, "E1501"),
    "the output holds other files": (output_exists, "E1504"),
    # The model
    "a bare .squeeze()": (model(bare_squeeze), "E0409"),
    "a static batch": (model(static_batch), "E0408"),
    "every product in a loop": (model(in_a_loop), "E0406"),
    "an output of NaN": (model(gives_nan), "E0409"),
    "exported without eval()": (model(random_rows), "E0409"),
    "an output that the model lacks": (output(name="crt"), "E0407"),
    "an input that the model lacks": (data(inputs={**RUN_VALUES["data"]["inputs"], "x": "d0"}), "E1526"),
    "too few columns for an input": (data(inputs={"dense": ["d0", "d1"], "item": "item_id"}), "E1529"),
    "a logit declared a probability": (output(kind="probability"), "E1018"),
    # Rows
    "a column that the file lacks": (output(label="click"), "E0211"),
    "a group that the file lacks": (data(group="user"), "E0211"),
    "text given to an input": (rows(d3=lambda c: ["young"] * len(c)), "E0210"),
    "fractions given as ids": (rows(item_id=lambda c: c + 0.5), "E0205"),
    "ids outside the table": (rows(item_id=lambda c: c + 40), "E0205"),
    "NaN in a feature": (rows(amount=lambda c: np.where(c > 0, np.nan, c)), "E0205"),
    "null labels": (rows(clicked=nulls), "E0205"),
    "labels of 1 and 2": (rows(clicked=lambda c: c + 1), "E1010"),
    "labels of one class": (rows(clicked=np.zeros_like), "E1534"),
    "two columns of one name": (duplicate_columns, "E0221"),
    "no rows": (rows(0), "E0207"),
    "three rows": (rows(3), "E0216"),
}


def codes(message: str) -> list[str]:
    return re.findall(r"^  code: (E\d{4})$", message, re.M)


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_refused_in_seconds_before_calibration(place: Workplace, command: Command, case: str):
    spoil, code = MISTAKES[case]
    spoil(place)
    began = time.process_time()
    done = command("run", place.run_file)
    seconds = time.process_time() - began
    assert (done.code, codes(done.err)) == (2, [code]), done.err
    assert "calibrate" not in done.err and "\n  remedy: " in done.err
    assert seconds < LIMIT_SECONDS


def test_everything_wrong_is_told_at_once(place: Workplace, command: Command):
    rows(item_id=lambda c: c + 40, amount=lambda c: np.where(c > 0, np.nan, c))(place)
    model(bare_squeeze)(place)
    target(device="h100", backends=["inductor"])(place)
    done = command("doctor", place.run_file, "--set", "mods.skip=[smoothing]")
    assert (done.code, done.out) == (2, "")
    assert sorted(codes(done.err)) == ["E0205", "E0205", "E0409", "E0801", "E1520"]
    assert "did you mean 'nvidia-h100'?" in done.err


def test_keys_of_a_run_file_are_told_at_once(place: Workplace, command: Command):
    run_file(bacth={"max": 8}, outputs=[{**CTR, "budget": 5}], threads="two")(place)
    done = command("run", place.run_file)
    assert (done.code, codes(done.err)) == (2, ["E0114", "E0113", "E0113"])


def test_doctor_tells_what_to_expect_and_leaves_nothing(place: Workplace, command: Command):
    output(budget=0.05)(place)
    before = tree(place.path)
    done = command("doctor", place.run_file, "--json")
    told = json.loads(done.out)
    assert done.code == 0 and tree(place.path) == before
    assert sum(told["rows"].values()) == ROWS
    assert told["engines"] == {"cpu, onnxruntime (cpu)": ""}
    assert {"calibrate", "ladder", "evaluate"} <= told["outlook"]["seconds"].keys()
    assert "`budget: 0.05` is 5.000% of the loss" in told["outlook"]["advice"][0]
    assert "about" in command("doctor", place.run_file).out


def test_outputs_that_low_precision_changes_unjudged_are_named(place: Workplace, command: Command):
    def expose(written: onnx.ModelProto) -> None:
        hidden = next(each for each in written.graph.node if each.name.startswith("relu")).output[0]
        copied = written.graph.input[0].name
        for name, source in (("hidden", hidden), ("copied", copied)):
            written.graph.node.append(h.make_node("Identity", [source], [name]))
            kind = written.graph.input[0].type.tensor_type.elem_type if name == "copied" else T.FLOAT
            written.graph.output.append(h.make_tensor_value_info(name, kind, None))

    model(expose)(place)
    told = json.loads(command("doctor", place.run_file, "--json").out)["outlook"]["advice"]
    assert [("'hidden'" in each, "'copied'" in each) for each in told if "not under" in each] == [
        (True, False)
    ]


@pytest.mark.slow
def test_too_few_rows_for_a_budget_are_told(place: Workplace, command: Command):
    output(budget=0.00001)(place)
    few = json.loads(command("doctor", place.run_file, "--json").out)["outlook"]["advice"]
    assert "certification rows" in few[0]
    assert "certification rows" in command("export", place.run_file).err + command("plan", place.run_file).err


@pytest.mark.slow
def test_a_target_without_an_engine_ends_the_run_before_evaluation(place: Workplace, command: Command):
    run_file(build={"jobs": False}, plan={"plans": ["fp32"]}, targets=[NOWHERE])(place)
    done = command("run", place.run_file)
    assert (done.code, codes(done.err)) == (1, ["E0702"])
    assert "✓ build" in done.err and "✓ evaluate" not in done.err


def main() -> None:
    """Print the table."""
    from loka_onnx.cli.main import main as loka_onnx

    print(f"{'mistake':<45} exit  codes        seconds")
    for case, (spoil, _) in MISTAKES.items():
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()) as said:
            place, code = make_workplace(Path(folder) / "work"), 0
            spoil(place)
            began = time.perf_counter()
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    loka_onnx(["run", str(place.run_file)])
            except SystemExit as ended:
                code = int(ended.code or 0)
            seconds = time.perf_counter() - began
        stage = " AFTER CALIBRATION" if "calibrate" in said.getvalue() else ""
        found = ", ".join(codes(said.getvalue()))
        print(f"{case:<45} {code:<5} {found:<12} {seconds:.2f}{stage}", flush=True)
        if "-v" in sys.argv:
            print(said.getvalue())


if __name__ == "__main__":
    main()

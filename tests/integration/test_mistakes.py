"""Mistakes of new users: each is refused with its code in seconds, before calibration begins."""

import json
import os
import re
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
    tree,
    write_ranker,
    write_rows,
)

from loka_onnx.pipeline.run import RunOptions, Stage, run

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


def rows(count: int = 400, **changes: Callable[[np.ndarray], Any] | None) -> Spoil:
    """Rows with columns changed, or removed where the change is None."""

    def spoil(place: Workplace) -> None:
        columns: dict[str, Any] = make_columns(count)
        changed = {n: columns[n] if f is None else f(columns[n]) for n, f in changes.items()}
        kept = {n: v for n, v in {**columns, **changed}.items() if changes.get(n, len) is not None}
        write_rows(place.path / "rows.parquet", kept)

    return spoil


def put(row: int, value: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda column: np.where(np.arange(len(column)) == row, np.asarray(value, column.dtype), column)


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


def couple_rows(written: onnx.ModelProto) -> None:
    """A Softmax over the batch."""
    softmax = node(written, "relu2")
    softmax.op_type = "Softmax"
    softmax.attribute.append(h.make_attribute("axis", 0))


def without_sites(place: Workplace) -> None:
    ends = [h.make_tensor_value_info(name, T.FLOAT, ["batch", 16]) for name in ("dense", "ctr")]
    graph = h.make_graph([h.make_node("Relu", ["dense"], ["ctr"], "relu")], "none", ends[:1], ends[1:])
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, os.fspath(place.path / "ranker.onnx"))
    place.write_run_file(outputs=[CTR])


def one_file_twice(place: Workplace) -> None:
    write_rows(place.path / "later.parquet", make_columns(400, seed=2))
    files = {"calibration": "rows.parquet", "selection": "later.parquet", "certification": "later.parquet"}
    place.write_run_file(data={"path": None, "split": None, **files})


def csv(place: Workplace) -> None:
    (place.path / "rows.csv").write_text("d0,clicked\n1,0\n")
    data(path="rows.csv")(place)


def without(name: str) -> Spoil:
    return lambda place: (place.path / name).unlink()


def truncated(name: str) -> Spoil:
    def spoil(place: Workplace) -> None:
        file = place.path / name
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    return spoil


def duplicate_columns(place: Workplace) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = make_columns(400)
    names = [*columns, "d3"]
    arrays = [pa.array(columns[name]) for name in names]
    pq.write_table(pa.Table.from_arrays(arrays, names=names), place.path / "rows.parquet")


def nulls(column: np.ndarray) -> list[Any]:
    return [None, *column[1:].tolist()]


OF_ROWS = "of 'rows.parquet'"
SPLIT = "'rows.parquet hash(request, seed 0)[0.5:1.0]'"
# The mistake: its code, and for some how the message begins.
MISTAKES: dict[str, tuple[Spoil, str] | tuple[Spoil, str, str]] = {
    # The run file
    "a mistyped key": (run_file(bacth={"max": 8}), "E0114", "DIR/RUN.yaml:59: "),
    "a missing key": (run_file(outputs=[{"name": "ctr", "label": "clicked"}]), "E0116", "DIR/RUN.yaml:4: "),
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
    "a missing run file": (without("RUN.yaml"), "E0101", "DIR/RUN.yaml: "),
    "a missing data file": (
        lambda place: (place.path / "rows.parquet").unlink(),
        "E0105",
        "DIR/RUN.yaml:18: ",
    ),
    "a CSV file": (csv, "E0220"),
    "a Parquet file cut short": (truncated("rows.parquet"), "E0222"),
    "a model cut short": (truncated("ranker.onnx"), "E0312", "'DIR/ranker.onnx' "),
    # The model; others are in `tests/traps`
    "a bare .squeeze()": (model(bare_squeeze), "E0409"),
    "every product in a loop": (model(in_a_loop), "E0406"),
    "an output of NaN": (model(gives_nan), "E0409"),
    "an output that the model lacks": (output(name="crt"), "E0407", "'DIR/ranker.onnx' "),
    "an input that the model lacks": (data(inputs={**RUN_VALUES["data"]["inputs"], "x": "d0"}), "E1526"),
    "too few columns for an input": (data(inputs={"dense": ["d0", "d1"], "item": "item_id"}), "E1529"),
    "a logit declared a probability": (output(kind="probability"), "E1018", "output 'ctr' "),
    "no sites": (without_sites, "E0406", "'DIR/ranker.onnx' "),
    # Rows
    "a column that the file lacks": (output(label="click"), "E0211"),
    "an input's column that the file lacks": (rows(d3=None), "E0211", f"column 'd3' {OF_ROWS} "),
    "a group that the file lacks": (data(group="user"), "E0211"),
    "text given to an input": (rows(d3=lambda c: ["young"] * len(c)), "E0210", f"column 'd3' {OF_ROWS} "),
    "fractions given as ids": (rows(item_id=lambda c: c + 0.5), "E0205"),
    "ids outside the table": (rows(item_id=put(17, 40)), "E0205", f"column 'item_id' {OF_ROWS} "),
    "NaN in a feature": (rows(d3=put(7, np.nan)), "E0205", f"column 'd3' {OF_ROWS} "),
    "NaN in a label": (rows(amount=lambda c: np.where(c > 0, np.nan, c)), "E0205"),
    "infinity": (rows(amount=put(7, np.inf)), "E0205", f"column 'amount' {OF_ROWS} "),
    "a negative weight": (rows(importance=put(3, -2.0)), "E1010", f"{SPLIT}: column 'importance' "),
    "null labels": (rows(clicked=nulls), "E0205"),
    "a label of 2": (rows(clicked=put(3, 2.0)), "E1010", f"{SPLIT}: column 'clicked' "),
    "labels of one class": (rows(clicked=np.zeros_like), "E1534"),
    "two columns of one name": (duplicate_columns, "E0221"),
    "no rows": (rows(0), "E0207", "DIR/rows.parquet: "),
    "three rows": (rows(3), "E0216"),
    "one file for two splits": (one_file_twice, "E0231", "data: "),
}


def codes(message: str) -> list[str]:
    return re.findall(r"^  code: (E\d{4})$", message, re.M)


def refusal(command: Command, place: Workplace, *options: object) -> str:
    """The message of a run that must be refused without a trace, with its directory shortened to DIR."""
    before = tree(place.path)
    done = command("run", place.run_file, *options)
    assert (done.code, done.out) == (2, "")
    assert tree(place.path) == before
    assert "calibrate" not in done.err and "Traceback" not in done.err
    assert "\n  evidence: " in done.err and "\n  remedy: " in done.err
    return done.err.replace(str(place.path), "DIR")


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_refused_in_seconds_before_calibration(place: Workplace, command: Command, case: str):
    spoil, code, *begins = MISTAKES[case]
    spoil(place)
    began = time.process_time()
    message = refusal(command, place)
    seconds = time.process_time() - began
    assert codes(message) == [code]
    assert all(f"error: {each}" in message for each in begins), message
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


@pytest.mark.parametrize(
    ("setting", "begins", "near"),
    [
        ("outputs.0.label=click", f"column 'click' {OF_ROWS}", "is 'clicked'"),
        ("outputs.1.weight=imp", f"column 'imp' {OF_ROWS}", "is '"),
        ("data.group=request_id", f"column 'request_id' {OF_ROWS}", "is '"),
        ("data.slices=[d33]", f"column 'd33' {OF_ROWS}", "are 'd3', 'd13'"),
        ("plan.keep=[heds]", "plan.keep: pattern 'heds' matches no site and no node", "is 'heads'"),
        ("plan.force=[heds]", "plan.force: pattern 'heds' matches no site", "is 'heads'"),
    ],
)
def test_a_wrong_name_is_told_its_nearest(place, command, setting, begins, near):
    message = refusal(command, place, "--quiet", "--set", setting)
    assert message.startswith(f"error: {begins}") and "the nearest of " in message and near in message


@pytest.mark.slow
def test_a_model_that_couples_rows_goes_on_where_that_is_asked_for(place, command):
    model(couple_rows)(place)
    done = command("doctor", "--model", place.path / "ranker.onnx")
    assert "✗ node 'relu2/softmax' (Softmax) couples the rows of a batch" in done.out
    place.write_run_file(model={"require_independent_rows": False})
    result = run(place.run_file, RunOptions(until=Stage.REPORT))
    (note,) = (note for note in result.report.notes if "node 'relu2/softmax' (Softmax)" in note)
    assert "`model.require_independent_rows` is false" in note


# The output directory ------------------------------------------------------------------------------


# A mode of 0o555 would not stop root; /proc stops everyone.
@pytest.mark.parametrize("output", ["out", "out/run", "/proc/loka-onnx/run"])
def test_a_place_where_nothing_can_be_made(place, command, output):
    (place.path / "out").write_text("mine")
    message = refusal(command, place, "--output", place.path / output)
    assert codes(message) == ["E1501"] and f"'{Path('DIR') / output}'" in message


@pytest.mark.parametrize("option", [(), ("--force",), ("--resume",)])
def test_a_directory_of_something_else_is_never_touched(place, command, option):
    (place.path / "thesis" / "data").mkdir(parents=True)
    (place.path / "thesis" / "report.html").write_text("ten years of work")
    message = refusal(command, place, "--output", place.path / "thesis", *option)
    assert codes(message) == ["E1504"] and "'DIR/thesis'" in message


def test_a_finished_run_is_neither_extended_nor_replaced_unasked(finished, command):
    done = command("run", finished.directory.parents[1] / "RUN.yaml", "--quiet")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: the output directory '{finished.directory}' is not empty\n")


def test_force_and_resume(place, command):
    assert "--force and --resume exclude each other" in refusal(command, place, "--force", "--resume")


def test_an_empty_directory_of_the_user_stays(place, command):
    (place.path / "mine").mkdir()
    rows(d3=put(7, np.nan))(place)
    refusal(command, place, "--output", place.path / "mine")


@pytest.mark.slow
def test_force_gives_the_earlier_run_back_when_the_new_input_is_wrong(place, command):
    assert command("plan", place.run_file, "--quiet").code == 0
    rows(d3=put(7, np.nan))(place)
    assert "holds NaN" in refusal(command, place, "--force")
    write_ranker(place.path / "ranker.onnx", opset=10)
    assert "uses opset 10" in refusal(command, place, "--force")


def test_debug_adds_the_traceback(place, command):
    place.run_file.unlink()
    done = command("run", place.run_file, "--debug")
    assert done.code == 2
    assert "Traceback" in done.err and done.err.endswith("writes one to start from\n  code: E0101\n")

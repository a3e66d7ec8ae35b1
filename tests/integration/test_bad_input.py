"""Every wrong input: one message with what, where, evidence and remedy; exit code 2; nothing left behind."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from synthetic_runs import (
    HIDDEN,
    RUN_VALUES,
    Command,
    Workplace,
    make_columns,
    tree,
    write_ranker,
    write_rows,
)

from loka_onnx.core import serde
from loka_onnx.core.rewrite import RewriteLog
from loka_onnx.graph.model import GraphModel
from loka_onnx.pipeline.run import RunOptions, Stage, run
from loka_onnx.transforms.base import Found
from loka_onnx.transforms.linears.pad_sites import PadSites
from loka_onnx.transforms.sequence import STRICT

CTR = {"name": "ctr", "kind": "logit", "label": "clicked"}


def refusal(command: Command, place: Workplace, *options: object) -> str:
    """The message of a run that must be refused without a trace, with its directory shortened to DIR."""
    before = tree(place.path)
    done = command("run", place.run_file, "--quiet", *options)
    assert (done.code, done.out) == (2, "")
    assert tree(place.path) == before
    message, code = done.err.rsplit("  code: ", 1)
    assert "Traceback" not in message and re.fullmatch(r"E\d{4}\n", code)
    return message.replace(str(place.path), "DIR")


def with_rows(place: Workplace, **changes: Callable[[np.ndarray], Any] | None) -> None:
    """Rewrites the rows with columns changed, or removed where the change is None."""
    columns: dict[str, Any] = make_columns(400)
    for name, change in changes.items():
        if change is None:
            del columns[name]
        else:
            columns[name] = change(columns[name])
    write_rows(place.path / "rows.parquet", columns)


def put(row: int, value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(column: np.ndarray) -> np.ndarray:
        changed = column.copy()
        changed[row] = value
        return changed

    return change


# What is wrong, and how its message begins ----------------------------------------------------------


def without(*names: str) -> Callable[[Workplace], None]:
    return lambda place: [(place.path / name).unlink() for name in names] and None


def rows(**changes: Callable[[np.ndarray], Any] | None) -> Callable[[Workplace], None]:
    return lambda place: with_rows(place, **changes)


def run_file(**changes: Any) -> Callable[[Workplace], None]:
    return lambda place: place.write_run_file(**changes) and None


def truncated(place: Workplace) -> None:
    model = place.path / "ranker.onnx"
    model.write_bytes(model.read_bytes()[:500])


def without_sites(place: Workplace) -> None:
    ends = [h.make_tensor_value_info(name, T.FLOAT, ["batch", 16]) for name in ("dense", "ctr")]
    graph = h.make_graph([h.make_node("Relu", ["dense"], ["ctr"], "relu")], "none", ends[:1], ends[1:])
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, os.fspath(place.path / "ranker.onnx"))
    place.write_run_file(outputs=[CTR])


def ranker(**options: Any) -> Callable[[Workplace], None]:
    return lambda place: write_ranker(place.path / "ranker.onnx", **options)


def one_file_twice(place: Workplace) -> None:
    write_rows(place.path / "later.parquet", make_columns(400, seed=2))
    files = {"calibration": "rows.parquet", "selection": "later.parquet", "certification": "later.parquet"}
    place.write_run_file(data={"path": None, "split": None, **files})


def spoiled(change: Callable[[onnx.ModelProto, onnx.NodeProto], None]) -> Callable[[Workplace], None]:
    """Changes the model at its second activation."""

    def spoil(place: Workplace) -> None:
        model = onnx.load(place.path / "ranker.onnx")
        change(model, next(node for node in model.graph.node if node.name == "relu2"))
        onnx.save(model, place.path / "ranker.onnx")

    return spoil


@spoiled
def couple_rows(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    """A Softmax over the batch."""
    node.op_type = "Softmax"
    node.attribute.append(h.make_attribute("axis", 0))


@spoiled
def pair_rows(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    """It needs an even number of rows."""
    node.op_type = "Reshape"
    node.input.append("pairs")
    node.output[0] = "paired"
    model.graph.node.insert(6, h.make_node("Reshape", ["paired", "flat"], ["a2"], "back"))
    shapes = {"pairs": np.array([-1, 2, HIDDEN]), "flat": np.array([-1, HIDDEN])}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v, name) for name, v in shapes.items())


OF_ROWS = "of 'rows.parquet'"
WRONG: dict[str, tuple[Callable[[Workplace], None], str]] = {
    "no run file": (without("RUN.yaml"), "DIR/RUN.yaml: cannot read the run file"),
    "no data file": (
        without("rows.parquet"),
        "DIR/RUN.yaml:18: `data.path` names a file that does not exist",
    ),
    "unknown key": (run_file(bacth={"max": 8}), "DIR/RUN.yaml:59: unknown key 'bacth'"),
    "no kind": (
        run_file(outputs=[{"name": "ctr", "label": "clicked"}]),
        "DIR/RUN.yaml:4: `outputs[0]` lacks the key 'kind'",
    ),
    "another kind": (
        run_file(outputs=[{**CTR, "kind": "probability"}]),
        "output 'ctr' of the FP32 reference is declared a probability",
    ),
    "unknown output": (
        run_file(outputs=[{**CTR, "name": "crt"}]),
        "'DIR/ranker.onnx' has no output named 'crt'",
    ),
    "no column": (rows(d3=None), f"column 'd3' {OF_ROWS} does not exist"),
    "text": (rows(d3=lambda column: ["young"] * len(column)), f"column 'd3' {OF_ROWS} holds strings"),
    "NaN": (rows(d3=put(7, np.nan)), f"column 'd3' {OF_ROWS} holds NaN"),
    "infinity": (rows(amount=put(7, np.inf)), f"column 'amount' {OF_ROWS} holds infinity"),
    "an id": (rows(item_id=put(17, 40)), f"column 'item_id' {OF_ROWS} holds ids outside its embedding table"),
    "a label": (
        rows(clicked=put(3, 2.0)),
        "'rows.parquet hash(request, seed 0)[0.5:1.0]': column 'clicked' holds labels outside [0, 1]",
    ),
    "a weight": (
        rows(importance=put(3, -2.0)),
        "'rows.parquet hash(request, seed 0)[0.5:1.0]': column 'importance' holds negative row weights",
    ),
    "no rows": (
        lambda place: write_rows(place.path / "rows.parquet", make_columns(0)),
        "DIR/rows.parquet: the data file holds no rows",
    ),
    "one file twice": (one_file_twice, "data: selection and certification are the same file"),
    "truncated": (truncated, "'DIR/ranker.onnx' is not an ONNX model, or is truncated"),
    "no sites": (without_sites, "'DIR/ranker.onnx' has no sites"),
    "a custom operator": (
        ranker(domain="acme"),
        "node 'relu2': 'DIR/ranker.onnx' uses the custom operator 'acme::Fancy'",
    ),
    "an old opset": (ranker(opset=10), "'DIR/ranker.onnx' uses opset 10"),
    "rows are coupled": (couple_rows, "node 'relu2/softmax' (Softmax): 'DIR/ranker.onnx' couples the rows "),
    "fails at one row": (
        pair_rows,
        "node 'relu2/reshape' (Reshape): 'DIR/ranker.onnx' fails at a batch size",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_input_is_refused_and_leaves_nothing(place, command, case):
    spoil, begins = WRONG[case]
    spoil(place)
    message = refusal(command, place)
    assert message.startswith(f"error: {begins}"), message
    assert "\n  evidence: " in message and "\n  remedy: " in message


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
    message = refusal(command, place, "--set", setting)
    assert message.startswith(f"error: {begins}") and "the nearest of " in message and near in message


@pytest.mark.slow
def test_a_model_that_couples_rows_goes_on_where_that_is_asked_for(place, command):
    couple_rows(place)
    done = command("doctor", "--model", place.path / "ranker.onnx")
    assert "✗ node 'relu2/softmax' (Softmax) couples the rows of a batch" in done.out
    place.write_run_file(model={"require_independent_rows": False})
    result = run(place.run_file, RunOptions(until=Stage.REPORT))
    (note,) = (note for note in result.report.notes if "node 'relu2/softmax' (Softmax)" in note)
    assert "`model.require_independent_rows` is false" in note


@pytest.mark.slow
def test_a_mod_that_fails_costs_the_run_nothing_but_the_mod(place, monkeypatch):
    def match(mod: PadSites, model: GraphModel) -> Found[Any]:
        model.graph.nodes.clear()
        raise RecursionError("too deep")

    monkeypatch.delenv(STRICT)
    monkeypatch.setattr(PadSites, "match", match)
    result = run(place.run_file, RunOptions(until=Stage.REPORT))
    log = serde.read(RewriteLog, result.directory / "model" / "mods.json")
    record = next(record for record in log.records if record.transform == PadSites.name)
    assert record.rolled_back
    assert "RecursionError: too deep" in record.declined[0].reason
    assert all("RecursionError: too deep" in file.read_text("utf-8") for file in result.report_files)


class _RunsCode:
    """Pickles into something that makes a file when it is loaded carelessly."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.trace,))


def test_checkpoint_that_holds_more_than_weights(place, command, tmp_path):
    pytest.importorskip("torch", reason="needs torch")
    import torch

    (place.path / "careless_ranker.py").write_text(
        "import numpy, torch\n"
        "def build():\n"
        "    return torch.nn.Linear(16, 1), {'dense': numpy.zeros((1, 16), numpy.float32)}\n"
    )
    trace = tmp_path / "code-ran"
    torch.save({"weight": _RunsCode(trace)}, place.path / "weights.pt")
    place.write_run_file(
        model={"onnx": None, "torch": "careless_ranker:build", "checkpoint": "weights.pt"},
        outputs=[CTR],
        data={"inputs": {"dense": RUN_VALUES["data"]["inputs"]["dense"]}},
    )
    (place.path / "__pycache__").mkdir()  # importing the builder fills it
    before = tree(place.path)
    done = command("run", place.run_file, "--quiet")
    left = set(tree(place.path)) - set(before)
    assert (done.code, {name for name in left if not name.startswith("__pycache__")}) == (2, set())
    assert not trace.exists()
    message = done.err.replace(str(place.path), "DIR")
    assert message.startswith("error: DIR/weights.pt: the checkpoint holds more than weights")


# The output directory ------------------------------------------------------------------------------


# A mode of 0o555 would not stop root; /proc stops everyone.
@pytest.mark.parametrize("output", ["out", "out/run", "/proc/loka-onnx/run"])
def test_a_place_where_nothing_can_be_made(place, command, output):
    (place.path / "out").write_text("mine")
    message = refusal(command, place, "--output", place.path / output)
    assert message.startswith(f"error: cannot use the output directory '{Path('DIR') / output}'\n")


@pytest.mark.parametrize("option", [(), ("--force",), ("--resume",)])
def test_a_directory_of_something_else_is_never_touched(place, command, option):
    (place.path / "thesis" / "data").mkdir(parents=True)
    (place.path / "thesis" / "report.html").write_text("ten years of work")
    message = refusal(command, place, "--output", place.path / "thesis", *option)
    assert message.startswith("error: the output directory 'DIR/thesis' is not empty and not a run directory")


def test_a_finished_run_is_neither_extended_nor_replaced_unasked(finished, command):
    done = command("run", finished.directory.parents[1] / "RUN.yaml", "--quiet")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: the output directory '{finished.directory}' is not empty\n")


def test_force_and_resume(place, command):
    assert "--force and --resume exclude each other" in refusal(command, place, "--force", "--resume")


def test_an_empty_directory_of_the_user_stays(place, command):
    (place.path / "mine").mkdir()
    with_rows(place, d3=put(7, np.nan))
    refusal(command, place, "--output", place.path / "mine")


@pytest.mark.slow
def test_force_gives_the_earlier_run_back_when_the_new_input_is_wrong(place, command):
    assert command("plan", place.run_file, "--quiet").code == 0
    with_rows(place, d3=put(7, np.nan))
    assert "holds NaN" in refusal(command, place, "--force")
    write_ranker(place.path / "ranker.onnx", opset=10)
    assert "uses opset 10" in refusal(command, place, "--force")


def test_debug_adds_the_traceback(place, command):
    place.run_file.unlink()
    done = command("run", place.run_file, "--debug")
    assert done.code == 2
    assert "Traceback" in done.err and done.err.endswith("writes one to start from\n  code: E0101\n")

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
from synthetic_runs import HIDDEN, RUN_VALUES, Workplace, call, make_columns, tree, write_ranker, write_rows

from loka_onnx.core import serde
from loka_onnx.core.rewrite import RewriteLog
from loka_onnx.graph.model import GraphModel
from loka_onnx.pipeline.run import RunOptions, RunResult, Stage, run
from loka_onnx.transforms.base import Found
from loka_onnx.transforms.linears.pad_sites import PadSites
from loka_onnx.transforms.sequence import STRICT

CTR = {"name": "ctr", "kind": "logit", "label": "clicked"}
Capture = pytest.CaptureFixture[str]


def refusal(capsys: Capture, place: Workplace, *options: object) -> str:
    """The message of a run that must be refused without a trace, with its directory shortened to DIR."""
    before = tree(place.path)
    done = call(capsys, "run", place.run_file, "--quiet", *options)
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


# The run file --------------------------------------------------------------------------------------


def test_no_run_file(place: Workplace, capsys: Capture) -> None:
    place.run_file.unlink()
    assert refusal(capsys, place) == (
        "error: DIR/RUN.yaml: cannot read the run file\n"
        "  evidence: No such file or directory\n"
        "  remedy: give the path of a YAML file; `loka-onnx demo` writes one to start from\n"
    )


def test_missing_data_file_and_the_one_that_was_meant(place: Workplace, capsys: Capture) -> None:
    (place.path / "rows.parquet").rename(place.path / "row.parquet")
    assert refusal(capsys, place) == (
        "error: DIR/RUN.yaml:18: `data.path` names a file that does not exist\n"
        "  evidence: looked for 'DIR/rows.parquet'\n"
        "  remedy: did you mean 'row.parquet'? a relative path starts at 'DIR'\n"
    )


def test_unknown_key_and_the_nearest(place: Workplace, capsys: Capture) -> None:
    place.write_run_file(bacth={"max": 8})
    assert refusal(capsys, place) == (
        "error: DIR/RUN.yaml:59: unknown key 'bacth'\n"
        "  evidence: the keys here are name, model, outputs, data, batch, calibration, mods, plan, targets, "
        "build, refine, serving, threads, output\n"
        "  remedy: did you mean 'batch'?\n"
    )


def test_undeclared_kind(place: Workplace, capsys: Capture) -> None:
    place.write_run_file(outputs=[{"name": "ctr", "label": "clicked"}])
    assert refusal(capsys, place) == (
        "error: DIR/RUN.yaml:4: `outputs[0]` lacks the key 'kind'\n"
        "  evidence: it has the keys name, label\n"
        "  remedy: add `kind`: logit, probability or regression; it decides the loss and is never guessed, "
        "because a logit read as a probability gives a loss that looks plausible and is wrong\n"
    )


def test_kind_that_the_output_contradicts(place: Workplace, capsys: Capture) -> None:
    place.write_run_file(outputs=[{**CTR, "kind": "probability"}])
    message = refusal(capsys, place)
    assert message.startswith(
        "error: output 'ctr' of the FP32 reference is declared a probability but holds values like "
    )
    assert message.endswith("  remedy: declare `kind: logit` for this output\n")


@pytest.mark.parametrize(("key", "what"), [("keep", "no site and no node"), ("force", "no site")])
def test_pattern_that_names_nothing(place: Workplace, capsys: Capture, key: str, what: str) -> None:
    assert refusal(capsys, place, "--set", f"plan.{key}=[heds]") == (
        f"error: plan.{key}: pattern 'heds' matches {what}\n"
        "  evidence: the nearest of 3 sites is 'heads'\n"
        "  remedy: `loka-onnx export` lists the sites of a model\n"
    )


def test_unknown_output(place: Workplace, capsys: Capture) -> None:
    place.write_run_file(outputs=[{**CTR, "name": "crt"}])
    assert refusal(capsys, place) == (
        "error: 'DIR/ranker.onnx' has no output named 'crt'\n"
        "  evidence: its outputs are ctr, cvr, spend\n"
        "  remedy: name one of them under `outputs`\n"
    )


# Data ----------------------------------------------------------------------------------------------


def test_missing_column(place: Workplace, capsys: Capture) -> None:
    with_rows(place, d3=None)
    assert refusal(capsys, place) == (
        "error: column 'd3' of 'rows.parquet' does not exist\n"
        "  evidence: the nearest of its 21 columns is 'd13'\n"
        "  remedy: correct the name, or map the model input to existing columns under `inputs:`\n"
    )


@pytest.mark.parametrize(
    ("setting", "key", "near"),
    [
        ("outputs.0.label=click", "outputs[0].label", "is 'clicked'"),
        ("outputs.1.weight=imp", "outputs[1].weight", "is '"),
        ("data.group=request_id", "data.group", "is '"),
        ("data.slices=[d33]", "data.slices", "are 'd3', 'd13'"),
    ],
)
def test_a_missing_column_that_is_no_input(
    place: Workplace, capsys: Capture, setting: str, key: str, near: str
) -> None:
    message = refusal(capsys, place, "--set", setting)
    assert message.startswith(f"error: column '{setting.partition('=')[2].strip('[]')}' of 'rows.parquet' ")
    assert f"  evidence: the nearest of its 22 columns {near}" in message
    assert message.endswith(f"  remedy: name an existing column in `{key}`\n")


def test_column_of_text(place: Workplace, capsys: Capture) -> None:
    with_rows(place, d3=lambda column: ["young"] * len(column))
    assert refusal(capsys, place) == (
        "error: column 'd3' of 'rows.parquet' holds strings, where the model takes float32\n"
        "  evidence: its stored type is string\n"
        "  remedy: encode it as numbers when the data are prepared, or bind another column\n"
    )


@pytest.mark.parametrize(("column", "value", "word"), [("d3", np.nan, "NaN"), ("amount", np.inf, "infinity")])
def test_value_that_is_not_finite(
    place: Workplace, capsys: Capture, column: str, value: float, word: str
) -> None:
    with_rows(place, **{column: put(7, value)})
    assert refusal(capsys, place) == (
        f"error: column '{column}' of 'rows.parquet' holds {word}\n"
        f"  evidence: 1 of 244 rows, the first is row 7: {value}\n"
        "  remedy: drop or fill the rows; model inputs and labels must be finite\n"
    )


def test_id_outside_its_embedding_table(place: Workplace, capsys: Capture) -> None:
    with_rows(place, item_id=put(17, 40))
    assert refusal(capsys, place) == (
        "error: column 'item_id' of 'rows.parquet' holds ids outside its embedding table, which takes "
        "-40 to 39\n"
        "  evidence: 1 of 104 rows, the first is row 17: 40\n"
        "  remedy: map unknown ids to a reserved row when the data are prepared, or export a model with a "
        "larger table\n"
    )


def test_label_and_weight_out_of_range(place: Workplace, capsys: Capture) -> None:
    with_rows(place, clicked=put(3, 2.0))
    assert refusal(capsys, place) == (
        "error: 'rows.parquet hash(request, seed 0)[0.5:1.0]': column 'clicked' holds labels outside [0, 1], "
        "but output 'ctr' is a logit\n"
        "  evidence: 1 of 244 rows, the first is row 3: 2\n"
        "  remedy: map the labels to [0, 1], or declare `kind: regression` for this output\n"
    )
    with_rows(place, importance=put(3, -2.0))
    assert "column 'importance' holds negative row weights" in refusal(capsys, place)


def test_no_rows(place: Workplace, capsys: Capture) -> None:
    write_rows(place.path / "rows.parquet", make_columns(0))
    assert refusal(capsys, place) == (
        "error: DIR/rows.parquet: the data file holds no rows\n"
        "  evidence: its row count is 0\n"
        "  remedy: point at a file with rows\n"
    )


def test_one_file_for_two_splits(place: Workplace, capsys: Capture) -> None:
    write_rows(place.path / "later.parquet", make_columns(400, seed=2))
    files = {"calibration": "rows.parquet", "selection": "later.parquet", "certification": "later.parquet"}
    place.write_run_file(data={"path": None, "split": None, **files})
    message = refusal(capsys, place)
    assert message.startswith(
        "error: data: selection and certification are the same file; certification is looked at once, and "
        "plans are chosen on selection, so that it cannot also judge the choice\n"
        "  evidence: selection is 'later.parquet', certification is 'later.parquet', content sha256 "
    )
    assert message.endswith("  remedy: give three files, or one file with a split rule\n")


# Models --------------------------------------------------------------------------------------------


def test_truncated_model(place: Workplace, capsys: Capture) -> None:
    model = place.path / "ranker.onnx"
    whole = model.read_bytes()
    model.write_bytes(whole[: len(whole) // 2])
    message = refusal(capsys, place)
    assert message.startswith(
        "error: 'DIR/ranker.onnx' is not an ONNX model, or is truncated\n"
        f"  evidence: {len(whole) // 2} bytes; "
    )
    assert message.endswith("  remedy: export or copy the file again\n")


def test_model_without_sites(place: Workplace, capsys: Capture) -> None:
    ends = [h.make_tensor_value_info(name, T.FLOAT, ["batch", 16]) for name in ("dense", "ctr")]
    graph = h.make_graph([h.make_node("Relu", ["dense"], ["ctr"], "relu")], "none", ends[:1], ends[1:])
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, os.fspath(place.path / "ranker.onnx"))
    place.write_run_file(outputs=[CTR])
    assert refusal(capsys, place) == (
        "error: 'DIR/ranker.onnx' has no sites\n"
        "  evidence: none of its 1 nodes is a MatMul or Gemm of an activation\n"
        "  remedy: FP8 has nothing to offer to a model without matrix products\n"
    )


def test_custom_operator(place: Workplace, capsys: Capture) -> None:
    write_ranker(place.path / "ranker.onnx", domain="acme")
    assert refusal(capsys, place) == (
        "error: node 'relu2': 'DIR/ranker.onnx' uses the custom operator 'acme::Fancy'\n"
        "  evidence: no standard operator set defines it, so its FP8 error cannot be measured\n"
        "  remedy: export it as standard operators, or cut it off in front of the model\n"
    )


def couple_rows(place: Workplace) -> None:
    """The second layer is a Softmax over the batch."""
    path = place.path / "ranker.onnx"
    model = onnx.load(path)
    node = next(node for node in model.graph.node if node.name == "relu2")
    node.op_type = "Softmax"
    node.attribute.append(h.make_attribute("axis", 0))
    onnx.save(model, path)


def test_a_model_that_couples_rows(place: Workplace, capsys: Capture) -> None:
    couple_rows(place)
    message = refusal(capsys, place)
    assert message.startswith("error: node 'relu2/softmax' (Softmax): 'DIR/ranker.onnx' couples the rows ")
    assert "`model.require_independent_rows: false`" in message


@pytest.mark.slow
def test_a_model_that_couples_rows_goes_on_where_that_is_asked_for(place: Workplace) -> None:
    couple_rows(place)
    place.write_run_file(model={"require_independent_rows": False})
    result = run(place.run_file, RunOptions(until=Stage.REPORT))
    assert result.report is not None
    (note,) = (note for note in result.report.notes if "node 'relu2/softmax' (Softmax)" in note)
    assert "`model.require_independent_rows` is false" in note


@pytest.mark.slow
def test_a_mod_that_fails_costs_the_run_nothing_but_the_mod(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_model_that_fails_at_the_smallest_batch(place: Workplace, capsys: Capture) -> None:
    path = place.path / "ranker.onnx"
    model = onnx.load(path)
    node = next(node for node in model.graph.node if node.name == "relu2")
    node.op_type = "Reshape"
    node.input.append("pairs")
    node.output[0] = "paired"
    back = h.make_node("Reshape", ["paired", "flat"], ["a2"], "back")
    model.graph.node.insert(6, back)
    shapes = {"pairs": np.array([-1, 2, HIDDEN]), "flat": np.array([-1, HIDDEN])}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v, name) for name, v in shapes.items())
    onnx.save(model, path)
    message = refusal(capsys, place)
    assert message.startswith(
        "error: node 'relu2/reshape' (Reshape): 'DIR/ranker.onnx' fails at a batch size"
    )
    assert "batch of 1 rows" in message


def test_old_operator_set(place: Workplace, capsys: Capture) -> None:
    write_ranker(place.path / "ranker.onnx", opset=10)
    assert refusal(capsys, place) == (
        "error: 'DIR/ranker.onnx' uses opset 10\n"
        "  evidence: opsets 11 and up are converted to 21\n"
        "  remedy: export the model again with opset_version=21\n"
    )


class _RunsCode:
    """Pickles into something that makes a file when it is loaded carelessly."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.trace,))


def test_checkpoint_that_holds_more_than_weights(place: Workplace, capsys: Capture, tmp_path: Path) -> None:
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
    done = call(capsys, "run", place.run_file, "--quiet")
    left = set(tree(place.path)) - set(before)
    assert (done.code, {name for name in left if not name.startswith("__pycache__")}) == (2, set())
    assert not trace.exists()
    message = done.err.replace(str(place.path), "DIR")
    assert message.startswith(
        "error: DIR/weights.pt: the checkpoint holds more than weights, or is broken; loading it could run "
        "code\n  evidence: "
    )
    assert message.endswith(
        "  remedy: save the weights alone: torch.save(model.state_dict(), path), or a .safetensors file\n"
        "  code: E0402\n"
    )


# The output directory ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("below", "evidence"),
    [("out", "[Errno 17] File exists: 'DIR/out'"), ("out/run", "[Errno 20] Not a directory: 'DIR/out/run'")],
)
def test_a_file_in_the_way(place: Workplace, capsys: Capture, below: str, evidence: str) -> None:
    (place.path / "out").write_text("mine")
    assert refusal(capsys, place, "--output", place.path / below) == (
        f"error: cannot use the output directory 'DIR/{below}'\n"
        f"  evidence: {evidence}\n"
        "  remedy: choose another directory with --output\n"
    )


def test_a_place_where_nothing_can_be_made(place: Workplace, capsys: Capture) -> None:
    # A mode of 0o555 would not stop root; /proc stops everyone.
    message = refusal(capsys, place, "--output", "/proc/loka-onnx/run")
    assert message.startswith("error: cannot use the output directory '/proc/loka-onnx/run'\n  evidence: ")


@pytest.mark.parametrize("option", [(), ("--force",), ("--resume",)])
def test_a_directory_of_something_else_is_never_touched(
    place: Workplace, capsys: Capture, option: tuple[str, ...]
) -> None:
    (place.path / "thesis" / "data").mkdir(parents=True)
    (place.path / "thesis" / "report.html").write_text("ten years of work")
    assert refusal(capsys, place, "--output", place.path / "thesis", *option) == (
        "error: the output directory 'DIR/thesis' is not empty and not a run directory\n"
        "  evidence: it holds data, report.html, and no run.json of a run\n"
        "  remedy: choose an empty directory with --output\n"
    )


def test_a_finished_run_is_neither_extended_nor_replaced_unasked(
    finished: RunResult, capsys: Capture
) -> None:
    done = call(capsys, "run", finished.directory.parents[1] / "RUN.yaml", "--quiet")
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        f"error: the output directory '{finished.directory}' is not empty\n"
        "  evidence: it holds bundle, calibration, choice.json, corrections.json …\n"
        "  remedy: pass --resume to go on from its last finished stage, or --force to start over\n"
        "  code: E1505\n"
    )


def test_force_and_resume(place: Workplace, capsys: Capture) -> None:
    assert refusal(capsys, place, "--force", "--resume") == (
        "error: --force and --resume exclude each other\n"
        "  evidence: one removes the earlier run, the other goes on with it\n"
        "  remedy: give one of them\n"
    )


def test_an_empty_directory_of_the_user_stays(place: Workplace, capsys: Capture) -> None:
    (place.path / "mine").mkdir()
    with_rows(place, d3=put(7, np.nan))
    refusal(capsys, place, "--output", place.path / "mine")


def test_force_gives_the_earlier_run_back_when_the_new_input_is_wrong(
    place: Workplace, capsys: Capture
) -> None:
    assert call(capsys, "plan", place.run_file, "--quiet").code == 0
    with_rows(place, d3=put(7, np.nan))
    assert "holds NaN" in refusal(capsys, place, "--force")
    write_ranker(place.path / "ranker.onnx", opset=10)
    assert "uses opset 10" in refusal(capsys, place, "--force")


def test_debug_adds_the_traceback(place: Workplace, capsys: Capture) -> None:
    place.run_file.unlink()
    done = call(capsys, "run", place.run_file, "--debug")
    assert done.code == 2
    assert "Traceback" in done.err and done.err.endswith("writes one to start from\n  code: E0101\n")
